"""The hand-over socket, with real sockets and every kind of stranger."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cache_manager import handover
from cache_manager.handover import GOODBYE, HELLO, HandoverClient, HandoverServer, RunnerConnection, Runners

LIMIT_S = 10.0


class Registry(Runners):
    """Remembers who came and who went."""

    def __init__(self) -> None:
        self.connected: list[RunnerConnection] = []
        self.ended: list[RunnerConnection] = []
        self.descriptors: list[int] = []

    def descriptors_for(self, connection: RunnerConnection) -> list[int]:
        return self.descriptors

    def runner_connected(self, connection: RunnerConnection) -> None:
        self.connected.append(connection)

    def runner_ended(self, connection: RunnerConnection) -> None:
        self.ended.append(connection)


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return runtime_dir / "handover.sock"


@pytest.fixture
async def server(path: Path, registry: Registry) -> AsyncIterator[HandoverServer]:
    memory = os.memfd_create("memory")
    os.write(memory, b"pool")
    registry.descriptors = [memory]
    started = HandoverServer(path, registry)
    started.start()
    yield started
    started.close()
    os.close(memory)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def _connect(path: Path) -> HandoverClient:
    return await asyncio.to_thread(HandoverClient, path, LIMIT_S)


def _stranger(path: Path) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(str(path))
    stranger.setblocking(False)
    return stranger


async def _is_hung_up_on(stranger: socket.socket) -> bool:
    async with asyncio.timeout(LIMIT_S):
        try:
            return await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
        except ConnectionResetError:
            return True


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_runner_gets_a_token_and_the_memory(server: HandoverServer, path: Path, registry: Registry) -> None:
    client = await _connect(path)
    (connection,) = registry.connected
    assert len(client.token) == 32
    assert connection.token == client.token
    assert connection.pid == os.getpid()
    (descriptor,) = client.descriptors
    assert os.pread(descriptor, 4, 0) == b"pool"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    client.close()


async def test_tokens_differ(server: HandoverServer, path: Path) -> None:
    clients = [await _connect(path) for _ in range(3)]
    assert len({client.token for client in clients}) == 3
    for client in clients:
        client.close()
        os.close(client.descriptors[0])


async def test_the_end_of_the_connection_is_reported_once(
    server: HandoverServer, path: Path, registry: Registry
) -> None:
    client = await _connect(path)
    os.close(client.descriptors[0])
    assert registry.ended == []
    client.close()
    client.close()
    await _until(lambda: bool(registry.ended))
    assert registry.ended == registry.connected


async def test_what_a_runner_says_later_is_discarded(server: HandoverServer, path: Path, registry: Registry) -> None:
    client = await _connect(path)
    for _ in range(3):
        client._socket.sendall(os.urandom(10_000))
        await asyncio.sleep(0)
    other = await _connect(path)
    assert registry.ended == []
    for each in (client, other):
        each.close()
        os.close(each.descriptors[0])
    await _until(lambda: len(registry.ended) == 2)


async def test_a_runner_that_closes_has_said_goodbye(server: HandoverServer, path: Path, registry: Registry) -> None:
    client = await _connect(path)
    (connection,) = registry.connected
    os.close(client.descriptors[0])
    assert not connection.said_goodbye
    client.close()
    await _until(lambda: bool(registry.ended))
    assert connection.said_goodbye


@pytest.mark.parametrize(
    ("last_words", "counts"),
    [
        ([], False),
        ([GOODBYE], True),
        ([b"noise", GOODBYE[:4], GOODBYE[4:]], True),
        ([b"x" * 5000 + GOODBYE], True),
        ([GOODBYE, b"noise"], False),
        ([GOODBYE[:-1]], False),
    ],
)
async def test_only_goodbye_as_the_last_words_counts(
    server: HandoverServer, path: Path, registry: Registry, last_words: list[bytes], counts: bool
) -> None:
    client = await _connect(path)
    os.close(client.descriptors[0])
    for words in last_words:
        client._socket.sendall(words)
        await asyncio.sleep(0)
    client._socket.close()
    await _until(lambda: bool(registry.ended))
    assert registry.ended[0].said_goodbye == counts


async def test_a_pidfd_that_was_taken_stays_open(path: Path) -> None:
    taken: list[int] = []

    class Taker(Registry):
        def runner_ended(self, connection: RunnerConnection) -> None:
            taken.append(connection.take_pidfd())

    server = HandoverServer(path, Taker())
    server.start()
    client = await _connect(path)
    client.close()
    await _until(lambda: bool(taken))
    server.close()
    assert handover._is_pidfd(taken[0])
    os.close(taken[0])


@pytest.mark.parametrize("garbage", [b"\0", b"GET / HTTP/1.1\r\n\r\n", HELLO[:-1] + b"?", os.urandom(1000), HELLO])
async def test_who_does_not_say_hello_is_hung_up_on(
    server: HandoverServer, path: Path, registry: Registry, garbage: bytes
) -> None:
    with _stranger(path) as stranger:
        stranger.sendall(garbage)
        assert await _is_hung_up_on(stranger)
    assert registry.connected == registry.ended == []


async def test_who_sends_other_descriptors_than_a_pidfd_is_hung_up_on_and_they_are_closed(
    server: HandoverServer, path: Path, registry: Registry
) -> None:
    before = _num_descriptors()
    with _stranger(path) as stranger:
        socket.send_fds(stranger, [HELLO], [0] * 10)
        assert await _is_hung_up_on(stranger)
    assert registry.connected == []
    assert _num_descriptors() == before


async def test_a_hello_may_come_byte_by_byte(server: HandoverServer, path: Path, registry: Registry) -> None:
    pidfd = os.pidfd_open(os.getpid())
    with _stranger(path) as runner:
        socket.send_fds(runner, [HELLO[:1]], [pidfd])
        for byte in HELLO[1:]:
            await asyncio.sleep(0)
            runner.send(bytes([byte]))
        await _until(lambda: bool(registry.connected))
    await _until(lambda: bool(registry.ended))
    os.close(pidfd)


async def test_who_does_not_finish_in_time_is_hung_up_on(
    server: HandoverServer, path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_HANDSHAKE_SECONDS", 0.02)
    client = await _connect(path)
    with _stranger(path) as silent, _stranger(path) as slow:
        slow.send(HELLO[:5])
        assert await _is_hung_up_on(silent)
        assert await _is_hung_up_on(slow)
    assert registry.ended == []  # who has finished may stay as long as he lives
    client.close()
    os.close(client.descriptors[0])


async def test_connections_are_bounded(
    server: HandoverServer, path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    monkeypatch.setattr(handover, "_MAX_CONNECTIONS", 2)
    with _stranger(path), _stranger(path), pytest.raises((ConnectionResetError, BrokenPipeError)):
        await _connect(path)
    await _until(lambda: not server._connections)
    client = await _connect(path)
    client.close()
    os.close(client.descriptors[0])


async def test_another_users_process_is_hung_up_on(
    server: HandoverServer, path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        await _connect(path)
    assert registry.connected == []


async def test_out_of_descriptors_it_waits_and_goes_on(
    server: HandoverServer, path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_ACCEPT_PAUSE_SECONDS", 0.02)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.setblocking(False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (stranger.fileno() + 1, hard))
        try:
            stranger.connect(str(path))
            await asyncio.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        stranger.sendall(b"?")
        assert await _is_hung_up_on(stranger)


async def test_a_socket_left_behind_is_replaced(path: Path, registry: Registry) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = HandoverServer(path, registry)
    server.start()
    client = await _connect(path)
    assert client.descriptors == []
    client.close()
    server.close()
    with pytest.raises(FileNotFoundError):
        await _connect(path)


async def test_runners_see_the_end_of_the_manager(path: Path, registry: Registry) -> None:
    server = HandoverServer(path, registry)
    server.start()
    client = await _connect(path)
    server.close()
    await asyncio.to_thread(client.wait_for_end)
    client.close()
    assert registry.ended == []


async def test_nobody_there_is_an_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await _connect(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(ConnectionRefusedError):
        await _connect(path)


async def test_a_manager_that_does_not_answer_in_time_is_an_error(path: Path) -> None:
    before = _num_descriptors()
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(path))
        hung.listen()
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(HandoverClient, path, 0.05)
    assert _num_descriptors() == before
