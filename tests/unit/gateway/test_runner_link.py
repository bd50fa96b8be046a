"""What a link makes of a runner's messages, and of its silence."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.finish_reason import FinishReason
from gateway.generation import Generation, ResolvedRequest
from gateway.router import Router
from gateway.runner_link import RunnerLink, RunnerLostError
from gateway.sampling import Sampling
from pagekeeper.common.errors import BugError
from pagekeeper.v1 import runner_pb2

HELLO = runner_pb2.RunnerHello(runner_id="runner-1", vocab_size=100, max_context_length=64)
STATES = runner_pb2.EngineReport
IDLE = STATES(state=STATES.STATE_IDLE)
IN_STEP = STATES(state=STATES.STATE_IN_STEP, step=7, seconds=3.9, limit_seconds=4.0)
HUNG = STATES(state=STATES.STATE_IN_STEP, step=7, seconds=4.1, limit_seconds=4.0)
NO_MANAGER = STATES(state=STATES.STATE_WAITING_FOR_MANAGER, seconds=5.0)


class Linked:
    """A link with the real router, and everything that it has sent."""

    def __init__(self) -> None:
        self.sent: list[runner_pb2.ServeRequest] = []
        self.ready: list[str] = []
        self.router = Router(60.0, lambda: 0.0)
        self.link = RunnerLink(self.router, self.sent.append, self.ready.append)

    def say(self, **message: Any) -> None:
        self.link.take(runner_pb2.ServeResponse(**message))

    def pong(self, engine: runner_pb2.EngineReport = IDLE) -> None:
        self.say(pong=runner_pb2.Pong(engine=engine))

    def introduce(self) -> None:
        self.say(hello=HELLO)
        self.pong()

    def submit(self) -> Generation:
        generation = Generation(ResolvedRequest("r", "anna", [5] * 4, Sampling(max_tokens=8), 1, 8))
        self.router.submit(generation)
        return generation

    def kinds(self) -> list[str | None]:
        return [request.WhichOneof("message") for request in self.sent]


@pytest.fixture
def linked() -> Linked:
    return Linked()


def test_a_runner_is_ready_once_its_engine_answers_after_its_hello(linked: Linked) -> None:
    generation = linked.submit()
    linked.say(hello=HELLO)
    assert (linked.ready, linked.sent, linked.link.was_ready) == ([], [], False)
    linked.pong()
    linked.pong()
    assert (linked.ready, linked.kinds(), linked.link.was_ready) == (["runner-1"], ["submit"], True)
    assert linked.sent[0].submit.request == generation.number


def test_pings_are_counted_until_one_is_answered(linked: Linked) -> None:
    linked.introduce()
    for _ in range(20):
        for _ in range(6):
            linked.link.ping()
        linked.pong()
    assert [request.ping.nonce for request in linked.sent] == list(range(1, 121))
    for _ in range(6):
        linked.link.ping()
    with pytest.raises(RunnerLostError, match="no answer to 6 pings"):
        linked.link.ping()


def test_a_runner_whose_step_takes_too_long_is_lost_and_one_just_within_is_not(linked: Linked) -> None:
    linked.introduce()
    linked.pong(IN_STEP)
    with pytest.raises(RunnerLostError, match="step 7 hangs"):
        linked.pong(HUNG)


def test_a_runner_without_its_manager_is_no_lost_runner(linked: Linked) -> None:
    linked.introduce()
    assert linked.router.is_serving
    linked.pong(NO_MANAGER)
    assert not linked.router.is_serving
    linked.pong()
    assert linked.router.is_serving


def test_an_answer_before_the_hello_is_a_fault(linked: Linked) -> None:
    with pytest.raises(BugError):
        linked.pong()


def test_a_runner_that_was_on_its_way_out_is_never_ready(linked: Linked) -> None:
    linked.say(hello=HELLO)
    linked.say(draining=runner_pb2.Draining())
    linked.pong()
    assert (linked.ready, linked.link.was_ready, linked.link.is_draining) == ([], False, True)


def test_what_a_lost_runner_had_goes_on_with_the_next_one(linked: Linked) -> None:
    linked.introduce()
    generation = linked.submit()
    output = runner_pb2.SequenceOutput(request=generation.number, attempt=1, token_ids=[9])
    linked.say(step=runner_pb2.StepOutput(outputs=[output]))
    assert linked.link.lose() == 1
    sent: list[runner_pb2.ServeRequest] = []
    successor = RunnerLink(linked.router, sent.append, linked.ready.append)
    successor.take(runner_pb2.ServeResponse(hello=HELLO))
    successor.take(runner_pb2.ServeResponse(pong=runner_pb2.Pong(engine=IDLE)))
    (submit,) = (request.submit for request in sent)
    assert (submit.attempt, list(submit.candidates[0].generated_token_ids)) == (2, [9])
    linked.say(step=runner_pb2.StepOutput(outputs=[output]))  # of the attempt before
    assert generation.token_ids[0] == [9]


def _refused(number: int) -> runner_pb2.SequenceOutput:
    refusal = runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_INVALID, field="prompt", detail="too long")
    return runner_pb2.SequenceOutput(request=number, attempt=1, refusal=refusal)


def _finished(number: int) -> runner_pb2.SequenceOutput:
    return runner_pb2.SequenceOutput(request=number, attempt=1, token_ids=[9], finish_reason=FinishReason.STOP.value)


@pytest.mark.parametrize("output", [_refused, _finished])
def test_an_output_that_ends_a_request_ends_it(
    linked: Linked, output: Callable[[int], runner_pb2.SequenceOutput]
) -> None:
    linked.introduce()
    generation = linked.submit()
    linked.say(step=runner_pb2.StepOutput(outputs=[output(generation.number)]))
    assert generation.stream.has_ended
    assert linked.link.lose() == 0


def test_a_cancel_names_the_request_and_its_candidates(linked: Linked) -> None:
    linked.introduce()
    linked.link.cancel(3)
    linked.link.cancel(3, [1])
    assert [(sent.cancel.request, list(sent.cancel.candidates)) for sent in linked.sent] == [(3, []), (3, [1])]
