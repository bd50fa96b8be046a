"""How processes end."""

import asyncio

import pytest
from structlog.testing import capture_logs

from pagekeeper.common import process
from pagekeeper.common.process import run_in_event_loop


def test_calls_that_a_stopped_server_has_left_end_before_the_event_loop() -> None:
    ended: list[str] = []

    async def call() -> None:
        await asyncio.sleep(0.01)
        ended.append("call")

    async def serve() -> int:
        calls.append(asyncio.create_task(call()))
        return 3

    calls: list[asyncio.Task[None]] = []
    assert run_in_event_loop(serve()) == 3
    assert ended == ["call"]


def test_a_call_that_never_ends_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LAST_CALLS_S", 0.01)
    calls: list[asyncio.Task[object]] = []

    async def serve() -> None:
        calls.append(asyncio.create_task(asyncio.Event().wait(), name="stuck"))

    with capture_logs() as logs:
        run_in_event_loop(serve())
    assert calls[0].cancelled()
    assert [(line["event"], line["tasks"]) for line in logs] == [("tasks did not end", ["stuck"])]


def test_a_process_that_fails_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server may not have been stopped, and would serve on."""
    monkeypatch.setattr(process, "_LAST_CALLS_S", 0.01)
    calls: list[asyncio.Task[object]] = []

    async def serve() -> None:
        calls.append(asyncio.create_task(asyncio.Event().wait()))
        raise OSError("what went wrong")

    with capture_logs() as logs, pytest.raises(OSError, match="what went wrong"):
        run_in_event_loop(serve())
    assert calls[0].cancelled()
    assert not logs
