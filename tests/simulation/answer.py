"""What a client must get: every token, once, in order, and behind exactly the tokens that it has."""

from gateway.finish_reason import FinishReason
from model_runner.beam_search import BeamSearchParams, EarlyStopping
from tests.simulation.model import STOP, chain, likeliest, mix, origin, search
from tests.simulation.requests import Delta, Request
from tests.simulation.world import Violation


class Answer:
    """One candidate's answer as a client has it.

    Args:
        request: whose.
        index: which candidate, or hypothesis of a beam search.
        rounds: what rounding decides may come out either way.
    """

    def __init__(self, request: Request, index: int, *, rounds: bool) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._request = request
        self._index = index
        self._rounds = rounds
        self._value = chain(origin(request.tenant), request.prompt)[-1]
        self._hypothesis = _hypothesis(request, index, self._value) if request.beam_width else None

    def take(self, delta: Delta) -> None:
        """Take what has come, as `pagekeeper.client` does.

        Nobody but the client knows that a candidate has ended when it resumes the others: that one ends once more, and
        where rounding decides, it may even go on. The client does not listen.
        """
        if self.finish_reason is not None:
            if not self._rounds and (delta.token_ids or delta.finish_reason is not self.finish_reason):
                raise Violation(f"{delta} follows the end, {self.finish_reason}")
            return
        if delta.position != len(self.token_ids):
            raise Violation(f"{delta} follows {len(self.token_ids)} tokens")
        for token_id in delta.token_ids:
            if token_id not in self._expected() or token_id == self._request.stop_word:
                raise Violation(f"{token_id} follows {self.token_ids}, where {self._expected()} was to come")
            self.token_ids.append(token_id)
            self._value = mix(self._value, token_id)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self._check_end(delta.finish_reason)

    def _expected(self) -> tuple[int, ...]:
        """What may come next; STOP stands for an end."""
        position = len(self.token_ids)
        if self._hypothesis is not None:
            rest = self._hypothesis[0][position : position + 1]
            return tuple(rest) or (STOP,)
        if position == self._request.max_tokens:
            return ()
        ties = likeliest(self._value, self._request.seed, self._index)
        return ties if self._rounds else ties[:1]

    def _check_end(self, reason: FinishReason) -> None:
        if self._hypothesis is not None:
            fits = (self.token_ids, reason) == self._hypothesis
        elif reason is FinishReason.LENGTH:
            fits = len(self.token_ids) == self._request.max_tokens
        else:
            fits = not {STOP, self._request.stop_word}.isdisjoint(self._expected())
        if not fits:
            raise Violation(f"{self.token_ids} end with {reason}, where {self._expected()} was to come")


def _hypothesis(request: Request, index: int, value: int) -> tuple[list[int], FinishReason]:
    """What a beam search must find."""
    params = BeamSearchParams(request.beam_width, 1.0, EarlyStopping.FALSE, request.num_candidates, intermediate=False)
    found = search(value, params, request.max_tokens)[index]
    if found.finish_reason is None:
        raise Violation(f"the search of {request} does not end")
    return found.token_ids, FinishReason[found.finish_reason.name]
