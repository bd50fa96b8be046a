"""A promise, and what it may use to show that it is kept."""

import functools
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from bench.reference import Reference
from pagekeeper.cli.generate import Result, collect
from pagekeeper.cli.server import Server
from pagekeeper.client import Client, Message, Sampling


@dataclass(frozen=True)
class Outcome:
    """What was measured, what it is held against, and whether it is enough."""

    figure: str
    bound: str
    passed: bool


@dataclass(frozen=True)
class Promise:
    """One row of the table; `measure` may raise, which fails the row."""

    name: str
    measure: "Callable[[Workbench], Outcome]"


@dataclass(frozen=True)
class Request:
    """A prompt and how to sample from it."""

    prompt: str | list[int] | list[Message]
    sampling: Sampling


def greedy(prompt: str | list[int] | list[Message], max_tokens: int = 64) -> Request:
    """The request that has one right answer."""
    return Request(prompt, Sampling(temperature=0.0, max_tokens=max_tokens))


class Workbench:
    """Real servers on the demo model, started when first asked for and stopped with the `with` block."""

    def __init__(self, model: Path) -> None:
        self.model = model

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pk-")))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def start(self, *flags: str, **environment: str) -> Server:
        """A server of one's own; a context manager. Its runtime directory is `runtime_dir`."""
        number = len(list(self.folder.glob("*.log")))
        log = self.folder / f"{number}.log"
        log.touch()
        return Server("--model", str(self.model), *flags, log=log, environment=environment)

    @functools.cached_property
    def server(self) -> Server:
        """The server that promises share which leave it as they found it."""
        return self._stack.enter_context(self.start("--pool-size", "512MiB", "--runtime-dir", str(self.runtime_dir)))

    @functools.cached_property
    def runtime_dir(self) -> Path:
        """Where the shared server has its internal sockets."""
        path = self.folder / "run"
        path.mkdir(mode=0o700)
        return path

    @functools.cached_property
    def reference(self) -> Reference:
        """The same weights in transformers."""
        return Reference(self.model)


def ask(server: Server, request: Request, *, stream: bool = True, **more: Unpack[Sampling]) -> Result:
    """Send one request and wait for the whole answer."""
    began = time.monotonic()
    with Client(server.address) as client:
        return collect(client.generate(request.prompt, stream=stream, **(request.sampling | more)), began)


def ask_all(server: Server, requests: list[Request]) -> list[Result]:
    """Send all requests at the same time, each on a connection of its own; the answers in the same order."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda request: ask(server, request), requests))
