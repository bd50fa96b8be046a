"""Clients that read one greedy stream after another, as many at a time as there are slots."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Self

from bench.chaos.streams import Expected, Stream
from bench.chaos.workload import Prompt
from pagekeeper.client import AsyncAnswer, AsyncClient
from pagekeeper.common.errors import PagekeeperError

STREAM_LIMIT_S = 600.0
"""A stream that takes longer counts as lost; it may be hit by dozens of faults."""
_PAUSE_AFTER_ERROR_S = 0.2
_FEWEST_AT_ONCE = 8
_FIRST_PLAIN_TOKEN = 16


class Load:
    """Uses the public client and nothing else: what that resumes by itself is no loss, and what it raises is one.

    Args:
        address: of the gateway.
        prompts: asked for in turn.
        num_slots: streams at a time.

    Attributes:
        streams: every stream since `expect` has ended, the running ones included, in the order in which they began.
        expected: the fault-free answer to each prompt.
    """

    def __init__(self, address: str, prompts: Sequence[Prompt], num_slots: int) -> None:
        self._client = AsyncClient(address)
        self._prompts = prompts
        self._num_slots = num_slots
        self._is_open = True
        self._slots: list[asyncio.Task[None]] = []
        self._running: list[Stream | None] = [None] * num_slots
        self._turn: Iterator[int] = itertools.cycle(range(len(prompts)))
        self.streams: list[Stream] = []
        self.expected: list[Expected] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await self._client.close()

    async def expect(self) -> None:
        """Ask for every prompt once, before anything happens.

        Raises:
            PagekeeperError: a stream failed although nothing happened.
        """
        permits = asyncio.Semaphore(max(self._num_slots, _FEWEST_AT_ONCE))

        async def ask(prompt: Prompt) -> Expected:
            async with permits:
                candidates = await self._ask(prompt).collect()
            return Expected(tuple(candidates[0].token_ids), candidates[0].text)

        self.expected = list(await asyncio.gather(*map(ask, self._prompts)))

    async def try_lengths(self, longest: int) -> None:
        """Ask for one token after a prompt of each length, none of which is in the cache."""
        for length in range(1, longest + 1):
            await self._ask(Prompt((_FIRST_PLAIN_TOKEN + length,) * length, max_tokens=1)).collect()

    def start(self) -> None:
        """Begin streams in every slot, one after another."""
        self._is_open = True
        self._slots = [asyncio.create_task(self._fill(slot)) for slot in range(self._num_slots)]

    async def drain(self) -> None:
        """Begin no stream any more, and wait for those that run."""
        self._is_open = False
        await asyncio.gather(*self._slots)

    @property
    def num_live(self) -> int:
        """Streams under way now."""
        return sum(stream is not None for stream in self._running)

    def all_have_run_since(self, moment: float) -> bool:
        """Whether each slot has a stream that got tokens after that moment."""
        for slot in self._slots:
            if slot.done():
                slot.result()
        return all(stream is not None and stream.arrivals[-1:] > [moment] for stream in self._running)

    async def _fill(self, slot: int) -> None:
        while True:
            number = next(self._turn)
            stream = self._running[slot] = Stream(number, time.monotonic())
            self.streams.append(stream)
            await self._read(stream, self._prompts[number])
            self._running[slot] = None
            if not self._is_open:
                return
            if stream.error:
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _read(self, stream: Stream, prompt: Prompt) -> None:
        answer = self._ask(prompt)
        try:
            async for delta in answer:
                stream.take(time.monotonic(), delta.position, delta.token_ids, delta.text)
        except PagekeeperError as error:
            stream.fail(time.monotonic(), f"{type(error).__name__}: {error}")
            return
        if answer.usage is None:
            stream.fail(time.monotonic(), "the answer ended without usage")
            return
        stream.finish(time.monotonic(), self.expected[stream.prompt], answer.usage.recomputed_tokens)

    def _ask(self, prompt: Prompt) -> AsyncAnswer:
        return self._client.generate(
            prompt.token_ids,
            temperature=0.0,
            max_tokens=prompt.max_tokens,
            ignore_eos=True,
            timeout_s=STREAM_LIMIT_S,
        )
