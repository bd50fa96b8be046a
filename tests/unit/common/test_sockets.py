"""Who may be called what in a runtime directory, and how the name changes hands."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagekeeper.common.errors import ConfigurationError, UnavailableError
from pagekeeper.common.sockets import RuntimeDir

NAME = "runner-0"
LIMIT_S = 20.0


@pytest.fixture
def names(tmp_path: Path) -> RuntimeDir:
    return RuntimeDir(tmp_path)


@contextmanager
def waiting_for_the_name(names: RuntimeDir) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=names.wait_until_free, args=(NAME,), daemon=True)
    thread.start()
    yield thread
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_name_has_one_holder(names: RuntimeDir) -> None:
    holders = [names.claim(NAME), names.claim("runner-1")]
    with pytest.raises(ConfigurationError, match="another runner-0 serves"):
        names.claim(NAME)
    for descriptor in holders:
        os.close(descriptor)


def test_the_kernel_frees_the_name_of_a_dead_process(names: RuntimeDir) -> None:
    claims = (
        "import sys, time; from pathlib import Path; from pagekeeper.common.sockets import RuntimeDir\n"
        f"RuntimeDir(Path({str(names.path)!r})).claim({NAME!r}); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", claims], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigurationError):
            names.claim(NAME)
        process.kill()
        os.close(names.claim(NAME, wait_s=LIMIT_S))


def test_who_waits_for_a_name_gets_it_from_its_holder(names: RuntimeDir) -> None:
    threading.Timer(0.1, os.close, (names.claim(NAME),)).start()
    os.close(names.claim(NAME, wait_s=LIMIT_S))


def test_only_one_process_takes_over_at_a_time(names: RuntimeDir) -> None:
    with names.succession(NAME), pytest.raises(UnavailableError, match="takes over"), names.succession(NAME):
        raise AssertionError("two take over")


def test_a_name_is_free_when_neither_its_holder_nor_a_successor_is_left(names: RuntimeDir) -> None:
    first = names.claim(NAME)
    with waiting_for_the_name(names) as thread:
        with names.succession(NAME):
            os.close(first)
            thread.join(0.1)
            assert thread.is_alive()
            second = names.claim(NAME, wait_s=LIMIT_S)
        thread.join(0.1)
        assert thread.is_alive()
        os.close(second)


def test_a_name_that_nobody_has_is_free(names: RuntimeDir) -> None:
    names.wait_until_free(NAME)
    os.close(names.claim(NAME))
