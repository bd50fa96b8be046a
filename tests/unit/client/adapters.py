"""One way to use either client from an event loop, so that both pass the same tests."""

import asyncio
from typing import Any, Protocol

from pagekeeper import Answer, AsyncAnswer, AsyncClient, Beam, Candidate, Client, Delta


class Adapter(Protocol):
    """`generate` gives the client's own answer; whatever reads it goes through here."""

    client: Any

    def generate(self, *args: Any, **options: Any) -> Any: ...
    async def next(self, answer: Any) -> Delta | None: ...
    async def leave_loop(self, answer: Any) -> None: ...
    async def leave_block(self, answer: Any) -> None: ...
    async def collect(self, answer: Any) -> list[Candidate]: ...
    async def text(self, answer: Any) -> str: ...
    async def intermediate(self, answer: Any) -> list[list[Beam]]: ...
    async def ask(self, method: str, *args: Any, **options: Any) -> Any: ...
    async def close(self) -> None: ...


class SyncAdapter:
    """Calls that wait run on a thread."""

    def __init__(self, server: str, **options: Any) -> None:
        self.client = Client(server, **options)

    def generate(self, *args: Any, **options: Any) -> Answer:
        return self.client.generate(*args, **options)

    async def next(self, answer: Answer) -> Delta | None:
        return await asyncio.to_thread(next, answer, None)

    async def leave_loop(self, answer: Answer) -> None:
        def loop() -> None:
            for _ in answer:
                break

        await asyncio.to_thread(loop)

    async def leave_block(self, answer: Answer) -> None:
        def block() -> None:
            with answer:
                next(answer)

        await asyncio.to_thread(block)

    async def collect(self, answer: Answer) -> list[Candidate]:
        return await asyncio.to_thread(answer.collect)

    async def text(self, answer: Answer) -> str:
        return await asyncio.to_thread(answer.text)

    async def intermediate(self, answer: Answer) -> list[list[Beam]]:
        return await asyncio.to_thread(lambda: list(answer.intermediate()))

    async def ask(self, method: str, *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, method), *args, **options)

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


class AsyncAdapter:
    """Calls as they are."""

    def __init__(self, server: str, **options: Any) -> None:
        self.client = AsyncClient(server, **options)

    def generate(self, *args: Any, **options: Any) -> AsyncAnswer:
        return self.client.generate(*args, **options)

    async def next(self, answer: AsyncAnswer) -> Delta | None:
        return await anext(answer, None)

    async def leave_loop(self, answer: AsyncAnswer) -> None:
        async for _ in answer:
            break

    async def leave_block(self, answer: AsyncAnswer) -> None:
        async with answer:
            await anext(answer)

    async def collect(self, answer: AsyncAnswer) -> list[Candidate]:
        return await answer.collect()

    async def text(self, answer: AsyncAnswer) -> str:
        return await answer.text()

    async def intermediate(self, answer: AsyncAnswer) -> list[list[Beam]]:
        return [beams async for beams in answer.intermediate()]

    async def ask(self, method: str, *args: Any, **options: Any) -> Any:
        return await getattr(self.client, method)(*args, **options)

    async def close(self) -> None:
        await self.client.close()


ADAPTERS = {"sync": SyncAdapter, "async": AsyncAdapter}
