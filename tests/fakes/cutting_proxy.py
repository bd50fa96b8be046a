"""A TCP proxy that cuts its connections in the middle of whatever they carry."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Self


class CuttingProxy:
    """Use as `async with CuttingProxy(address, cuts) as proxy`.

    Args:
        target: address of the server.
        cuts: for each connection in order, the bytes that the server may send before it is cut; later ones never are.
        leaves_server: the server is not told of a cut, as if the client's machine had gone.

    Attributes:
        address: where clients connect.
        cuts: those that are left.
        num_connections: so far.
    """

    def __init__(self, target: str, cuts: Iterable[int] = (), *, leaves_server: bool = False) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._leaves_server = leaves_server
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: list[asyncio.StreamWriter] = []
        self.cuts = list(cuts)
        self.num_connections = 0
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self.cut()
        for writer in self._left:
            writer.transport.abort()

    async def cut(self) -> None:
        """Cut every connection now."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        allowance = self.cuts.pop(0) if self.cuts else None
        task = asyncio.create_task(self._carry(reader, writer, allowance))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter, allowance: int | None
    ) -> None:
        server, to_server = await asyncio.open_connection(self._host, self._port)
        upwards = asyncio.create_task(_copy(client, to_server, None))
        try:
            with contextlib.suppress(ConnectionError):
                await _copy(server, to_client, allowance)
        finally:
            upwards.cancel()
            await asyncio.gather(upwards, return_exceptions=True)
            to_client.transport.abort()
            if self._leaves_server:
                self._left.append(to_server)
            else:
                to_server.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, allowance: int | None) -> None:
    """Until the end, or until so many bytes have passed."""
    while allowance != 0 and (data := await reader.read(2**16 if allowance is None else allowance)):
        writer.write(data)
        await writer.drain()
        if allowance is not None:
            allowance -= len(data)
