"""A gateway that answers well, resumed requests too, but whose streams end where a test says."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagekeeper.v1 import generate_pb2_grpc, types_pb2
from pagekeeper.v1.generate_pb2 import CandidateDelta, GenerateRequest, GenerateResponse
from tests.fakes.runner import answer_of, logprobs_of, score_of
from tests.unit.cli.fakes import failure

CODE = grpc.StatusCode
PROMPT = [5, 6, 7]
SEED = 77
_RETRY = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=1000))

# However an answer ends too early, its client goes on; except for the last ones.
ENDS = {
    "lost": failure(CODE.UNAVAILABLE, "Stream removed (Socket closed)"),
    "reset": failure(CODE.CANCELLED, "RST_STREAM with error code 8"),
    "unavailable": failure(CODE.UNAVAILABLE, "no runner", error_details_pb2.ErrorInfo(reason="UNAVAILABLE")),
    "draining": failure(CODE.UNAVAILABLE, "shutting down", error_details_pb2.ErrorInfo(reason="DRAINING")),
    "slow reader": failure(CODE.RESOURCE_EXHAUSTED, "too slow", error_details_pb2.ErrorInfo(reason="SLOW_READER")),
    "overloaded": failure(CODE.RESOURCE_EXHAUSTED, "full", error_details_pb2.ErrorInfo(reason="OVERLOADED"), _RETRY),
    "taken over": failure(CODE.ALREADY_EXISTS, "taken over"),
}
CURABLE_ENDS = ("lost", "reset", "unavailable", "draining", "slow reader")


@dataclass(frozen=True)
class Cut:
    """Where a stream ends, and how.

    Attributes:
        after: messages that come first.
        end: one of `ENDS`.
        sends_headers: before the first message.
    """

    after: int
    end: str = "lost"
    sends_headers: bool = False


@dataclass
class Story:
    """An answer.

    Attributes:
        lengths: of each candidate, in tokens.
        stops: whether the candidate ends with an end-of-sequence token; else because it has all its tokens.
        rambles: an older gateway, which does not know that a candidate has ended. One that had stopped goes on when it
            is asked for again: rounding made its end another token.
        usage_alone: in a message of its own, after the last tokens.
    """

    lengths: Sequence[int] = (4,)
    stops: Sequence[bool] = (True,)
    rambles: bool = False
    usage_alone: bool = False


def text_of(index: int, num_tokens: int, *, is_whole: bool) -> str:
    """A candidate's text so far; that of an odd token is held back until the next one comes, or the end."""
    tokens = answer_of(SEED, PROMPT, num_tokens, index)
    return "".join(f"{token} " for token in (tokens if is_whole else tokens[: num_tokens - num_tokens % 2]))


@dataclass
class ScriptedGateway(generate_pb2_grpc.GenerateServiceServicer):
    """Use with `serving`.

    Attributes:
        cuts: of the first streams, in order; the others end well.
        requests: all that came.
    """

    story: Story
    cuts: list[Cut] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)

    def Generate(self, request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        self.requests.append(request)
        cut = self.cuts.pop(0) if self.cuts else None
        if cut is not None and cut.sends_headers:
            context.send_initial_metadata(())
        yield from itertools.islice(self._messages(request), None if cut is None else cut.after)
        if cut is not None:
            context.abort_with_status(rpc_status.to_status(ENDS[cut.end]))

    def _messages(self, request: GenerateRequest) -> Iterator[GenerateResponse]:
        messages = self._beams(request) if request.sampling.HasField("beam_search") else self._steps(request)
        resumed = [len(candidate.token_ids) for candidate in request.resume.candidates]
        for number, message in enumerate(messages):
            message.request_id = request.request_id
            if number == 0:
                message.seed = request.resume.seed or SEED
                if request.sampling.echo and not any(resumed):
                    message.prompt.token_ids.extend(PROMPT)
                    message.branch_text = "branch"
            if message.HasField("usage"):
                message.usage.resumed_tokens = sum(resumed)
            yield message

    def _steps(self, request: GenerateRequest) -> Iterator[GenerateResponse]:
        """A token of each open candidate a message."""
        lengths = list(self.story.lengths)
        known = {candidate.index: len(candidate.token_ids) for candidate in request.resume.candidates}
        for index, length in enumerate(lengths):
            if self.story.rambles and self.story.stops[index] and known.get(index) == length:
                lengths[index] = length + 3
        ended = {candidate.index for candidate in request.resume.candidates if candidate.finish_reason}
        places = {
            index: known.get(index, 0) for index in range(len(lengths)) if self.story.rambles or index not in ended
        }
        usage = types_pb2.Usage(prompt_tokens=len(PROMPT), cached_tokens=2, completion_tokens=sum(lengths))
        has_usage_alone = self.story.usage_alone or not places
        sums = dict.fromkeys(places, 0.0)
        while places:
            message = GenerateResponse()
            for index, place in list(places.items()):
                delta = self._delta(request, index, place, lengths[index])
                sums[index] += sum(token.logprob for token in delta.logprobs)
                message.deltas.append(delta)
                places[index] += len(delta.token_ids)
                if delta.finish_reason:
                    if request.sampling.HasField("logprobs"):
                        message.deltas[-1].cumulative_logprob = sums[index]
                    del places[index]
            if not places and not has_usage_alone:
                message.usage.CopyFrom(usage)
            yield message
        if has_usage_alone:
            yield GenerateResponse(usage=usage)

    def _delta(self, request: GenerateRequest, index: int, place: int, length: int) -> CandidateDelta:
        """The next token; an end-of-sequence token shows as an end without one."""
        token_ids = answer_of(SEED, PROMPT, length, index)[place : place + 1]
        after = place + len(token_ids)
        stops = self.story.stops[index]
        has_ended = after == length and not (stops and token_ids)
        delta = CandidateDelta(index=index, position=place, token_ids=token_ids)
        delta.text = text_of(index, after, is_whole=has_ended)[len(text_of(index, place, is_whole=False)) :]
        if has_ended:
            delta.finish_reason = types_pb2.FINISH_REASON_STOP if stops else types_pb2.FINISH_REASON_LENGTH
        if request.sampling.HasField("logprobs"):
            delta.logprobs.extend(logprobs_of(token, place, request.sampling.logprobs) for token in token_ids)
        return delta

    def _beams(self, request: GenerateRequest) -> Iterator[GenerateResponse]:
        """The running beams step by step, then the hypotheses, all in one message or one after the other."""
        assert not any(candidate.token_ids for candidate in request.resume.candidates), "a beam search starts again"
        lengths = self.story.lengths
        for step in range(1, max(lengths)):
            message = GenerateResponse()
            message.beams.add(token_ids=answer_of(SEED, PROMPT, step), score=-math.log(1 + step))
            yield message
        hypotheses = [
            CandidateDelta(
                index=index,
                token_ids=answer_of(SEED, PROMPT, length, index),
                text=text_of(index, length, is_whole=True),
                finish_reason=types_pb2.FINISH_REASON_STOP,
                score=score_of(index),
            )
            for index, length in enumerate(lengths)
        ]
        usage = types_pb2.Usage(prompt_tokens=len(PROMPT), completion_tokens=sum(lengths))
        if not self.story.usage_alone:
            yield GenerateResponse(deltas=hypotheses, usage=usage)
            return
        for delta in hypotheses:
            yield GenerateResponse(deltas=[delta])
        yield GenerateResponse(usage=usage)
