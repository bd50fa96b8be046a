"""What runners say of one request, as the messages that its client gets."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway.finish_reason import FinishReason
from gateway.generation import Generation, ResolvedRequest
from gateway.text.answer import Answer
from gateway.text.detokenizer import Detokenizer
from gateway.token_stream import News, Tokens
from pagekeeper.v1 import generate_pb2
from pagekeeper.v1.types_pb2 import Usage


@dataclass
class _Candidate:
    """One candidate on its way to the client.

    Attributes:
        answer: makes its text.
        position: how many of its tokens are in messages, or with the client since an earlier stream.
        delta: its part of the next message; None: nothing yet.
    """

    answer: Answer
    num_resumed: int = 0
    position: int = 0
    cumulative_logprob: float = 0.0
    delta: generate_pb2.CandidateDelta | None = None


class Messages:
    """Gathers what comes into the next message, and keeps each candidate's text and position.

    Args:
        request: what is answered.
        detokenizer: the state in which the text of every candidate begins.
        first: what the first message says besides.

    Attributes:
        open: candidates that have not ended for the client.
        num_emitted: tokens that the client has, all candidates and resumed ones included.
    """

    def __init__(
        self, request: ResolvedRequest, detokenizer: Detokenizer, first: generate_pb2.GenerateResponse
    ) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._message = first
        sampling = request.sampling
        self._candidates = [
            _Candidate(
                Answer(
                    detokenizer.fork(),
                    sampling.stop,
                    min_tokens=sampling.min_tokens,
                    include_stop=sampling.include_stop_str,
                )
            )
            for _ in range(sampling.n)
        ]
        self.open = set(range(sampling.n))
        self.num_emitted = 0

    def begin(self, resumed: Mapping[int, Sequence[int]], ended: Collection[int] = ()) -> Generation:
        """The generation whose messages these are. To be called once, first.

        Args:
            resumed: by candidate, the tokens that the client has; what it has of the text was sent with them.
            ended: the candidates that the client has to their end; nothing more is said of them.
        """
        rebuilt = {index: self._resume(index, token_ids) for index, token_ids in resumed.items()}
        generation = Generation(self._request, {index: kept for index, (kept, _) in rebuilt.items()})
        for index, (_, finish_reason) in rebuilt.items():
            if index in ended:
                self.open.remove(index)
                generation.stream.close(index)
            elif finish_reason:
                generation.end_resumed(index, finish_reason)
        return generation

    def add(self, news: News) -> list[int]:
        """Put what has come into the next message.

        Returns:
            Candidates that a stop string has ended; the runner does not know it.
        """
        if news.prompt_logprobs is not None:
            self._message.prompt.logprobs.extend(news.prompt_logprobs)
        if news.beams is not None:
            self._message.ClearField("beams")
            for beam in news.beams:
                text = self._text(beam.token_ids)
                self._message.beams.add(token_ids=beam.token_ids, text=text, score=beam.score)
        return [tokens.candidate for tokens in news.tokens if self._add_tokens(tokens) and not tokens.finish_reason]

    def take(self) -> generate_pb2.GenerateResponse:
        """The message so far; the next one begins."""
        message, self._message = self._message, generate_pb2.GenerateResponse(request_id=self._request.request_id)
        for candidate in self._candidates:
            candidate.delta = None
        self.num_emitted = sum(candidate.position for candidate in self._candidates)
        return message

    def take_last(self, generation: Generation) -> generate_pb2.GenerateResponse:
        """The message that ends the answer, with what it has used."""
        usage = Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            cached_tokens=generation.cached_tokens or 0,
            resumed_tokens=sum(candidate.num_resumed for candidate in self._candidates),
            recomputed_tokens=sum(generation.recomputed_tokens.values()),
            completion_tokens=sum(candidate.position for candidate in self._candidates),
        )
        self._message.usage.CopyFrom(usage)
        # The hypotheses stand in their place.
        self._message.ClearField("beams")
        return self.take()

    def _resume(self, index: int, token_ids: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
        """Rebuild a candidate's state behind tokens that the client has.

        Returns:
            The tokens that belong to its answer, and why they are the whole of it, if they are.
        """
        request, candidate = self._request, self._candidates[index]
        can_end = range(request.sampling.min_tokens, len(token_ids))
        end = next((place for place in can_end if token_ids[place] in request.stop_token_ids), None)
        piece = candidate.answer.push(token_ids[:end])
        candidate.num_resumed = candidate.position = len(piece.token_ids)
        self.num_emitted += candidate.position
        if piece.finish_reason or end is not None:
            return piece.token_ids, FinishReason.STOP
        return piece.token_ids, FinishReason.LENGTH if len(token_ids) >= request.max_tokens else None

    def _add_tokens(self, tokens: Tokens) -> bool:
        """Put a candidate's tokens into the next message; returns whether they end it."""
        candidate = self._candidates[tokens.candidate]
        if candidate.delta is None:
            candidate.delta = self._message.deltas.add(index=tokens.candidate, position=candidate.position)
        delta = candidate.delta
        piece = candidate.answer.push(tokens.token_ids, tokens.finish_reason)
        # A stop string cuts off what came behind it, text held back does not hold back its tokens.
        logprobs = tokens.logprobs[: len(piece.token_ids)]
        delta.token_ids.extend(piece.token_ids)
        delta.text += piece.text
        delta.logprobs.extend(logprobs)
        candidate.position += len(piece.token_ids)
        candidate.cumulative_logprob += sum(token.logprob for token in logprobs)
        if piece.finish_reason is None:
            return False
        self.open.remove(tokens.candidate)
        delta.finish_reason = piece.finish_reason.value
        if self._request.sampling.logprobs is not None:
            delta.cumulative_logprob = candidate.cumulative_logprob
        if tokens.score is not None:
            delta.score = tokens.score
        return True

    def _text(self, token_ids: Sequence[int]) -> str:
        detokenizer = self._detokenizer.fork()
        return detokenizer.push(token_ids) + detokenizer.flush()
