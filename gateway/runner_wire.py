"""What the gateway and a runner send each other, to and from plain values."""

from gateway.finish_reason import FinishReason
from gateway.fleet import Role, RunnerInfo
from gateway.generation import CacheUse, Generation, ResolvedRequest
from gateway.token_stream import Beam, Tokens
from gateway.validation import Limits
from pagekeeper.common.errors import BugError, FieldViolation, InvalidRequestError, PagekeeperError
from pagekeeper.v1 import runner_pb2, types_pb2

_ROLES = {
    runner_pb2.ROLE_UNSPECIFIED: Role.BOTH,
    runner_pb2.ROLE_BOTH: Role.BOTH,
    runner_pb2.ROLE_PREFILL: Role.PREFILL,
    runner_pb2.ROLE_DECODE: Role.DECODE,
}


def to_submit(generation: Generation, max_tokens: int) -> runner_pb2.Submit:
    """What is still to be done of a generation: its open candidates, each behind the tokens that it has."""
    request = generation.request
    sampling = _resolved_sampling(request, max_tokens)
    if generation.needs_prompt_logprobs:
        sampling.prompt_logprobs = request.sampling.prompt_logprobs or 0
    return runner_pb2.Submit(
        request=generation.number,
        attempt=generation.attempt,
        request_id=request.request_id,
        tenant=request.tenant,
        prompt_token_ids=request.prompt_token_ids,
        candidates=[
            runner_pb2.Submit.Candidate(index=index, generated_token_ids=generation.token_ids[index])
            for index in sorted(generation.stream.open)
        ],
        sampling=sampling,
        priority=request.priority,
    )


def from_hello(hello: runner_pb2.RunnerHello) -> RunnerInfo:
    """What a runner says of itself.

    Raises:
        BugError: that cannot be.
    """
    if not (hello.vocab_size and hello.max_context_length):
        raise BugError("a runner without a vocabulary or a context")
    return RunnerInfo(Limits(hello.vocab_size, hello.max_context_length), _ROLES[hello.role], hello.standby)


def to_tokens(output: runner_pb2.SequenceOutput) -> Tokens:
    """What a candidate has gained.

    Raises:
        ValueError: its finish reason is none that we know.
    """
    return Tokens(
        candidate=output.candidate,
        token_ids=list(output.token_ids),
        finish_reason=FinishReason(output.finish_reason) if output.finish_reason else None,
        logprobs=output.logprobs,
        score=output.score if output.HasField("score") else None,
    )


def to_cache_use(output: runner_pb2.SequenceOutput) -> CacheUse | None:
    """What an attempt has used for a candidate, if it says that here."""
    used = output.usage
    return CacheUse(used.cached_tokens, used.recomputed_tokens) if output.HasField("usage") else None


def to_beams(output: runner_pb2.BeamOutput) -> list[Beam]:
    """The running beams of a search."""
    return [Beam(list(beam.token_ids), beam.score) for beam in output.beams]


def to_error(refusal: runner_pb2.Refusal) -> PagekeeperError | None:
    """Why a request was refused; None: the runner drains, and nothing is wrong."""
    match refusal.code:
        case runner_pb2.Refusal.CODE_DRAINING:
            return None
        case runner_pb2.Refusal.CODE_INVALID:
            return InvalidRequestError(FieldViolation(refusal.field, refusal.detail))
        case _:
            return BugError(f"the runner failed, error id {refusal.error_id}: {refusal.detail}")


def _resolved_sampling(request: ResolvedRequest, max_tokens: int) -> runner_pb2.ResolvedSampling:
    """Everything but prompt_logprobs, which not every attempt needs. What is off is not set."""
    sampling = request.sampling
    resolved = runner_pb2.ResolvedSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=request.seed,
        max_tokens=max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[runner_pb2.ResolvedSampling.TokenSequence(token_ids=ids) for ids in request.bad_words],
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
    )
    if sampling.typical_p != 1:
        resolved.typical_p = sampling.typical_p
    if sampling.repetition_penalty != 1:
        resolved.repetition_penalty = sampling.repetition_penalty
    if sampling.beam_search is not None:
        resolved.beam_search.CopyFrom(types_pb2.BeamSearch(**vars(sampling.beam_search)))
    return resolved
