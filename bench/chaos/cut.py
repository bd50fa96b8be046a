"""Stands before a Unix socket, so that one connection can be broken while both of its ends live on."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Self


class Cut:
    """Passes bytes on until `cut`. Whoever connected before it was put there is not concerned."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for server in self._servers:
            server.close()
        self.cut()

    async def put_before(self, socket: Path) -> None:
        """Take the path of a socket that somebody listens on, who keeps listening under another name."""
        behind = socket.with_suffix(".direct")
        os.rename(socket, behind)  # noqa: PTH104 - Path's own would count as blocking

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_unix_connection(behind)
                self._writers |= {writer, far_writer}
                await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))

        self._servers.append(await asyncio.start_unix_server(serve, socket))

    def cut(self) -> None:
        """Break every connection that leads through here; new ones may come."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
