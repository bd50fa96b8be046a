"""Fixtures that every kind of test shares.

Tests that leave a server as they found it share one: `stack` on a tiny random model, `demo_stack` on the demo model.
After each of them the pool must be whole and empty of sequences. Tests that need their own flags, or that kill
something, start their own with `start_server`.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pagekeeper.cli.demo_model import demo_model_path
from pagekeeper.cli.server import Server
from tests.nothing_left import check_nothing_is_left

# Read when triton is first imported, by whichever test does it: kernels are interpreted in this process, and whatever
# compiles them does so in one of its own. On a GPU, run the tests marked gpu by themselves, with 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

KINDS = ("gpu", "docker", "peer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever does not say what it needs runs on any machine."""
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker(pytest.mark.cpu)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory for Unix sockets: private, and with a path far shorter than pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="pk-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random model with a tokenizer and a chat template."""
    from tests.models import write_tiny_model  # imports torch, which most tests do without

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of the demo model, which `make test` has fetched."""
    path = demo_model_path()
    if not path.is_dir():
        pytest.fail(f"the demo model is not in {path}; run: pagekeeper model fetch smollm2")
    return path


@pytest.fixture
def start_server(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server of one's own: `start_server("--pool-size", "1MiB")`, on the tiny model unless told otherwise."""
    with ExitStack() as servers:

        def start(*flags: str, model: Path = tiny_model, **environment: str) -> Server:
            log = tmp_path / f"server-{time.monotonic_ns()}.log"
            environment = {"PAGEKEEPER_THREADS": "1"} | environment
            return servers.enter_context(Server("--model", str(model), *flags, log=log, environment=environment))

        yield start


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server behind `stack`."""
    log = tmp_path_factory.mktemp("tiny-server") / "log"
    flags = ("--model", str(tiny_model), "--pool-size", "4MiB")
    with Server(*flags, log=log, environment={"PAGEKEEPER_THREADS": "1"}) as server:
        yield server


@pytest.fixture
def stack(tiny_server: Server) -> Iterator[Server]:
    """A running server on the tiny model, in which no block may be lost."""
    yield tiny_server
    check_nothing_is_left(tiny_server)


@pytest.fixture(scope="session")
def demo_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server behind `demo_stack`."""
    log = tmp_path_factory.mktemp("demo-server") / "log"
    with Server("--model", str(demo_model), "--pool-size", "512MiB", log=log) as server:
        yield server


@pytest.fixture
def demo_stack(demo_server: Server) -> Iterator[Server]:
    """A running server on the demo model, in which no block may be lost; mark such tests `model`."""
    yield demo_server
    check_nothing_is_left(demo_server)
