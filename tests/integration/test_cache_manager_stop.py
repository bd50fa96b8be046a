"""The real process, told to stop in the middle of everything: it ends in good order, whatever its callers do."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from cache_manager.client import CacheConnectionLost
from pagekeeper.common.sockets import unix_target
from pagekeeper.v1 import cache_pb2, cache_pb2_grpc
from tests.fakes.manager import LIMIT_S, POOL, ManagerProcess, connect, runner_process, wait_until

NUM_TALKERS = 4
NUM_CUT_SHORT = 50


class _Talker:
    """A runner that does nothing but talk, and does what the engine does when its session is lost."""

    def __init__(self, manager: ManagerProcess) -> None:
        self._client = connect(manager)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._talk)
        self.answers = 0
        self.lost = ""

    def __enter__(self) -> "_Talker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _talk(self) -> None:
        try:
            while not self._left.is_set():
                self._client.send(1, 0, [])
                self._client.receive(LIMIT_S)
                self.answers += 1
        except CacheConnectionLost:
            pass
        try:
            self._client.reattach(LIMIT_S)
        except CacheConnectionLost as error:
            self.lost = str(error)
        self._client.close()


@contextmanager
def _connected(manager: ManagerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(unix_target(manager.runtime_dir.cache_socket)) as channel:
        grpc.channel_ready_future(channel).result(LIMIT_S)
        yield channel


@contextmanager
def _without_hello(channel: grpc.Channel) -> Iterator["grpc.CallIterator[cache_pb2.AttachResponse]"]:
    """A stream that is open and says nothing."""
    said = threading.Event()

    def requests() -> Iterator[cache_pb2.AttachRequest]:
        said.wait(LIMIT_S)
        yield from ()

    call = cache_pb2_grpc.CacheServiceStub(channel).Attach(requests(), timeout=LIMIT_S)
    try:
        yield call
    finally:
        said.set()
        call.cancel()


def _check_log(manager: ManagerProcess) -> None:
    """It has stopped, and neither it nor gRPC has met anything unexpected."""
    assert [line for line in manager._log.read_text().splitlines() if not line.startswith("{")] == []
    assert {line["level"] for line in manager.log_lines()} == {"info"}
    assert "stopping" in [line["event"] for line in manager.log_lines()]


@pytest.mark.parametrize("round_", range(3))
def test_case_11_told_to_stop_while_runners_talk_it_ends_in_good_order(runtime_dir: Path, round_: int) -> None:
    """Case 11: shutting the manager down with live sessions, each of which its runner ends in the same moment."""
    with ManagerProcess(runtime_dir, *POOL) as manager, ExitStack() as stack:
        stopped = stack.enter_context(runner_process(manager, base=0, num_blocks=2, num_sealed=0))
        stopped.send_signal(signal.SIGSTOP)
        channel = stack.enter_context(_connected(manager))
        silent = stack.enter_context(_without_hello(channel))
        talkers = [stack.enter_context(_Talker(manager)) for _ in range(NUM_TALKERS)]
        wait_until(lambda: min(talker.answers for talker in talkers) > 20 * round_)
        manager.process.terminate()
        assert manager.process.wait(timeout=LIMIT_S) == 0, manager._log.read_text()
        _check_log(manager)
        with pytest.raises(grpc.RpcError):
            next(silent)
    assert all(talker.lost for talker in talkers)


def test_a_stream_that_is_cancelled_before_its_hello_is_no_fault_of_the_manager(runtime_dir: Path) -> None:
    with ManagerProcess(runtime_dir, *POOL) as manager, _connected(manager) as channel:
        for index in range(NUM_CUT_SHORT):
            with _without_hello(channel):
                time.sleep(index % 10 / 1000)  # each is cut in another moment of its beginning
        connect(manager).close()
    assert manager.process.returncode == 0
    _check_log(manager)
