"""Requests and outputs as they stand in runner.proto."""

from collections.abc import Iterable, Iterator

from model_runner.beam_search import BeamSearchParams, EarlyStopping
from model_runner.logprobs import TokenLogprobs
from model_runner.report import Activity, EngineReport
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import FinishReason
from model_runner.step import BeamsOutput, Output
from pagekeeper.common.errors import BugError
from pagekeeper.v1 import runner_pb2, types_pb2

_FINISH = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_ACTIVITY = {
    Activity.IDLE: runner_pb2.EngineReport.STATE_IDLE,
    Activity.IN_STEP: runner_pb2.EngineReport.STATE_IN_STEP,
    Activity.WAITING_FOR_MANAGER: runner_pb2.EngineReport.STATE_WAITING_FOR_MANAGER,
}
_EARLY_STOPPING = {
    types_pb2.EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    types_pb2.EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    types_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def beam_search_params(wanted: types_pb2.BeamSearch, num_hypotheses: int) -> BeamSearchParams:
    """What a gateway wants searched for, every field of which it has set."""
    return BeamSearchParams(
        width=wanted.width,
        length_penalty=wanted.length_penalty,
        early_stopping=_EARLY_STOPPING[wanted.early_stopping],
        num_hypotheses=num_hypotheses,
        intermediate=wanted.intermediate,
    )


def sampling_params(wanted: runner_pb2.ResolvedSampling) -> SamplingParams:
    """How a request's tokens are to be chosen."""
    return SamplingParams(
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        seed=wanted.seed,
        stop_token_ids=frozenset(wanted.stop_token_ids),
        typical_p=wanted.typical_p if wanted.HasField("typical_p") else 1.0,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        repetition_penalty=wanted.repetition_penalty if wanted.HasField("repetition_penalty") else 1.0,
        logit_bias=dict(wanted.logit_bias),
        allowed_token_ids=tuple(dict.fromkeys(wanted.allowed_token_ids)),
        bad_words=tuple(tuple(word.token_ids) for word in wanted.bad_words),
        min_tokens=wanted.min_tokens,
        logprobs=wanted.logprobs if wanted.HasField("logprobs") else None,
    )


def named_tokens(wanted: runner_pb2.ResolvedSampling) -> Iterator[tuple[str, int]]:
    """Every token id that is looked up in the logits, and the field that names it."""
    bad_words = (token_id for word in wanted.bad_words for token_id in word.token_ids)
    stop_token_ids = wanted.stop_token_ids if wanted.min_tokens else ()
    for field, token_ids in (
        ("logit_bias", wanted.logit_bias),
        ("allowed_token_ids", wanted.allowed_token_ids),
        ("bad_words", bad_words),
        ("stop_token_ids", stop_token_ids),
    ):
        for token_id in token_ids:
            yield field, token_id


def wire_output(output: Output, request: int, attempt: int) -> runner_pb2.SequenceOutput:
    """A token of a candidate, or its end."""
    sequence = output.sequence
    usage = None
    # At the first token too: the gateway may end the answer itself, at a stop string or when this runner is lost.
    if output.finish_reason is not None or output.position == sequence.num_resumed_tokens:
        usage = types_pb2.Usage(
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=sequence.num_cached_tokens or 0,
            resumed_tokens=sequence.num_resumed_tokens,
            recomputed_tokens=sequence.num_recomputed_tokens,
            # The engine may have gone on: the sequence itself can be longer by now.
            completion_tokens=output.position + (output.token_id is not None),
        )
    return runner_pb2.SequenceOutput(
        request=request,
        attempt=attempt,
        candidate=sequence.candidate,
        position=output.position,
        token_ids=[] if output.token_id is None else [output.token_id],
        finish_reason=_FINISH[output.finish_reason],
        usage=usage,
        logprobs=[] if output.logprobs is None else [_wire_logprobs(output.logprobs)],
    )


def wire_prompt(logprobs: Iterable[TokenLogprobs], request: int, attempt: int) -> runner_pb2.PromptOutput:
    """How likely the prompt's tokens were."""
    return runner_pb2.PromptOutput(request=request, attempt=attempt, logprobs=map(_wire_logprobs, logprobs))


def _wire_logprobs(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(**logprobs._asdict())


def wire_hypotheses(
    output: BeamsOutput, request: int, attempt: int, candidates: set[int]
) -> Iterator[runner_pb2.SequenceOutput]:
    """The answers of a beam search whose ranks are `candidates`."""
    leader = output.leader
    if leader.beams is None:
        raise BugError(f"sequence {leader.id} leads no beam search")
    for rank in sorted(candidates):
        token_ids, score, finish_reason, logprobs = output.hypotheses[rank]
        yield runner_pb2.SequenceOutput(
            request=request,
            attempt=attempt,
            candidate=rank,
            token_ids=token_ids,
            finish_reason=_FINISH[finish_reason],
            score=score,
            logprobs=map(_wire_logprobs, logprobs),
            usage=types_pb2.Usage(
                prompt_tokens=leader.num_prompt_tokens,
                cached_tokens=leader.num_cached_tokens or 0,
                recomputed_tokens=leader.beams.num_recomputed_tokens if rank == min(candidates) else 0,
                completion_tokens=len(token_ids),
            ),
        )


def wire_beams(output: BeamsOutput, request: int, attempt: int) -> runner_pb2.BeamOutput:
    """The beams that run."""
    beams = [runner_pb2.BeamOutput.Beam(token_ids=token_ids, score=score) for token_ids, score, *_ in output.hypotheses]
    return runner_pb2.BeamOutput(request=request, attempt=attempt, beams=beams)


def wire_report(report: EngineReport) -> runner_pb2.EngineReport:
    """What a Pong says of the engine."""
    return runner_pb2.EngineReport(
        state=_ACTIVITY[report.activity],
        step=report.step,
        seconds=report.seconds,
        limit_seconds=report.limit_seconds,
        running=report.running,
        waiting=report.waiting,
        step_seconds=report.step_seconds,
        manager_wait_seconds=report.manager_wait_seconds,
        preemptions=report.preemptions,
        detached=report.detached,
    )
