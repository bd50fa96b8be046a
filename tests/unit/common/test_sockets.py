"""Who may be called what in a runtime directory, and how the name changes hands."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.sockets import RuntimeDir

NAME = "runner-0"
LIMIT_S = 20.0


@pytest.fixture
def names(tmp_path: Path) -> RuntimeDir:
    return RuntimeDir(tmp_path)


@contextmanager
def waiting(names: RuntimeDir) -> Iterator[threading.Thread]:
    """Somebody who waits until the name is free."""
    thread = threading.Thread(target=names.wait_until_free, args=(NAME,), daemon=True)
    thread.start()
    yield thread
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_name_has_one_holder(names: RuntimeDir) -> None:
    with (
        names.lock(NAME),
        names.lock("runner-1"),
        pytest.raises(ConfigurationError, match="another runner-0 serves"),
        names.lock(NAME),
    ):
        raise AssertionError("two hold it")


def test_the_kernel_frees_the_name_of_a_dead_process(names: RuntimeDir) -> None:
    holds = (
        "import sys, time; from pathlib import Path; from pagekeeper.common.sockets import RuntimeDir\n"
        f"with RuntimeDir(Path({str(names.path)!r})).lock({NAME!r}): print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigurationError), names.lock(NAME):
            raise AssertionError("a living process holds it")
        process.kill()
        with names.lock(NAME, wait_s=LIMIT_S):
            pass


def test_who_waits_for_a_name_gets_it_from_its_holder(names: RuntimeDir) -> None:
    first = names.lock(NAME)
    first.__enter__()
    threading.Timer(0.1, first.__exit__, (None, None, None)).start()
    with names.lock(NAME, wait_s=LIMIT_S), pytest.raises(ConfigurationError), names.lock(NAME):
        raise AssertionError("two hold it")


def test_only_one_process_takes_over_at_a_time(names: RuntimeDir) -> None:
    with names.succession(NAME), pytest.raises(ConfigurationError, match="takes over"), names.succession(NAME):
        raise AssertionError("two take over")


def test_a_name_is_free_when_neither_its_holder_nor_a_successor_is_left(names: RuntimeDir) -> None:
    first, second = names.lock(NAME), names.lock(NAME, wait_s=LIMIT_S)
    successor = names.succession(NAME)
    first.__enter__()
    with waiting(names) as thread:
        successor.__enter__()
        first.__exit__(None, None, None)
        thread.join(0.1)
        assert thread.is_alive()
        second.__enter__()
        successor.__exit__(None, None, None)
        thread.join(0.1)
        assert thread.is_alive()
        second.__exit__(None, None, None)


def test_a_name_that_nobody_has_is_free(names: RuntimeDir) -> None:
    names.wait_until_free(NAME)
    with names.lock(NAME):
        pass
