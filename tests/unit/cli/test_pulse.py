"""What counts as life, and when a process counts as hung."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterable

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagekeeper.cli.processes import is_stopped
from pagekeeper.cli.pulse import Pulse, until_serving, until_silent

NOBODY = "127.0.0.1:1"
OURSELVES = 1  # any process that is not stopped
LIMIT_S = 20.0


async def asks_until_silent(answers: Iterable[bool]) -> int:
    """How many of these answers it takes to be called silent."""
    given = iter(answers)
    count = 0

    async def ask(_: float) -> bool:
        nonlocal count
        count += 1
        return next(given)

    await until_silent(ask, limit_s=0.001)
    return count


async def test_five_unanswered_asks_in_a_row_are_silence() -> None:
    assert await asks_until_silent([True, True] + [False] * 5) == 7


async def test_an_answer_in_between_makes_the_count_begin_again() -> None:
    assert await asks_until_silent([False] * 4 + [True] + [False] * 5) == 10


async def test_an_ask_that_time_has_overtaken_is_one_ask() -> None:
    """As when the one who asks was stopped for a minute: the limit is long over, and nothing has been asked."""

    async def ask(_: float) -> bool:
        await asyncio.sleep(0.2)
        asks.append(False)
        return len(asks) > 1  # only the first went unanswered

    asks: list[bool] = []
    silence = asyncio.create_task(until_silent(ask, limit_s=0.1))
    while len(asks) < 4:
        await asyncio.sleep(0.01)
        assert not silence.done()
    silence.cancel()


@pytest.fixture
async def server() -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    """A server with nothing in it, on every address of this machine."""
    server = grpc.aio.server()
    port = server.add_insecure_port("0.0.0.0:0")
    yield server, f"0.0.0.0:{port}"
    await server.stop(None)


async def ask_once(address: str | None, limit_s: float = LIMIT_S) -> bool:
    pulse = Pulse(OURSELVES, lambda: address)
    try:
        return await pulse.ask(limit_s)
    finally:
        await pulse.close()


async def test_any_answer_is_life(server: tuple[grpc.aio.Server, str]) -> None:
    service, address = server
    await service.start()
    assert await ask_once(address)  # UNIMPLEMENTED


async def test_who_has_never_answered_or_has_no_address_yet_is_not_judged() -> None:
    assert await ask_once(NOBODY, limit_s=0.05)
    assert await ask_once(None)


async def test_who_has_answered_once_must_go_on_answering(server: tuple[grpc.aio.Server, str]) -> None:
    service, address = server
    await service.start()
    pulse = Pulse(OURSELVES, lambda: address)
    assert await pulse.ask(LIMIT_S)
    await service.stop(None)
    assert [await pulse.ask(0.05) for _ in range(3)] == [False] * 3
    await pulse.close()


async def test_who_is_stopped_lives_if_it_goes_on_in_time() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process.pid):
            await asyncio.sleep(0.01)
        pulse = Pulse(process.pid, lambda: None)
        assert not await pulse.ask(0.2)
        asked = asyncio.create_task(pulse.ask(LIMIT_S))
        await asyncio.sleep(0.2)
        assert not asked.done()
        process.send_signal(signal.SIGCONT)
        assert await asked
    finally:
        process.kill()
        await process.wait()


async def test_serving_is_waited_for(server: tuple[grpc.aio.Server, str]) -> None:
    service, address = server
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, service)
    await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    await service.start()
    waiting = asyncio.create_task(until_serving(address))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    await asyncio.wait_for(waiting, LIMIT_S)
