"""Whoever waits for an answer that is being asked for again can be interrupted, and can go on afterwards."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagekeeper import AsyncClient, Client, DeadlineError, PagekeeperError, UnavailableError
from pagekeeper.v1 import generate_pb2
from tests.fakes.runner import answer_of
from tests.fakes.scripted_gateway import PROMPT, SEED, Cut, ScriptedGateway, Story
from tests.unit.cli.fakes import serving
from tests.unit.client.adapters import ADAPTERS, Adapter

STORY = Story((4,), (False,))
WHOLE = answer_of(SEED, PROMPT, 4)
_PATIENCE_S = 20.0


def pausing(client: Any) -> Any:
    """The client, with pauses that nobody waits for in a test."""
    client._route.rng = lambda: 1000.0
    return client


def impatient(client: Any) -> Any:
    """The client, without pauses."""
    client._route.rng = lambda: 0.0
    return client


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(params=list(ADAPTERS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


async def test_closing_the_client_ends_a_pause(kind: str) -> None:
    retries: list[PagekeeperError] = []
    with serving(gateway=ScriptedGateway(STORY, [Cut(2)])) as address:
        client: Adapter = ADAPTERS[kind](address, on_retry=retries.append)
        pausing(client.client)
        answer = client.generate(PROMPT)
        waiting = asyncio.create_task(client.collect(answer))
        await until(lambda: retries)
        await client.close()
        with pytest.raises(UnavailableError, match="closed") as caught:
            await asyncio.wait_for(waiting, _PATIENCE_S)
        assert caught.value.tokens_emitted == 2


async def test_closing_an_answer_in_a_pause_ends_it_and_asks_for_no_more(kind: str) -> None:
    retries: list[PagekeeperError] = []
    gateway = ScriptedGateway(STORY, [Cut(2)])
    with serving(gateway=gateway) as address:
        client: Adapter = ADAPTERS[kind](address, on_retry=retries.append)
        client.client._route.rng = lambda: 10.0  # half a second
        answer = client.generate(PROMPT)
        waiting = asyncio.create_task(client.collect(answer))
        await until(lambda: retries)
        answer.close()
        (candidate,) = await waiting
        assert (candidate.token_ids, candidate.finish_reason) == (WHOLE[:2], None)
        assert await client.next(answer) is None
        assert len(gateway.requests) == 1
        await client.close()


async def test_the_whole_time_of_a_call_ends_its_pauses_too(kind: str) -> None:
    with serving(gateway=ScriptedGateway(STORY, [Cut(2), *[Cut(0)] * 1000])) as address:
        client: Adapter = ADAPTERS[kind](address)
        pausing(client.client)
        with pytest.raises(DeadlineError):
            await client.collect(client.generate(PROMPT, timeout_s=0.3))
        await client.close()


async def test_a_task_that_is_cancelled_in_a_pause_stays_cancelled_and_can_read_on() -> None:
    with serving(gateway=ScriptedGateway(STORY, [Cut(2)])) as address:
        async with AsyncClient(address) as client:
            pausing(client)
            answer = client.generate(PROMPT)
            assert [(await anext(answer)).position for _ in range(2)] == [0, 1]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await anext(answer)
            impatient(client)
            assert (await answer.collect())[0].token_ids == WHOLE


def test_ctrl_c_interrupts_a_pause_and_the_answer_can_be_read_on() -> None:
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    with serving(gateway=ScriptedGateway(STORY, [Cut(2)])) as address, Client(address) as client:
        pausing(client)
        answer = client.generate(PROMPT)
        assert [next(answer).position for _ in range(2)] == [0, 1]
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            next(answer)
        impatient(client)
        assert answer.collect()[0].token_ids == WHOLE


def test_threads_that_share_a_client_go_on_each_with_its_own_answer() -> None:
    gateway = ScriptedGateway(STORY, [Cut(number % 4) for number in range(40)])
    with serving(gateway=gateway) as address, Client(address) as client, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: client.generate(PROMPT).collect(), range(16)))
    assert [candidates[0].token_ids for candidates in answers] == [WHOLE] * 16
    assert len({request.request_id for request in gateway.requests}) == 16
    assert len(gateway.requests) > 16


def test_an_answer_that_was_never_read_does_not_ask_again() -> None:
    gateway = ScriptedGateway(STORY, [Cut(0)] * 5)
    with serving(gateway=gateway) as address, Client(address) as client:
        answer = client.generate(PROMPT)
        deadline = time.monotonic() + _PATIENCE_S
        while not gateway.requests:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        del answer
    assert len(gateway.requests) == 1


async def test_calls_with_one_answer_are_made_again_too(kind: str) -> None:
    class ForgetfulGateway(ScriptedGateway):
        """Loses the first calls."""

        num_calls = 0

        def ListModels(self, request: Any, context: Any) -> Any:
            self.num_calls += 1
            if self.num_calls < 4:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            return generate_pb2.ListModelsResponse()

    gateway = ForgetfulGateway(STORY)
    with serving(gateway=gateway) as address:
        client: Adapter = ADAPTERS[kind](address)
        assert await client.ask("list_models") == []
        assert gateway.num_calls == 4
        await client.close()
        with pytest.raises(UnavailableError, match="closed"):
            await client.ask("list_models")


def resident_mib() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


async def test_answers_that_are_left_early_leave_nothing_in_memory(kind: str) -> None:
    async def leave(count: int) -> None:
        for _ in range(count):
            answer = client.generate(PROMPT)
            assert await client.next(answer) is not None
            answer.close()
        gateway.requests.clear()

    gateway = ScriptedGateway(Story((300,), (False,)))
    with serving(gateway=gateway) as address:
        client: Adapter = ADAPTERS[kind](address)
        await leave(200)
        before = resident_mib()
        # Where gRPC lets the reading thread do its work (SingleThreadedUnaryStream), each leaves 18 KiB behind.
        await leave(800)
        assert resident_mib() - before < 8
        await client.close()
