"""A generation as the message that a runner gets."""

from gateway.generation import Generation, ResolvedRequest
from pagekeeper.v1 import runner_pb2, types_pb2


def to_submit(generation: Generation, attempt: int) -> runner_pb2.Submit:
    """What is still to be done of a generation: its open candidates, each behind the tokens that it has."""
    request = generation.request
    sampling = _resolved_sampling(request)
    if generation.needs_prompt_logprobs:
        sampling.prompt_logprobs = request.sampling.prompt_logprobs or 0
    return runner_pb2.Submit(
        request=generation.number,
        attempt=attempt,
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


def _resolved_sampling(request: ResolvedRequest) -> runner_pb2.ResolvedSampling:
    """Everything but prompt_logprobs, which not every attempt needs. What is off is not set."""
    sampling = request.sampling
    resolved = runner_pb2.ResolvedSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=request.seed,
        max_tokens=request.max_tokens,
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
