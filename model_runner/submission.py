"""What a gateway submits, turned into sequences, or refused."""

import itertools
from dataclasses import dataclass

from model_runner.beam_group import BeamGroup, most_blocks
from model_runner.beam_search import BeamSearch
from model_runner.logprobs import PromptLogprobs
from model_runner.sampling_params import SamplingParams
from model_runner.sequence import Sequence
from model_runner.wire import beam_search_params, named_tokens, sampling_params
from pagekeeper.common.ids import SequenceId
from pagekeeper.v1 import runner_pb2


@dataclass(frozen=True)
class RequestLimits:
    """What a request must keep to."""

    vocab_size: int
    max_context_length: int
    """Most tokens of prompt and answer together."""
    block_size: int
    num_blocks: int
    """Most blocks that one request may hold."""
    max_sequences: int
    """Most sequences that run at once."""


class Submissions:
    """Makes the sequences, each with an id that no other one has had."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._ids = itertools.count(1)

    def refusal(self, submit: runner_pb2.Submit) -> runner_pb2.Refusal | None:
        """Why this can never be served, if so. The gateway checks the same limits; this is the runner's own door."""
        limits, prompt = self._limits, len(submit.prompt_token_ids)
        longest = max((len(c.generated_token_ids) for c in submit.candidates), default=0)
        ids = itertools.chain(submit.prompt_token_ids, *(c.generated_token_ids for c in submit.candidates))
        if not prompt:
            field, detail = "prompt", "the prompt is empty"
        elif prompt + longest >= limits.max_context_length:
            field, detail = "prompt", f"at most {limits.max_context_length - 1} tokens fit before the next one"
        elif longest >= submit.sampling.max_tokens:
            field, detail = "sampling.max_tokens", "must be more than the tokens generated already"
        elif max(ids) >= limits.vocab_size:
            field, detail = "token_ids", f"must be less than the vocabulary's size, {limits.vocab_size}"
        elif unknown := [name for name, token_id in named_tokens(submit.sampling) if token_id >= limits.vocab_size]:
            field, detail = f"sampling.{unknown[0]}", f"must be less than the vocabulary's size, {limits.vocab_size}"
        elif detail := self._too_wide(submit):
            field = "sampling.beam_search.width"
        else:
            return None
        return runner_pb2.Refusal(code=runner_pb2.Refusal.CODE_INVALID, field=field, detail=detail)

    def candidates(self, submit: runner_pb2.Submit) -> list[Sequence]:
        """A sequence for each candidate."""
        params, prompt = sampling_params(submit.sampling), _prompt_logprobs(submit)
        candidates = submit.candidates or [runner_pb2.Submit.Candidate()]
        return [self._sequence(submit, candidate, params, prompt) for candidate in candidates]

    def beams(self, submit: runner_pb2.Submit) -> list[Sequence]:
        """The sequences of a beam search, its leader first."""
        params = beam_search_params(submit.sampling.beam_search, num_hypotheses=max(1, len(submit.candidates)))
        sampling, prompt = sampling_params(submit.sampling), _prompt_logprobs(submit)
        empty = runner_pb2.Submit.Candidate()
        sequences = [self._sequence(submit, empty, sampling, prompt) for _ in range(params.width)]
        leader = sequences[0]
        max_tokens = leader.max_total_tokens - leader.num_prompt_tokens
        group = BeamGroup(BeamSearch(params, leader.sampling.stop_token_ids, max_tokens), sequences)
        for sequence in sequences:
            sequence.beams, sequence.num_continuations = group, group.search.num_continuations
        return sequences

    def _sequence(
        self,
        submit: runner_pb2.Submit,
        candidate: runner_pb2.Submit.Candidate,
        params: SamplingParams,
        prompt_logprobs: PromptLogprobs | None,
    ) -> Sequence:
        prompt, generated = list(submit.prompt_token_ids), list(candidate.generated_token_ids)
        return Sequence(
            id=SequenceId(next(self._ids)),
            tenant=submit.tenant,
            token_ids=prompt + generated,
            num_prompt_tokens=len(prompt),
            max_total_tokens=min(len(prompt) + submit.sampling.max_tokens, self._limits.max_context_length),
            sampling=params,
            candidate=candidate.index,
            priority=submit.priority,
            num_resumed_tokens=len(generated),
            prompt_logprobs=prompt_logprobs,
            # The last known token's KV never exists before the token after it is sampled.
            was_computed=len(prompt) + len(generated) - 1 if generated else 0,
        )

    def _too_wide(self, submit: runner_pb2.Submit) -> str:
        """Why a beam search can never run, if so: its beams do so together or not at all."""
        limits, width, prompt = self._limits, submit.sampling.beam_search.width, len(submit.prompt_token_ids)
        length = min(prompt + submit.sampling.max_tokens, limits.max_context_length)
        needed = most_blocks(width, prompt, length, limits.block_size)
        if width > limits.max_sequences:
            return f"at most {limits.max_sequences} sequences run at once"
        if width and needed > limits.num_blocks:
            return f"{width} beams of {length} tokens may need {needed} blocks; the pool has {limits.num_blocks}"
        return ""


def _prompt_logprobs(submit: runner_pb2.Submit) -> PromptLogprobs | None:
    if not submit.sampling.HasField("prompt_logprobs"):
        return None
    return PromptLogprobs(submit.sampling.prompt_logprobs, len(submit.prompt_token_ids) - 1)
