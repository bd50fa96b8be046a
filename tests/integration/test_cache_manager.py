"""The real process: how runners end, how managers end, and what the others keep."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_manager import wire
from cache_manager.client import CacheClient, CacheConnectionLost
from cache_manager.handover import HandoverClient
from pagekeeper.common.operations import Opened, Release
from pagekeeper.common.sockets import unix_target
from pagekeeper.v1 import cache_pb2_grpc
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT, pool_bytes
from tests.fakes.manager import LIMIT_S, POOL, ManagerProcess, connect, message, runner_process, wait_until
from tests.fakes.policy_session import opening, tokens


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[ManagerProcess]:
    with ManagerProcess(runtime_dir, *POOL) as process:
        yield process
        if process.process.poll() is None:
            assert list(process.audit().violations) == []


def _start(runtime_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A manager that is expected to end by itself."""
    command = [sys.executable, "-m", "cache_manager", "--runtime-dir", str(runtime_dir), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


# The ends of runners


def test_a_killed_runners_leases_are_freed(manager: ManagerProcess) -> None:
    with runner_process(manager, base=0, num_blocks=5, num_sealed=2) as child:
        pool = manager.stats().pool
        assert (pool.leased_blocks, pool.sealed_blocks) == (3, 2)
        assert manager.stats().sessions[0].pid == child.pid
        child.kill()
        wait_until(lambda: not manager.stats().sessions)
        pool = manager.stats().pool
        assert (pool.leased_blocks, pool.sealed_blocks, pool.cached_blocks) == (0, 0, 2)
        assert pool.free_blocks == pool.total_blocks - 1


def test_case_09_a_block_whose_writer_was_killed_before_the_seal_is_never_a_hit(manager: ManagerProcess) -> None:
    """Case 9: killed between write and seal."""
    with runner_process(manager, base=0, num_blocks=4, num_sealed=2) as child:
        child.kill()
        wait_until(lambda: not manager.stats().sessions)
    with closing(connect(manager)) as heir:
        heir.send(1, 0, [opening(1, tokens(4))])
        (opened,) = heir.receive(LIMIT_S)
        assert opened.num_cached_tokens == 16
        for index, block in enumerate(opened.blocks[:2]):
            start = block.id * TINY_LAYOUT.block_bytes
            content = pool_bytes(heir)[start : start + TINY_LAYOUT.block_bytes]
            assert content == bytes([index + 1]) * TINY_LAYOUT.block_bytes
        heir.send(2, 2, [Release(1)])
        heir.send(3, 3, [])
        heir.receive(LIMIT_S)
        heir.receive(LIMIT_S)


def test_a_stopped_runner_keeps_what_it_holds(manager: ManagerProcess) -> None:
    with runner_process(manager, base=0, num_blocks=5, num_sealed=2) as child, closing(connect(manager)) as other:
        child.send_signal(signal.SIGSTOP)
        for step in range(1, 100):
            other.send(step, step - 1, [opening(step, tokens(1, base=50)), Release(step)])
            other.receive(LIMIT_S)
        assert manager.stats().usage.physical_blocks == 5


def test_a_broken_stream_takes_nothing_away(manager: ManagerProcess) -> None:
    handover = HandoverClient(manager.runtime_dir.handover_socket, LIMIT_S)
    hello = wire.hello_to_proto(handover.token, "runner", TINY_LAYOUT, FINGERPRINT)
    with grpc.insecure_channel(unix_target(manager.runtime_dir.cache_socket)) as channel:
        call = cache_pb2_grpc.CacheServiceStub(channel).Attach(iter([hello, message(1, opening(1, tokens(2)))]))
        assert next(call).HasField("granted")
        assert next(call).HasField("results")
        call.cancel()
    assert manager.stats().pool.leased_blocks == 2
    handover.close()
    os.close(handover.descriptors[0])
    wait_until(lambda: manager.stats().pool.leased_blocks == 0)


def test_a_superseded_stream_is_refused_and_the_new_one_goes_on(manager: ManagerProcess) -> None:
    client = connect(manager)
    old = client._stream
    old_call = old._call
    client._stream = type(old)(client._target, client._hello, LIMIT_S)
    old.send(1, 0, [opening(1, tokens(2))])
    with pytest.raises(CacheConnectionLost, match="FAILED_PRECONDITION: session 1 has ended"):
        old.receive(LIMIT_S)
    assert old_call.code() is grpc.StatusCode.FAILED_PRECONDITION
    client.send(1, 0, [opening(1, tokens(2))])
    assert isinstance(client.receive(LIMIT_S)[0], Opened)
    old.close()
    client.close()


# The ends of managers


def test_a_killed_manager_is_noticed_and_its_successor_serves_the_same_directory(manager: ManagerProcess) -> None:
    client = connect(manager)
    client.send(1, 0, [opening(1, tokens(2))])
    client.receive(LIMIT_S)
    manager.process.kill()
    manager.process.wait()
    with pytest.raises(CacheConnectionLost):
        client.receive(LIMIT_S)
    with pytest.raises(CacheConnectionLost):
        client.reattach(LIMIT_S)
    pool_bytes(client)[:4] = b"mine"  # the mapping outlives the manager
    assert manager.runtime_dir.handover_socket.exists()
    with ManagerProcess(manager.runtime_dir.path, *POOL) as successor, closing(connect(successor)) as heir:
        assert heir.granted.start_id != client.granted.start_id
        assert pool_bytes(heir)[:4] == bytes(4)
        heir.send(1, 0, [opening(1, tokens(2))])
        assert heir.receive(LIMIT_S)[0].num_cached_tokens == 0
    client.close()


def test_told_to_stop_it_says_so_and_leaves_the_runner_its_memory(manager: ManagerProcess) -> None:
    client = connect(manager)
    client.send(1, 0, [opening(1, tokens(2))])
    (opened,) = client.receive(LIMIT_S)
    with grpc.insecure_channel(manager.admin_listen) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        manager.process.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    assert manager.process.wait(timeout=LIMIT_S) == 0
    with pytest.raises(CacheConnectionLost):
        client.receive(LIMIT_S)
    start = opened.blocks[1].id * TINY_LAYOUT.block_bytes
    pool_bytes(client)[start : start + 5] = b"still"
    assert pool_bytes(client)[start : start + 5] == b"still"
    client.close()
    assert not manager.runtime_dir.handover_socket.exists()
    assert manager.log_lines()[-1]["event"] == "stopping"


def test_no_manager_is_an_error_after_the_time_allowed(runtime_dir: Path, manager: ManagerProcess) -> None:
    manager.process.terminate()
    manager.process.wait()
    with pytest.raises(CacheConnectionLost, match=f"^no cache manager serves {runtime_dir}: "):
        CacheClient.connect(manager.runtime_dir, "runner", TINY_LAYOUT, FINGERPRINT, 0.2)


# Wrong starts


def test_a_second_manager_in_the_same_directory_is_refused(manager: ManagerProcess) -> None:
    second = _start(manager.runtime_dir.path, *POOL, "--admin-listen", "127.0.0.1:0")
    assert second.returncode == 2
    assert second.stderr == f"cache-manager: runtime_dir: another cache-manager serves {manager.runtime_dir.path}\n"
    with closing(connect(manager)) as client:
        client.send(1, 0, [])
        assert client.receive(LIMIT_S) == []


def test_a_busy_port_is_one_line(runtime_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = _start(runtime_dir, *POOL, "--admin-listen", address)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == f"cache-manager: admin_listen: cannot listen on {address}; is it in use?"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("flag", "value"), [("--pool-size", "lots"), ("--pool-size", "1EiB"), ("--watermark", "2")])
def test_a_wrong_setting_is_one_line(runtime_dir: Path, flag: str, value: str) -> None:
    ended = _start(runtime_dir, "--admin-listen", "127.0.0.1:0", flag, value)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"cache-manager: {flag[2:].replace('-', '_')}: ")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (["--device", "cuda"], "device: cuda cannot be used: "),
        (["--pool-memory", "cuda_vmm"], "pool_memory: cuda_vmm cannot be had: device: "),
        (["--device", "cpu", "--pool-memory", "cuda_ipc"], "pool_memory: cuda_ipc is a GPU's memory, device is cpu"),
    ],
)
def test_a_gpu_that_was_asked_for_and_is_not_there_is_one_line(
    runtime_dir: Path, flags: list[str], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = _start(runtime_dir, *POOL, *flags)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"cache-manager: {setting}")
    assert len(ended.stderr.splitlines()) == 1


def test_a_directory_that_is_open_to_others_is_refused(runtime_dir: Path) -> None:
    runtime_dir.chmod(0o750)
    ended = _start(runtime_dir, *POOL)
    assert ended.returncode == 2
    problem = f"runtime_dir: {runtime_dir} must be a directory of this user with mode 0700"
    assert ended.stderr == f"cache-manager: {problem}\n"
