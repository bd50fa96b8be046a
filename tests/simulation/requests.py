"""What simulated clients ask for, and the messages that they get."""

from dataclasses import dataclass, field

from gateway.finish_reason import FinishReason
from gateway.generation import ResolvedRequest
from gateway.sampling import BeamSearch, Sampling
from pagekeeper.v1 import types_pb2
from tests.simulation.model import STOP


@dataclass(frozen=True)
class Request:
    """One client's request.

    Attributes:
        num_candidates: answers that are wanted.
        beam_width: of a beam search; 0: none.
        arrival_s: when the client comes.
        stop_word: a token at which the gateway ends an answer, as it does at a stop string; 0: none.
        read_s: how long the client takes to read a message; 0: it is always ready.
    """

    request_id: str
    tenant: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    priority: int
    num_candidates: int
    beam_width: int
    stop_word: int
    arrival_s: float
    read_s: float

    def resolved(self, *, is_resumed: bool) -> ResolvedRequest:
        """As the gateway resolves it."""
        beams = None
        if self.beam_width:
            beams = BeamSearch(self.beam_width, 1.0, types_pb2.EARLY_STOPPING_FALSE, intermediate=False)
        return ResolvedRequest(
            request_id=self.request_id,
            tenant=self.tenant,
            prompt_token_ids=list(self.prompt),
            sampling=Sampling(max_tokens=self.max_tokens, n=self.num_candidates, beam_search=beams),
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop_token_ids=frozenset({STOP}),
            priority=self.priority,
            is_resumed=is_resumed,
        )


@dataclass(frozen=True)
class Call:
    """What a client sends: its request, and the tokens that it has of an earlier stream."""

    request: Request
    resumed: dict[int, list[int]] | None = None


@dataclass(frozen=True)
class Delta:
    """What one candidate gained, for the client."""

    candidate: int
    position: int
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Message:
    """One message of a client's stream."""

    deltas: list[Delta] = field(default_factory=list)
    is_last: bool = False
    error: str | None = None
    """The stream has failed; nothing follows."""
