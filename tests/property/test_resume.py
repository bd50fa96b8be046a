"""A stream that is cut anywhere and resumed: both parts together are the uncut stream, in tokens, text and the rest."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.finish_reason import FinishReason
from gateway.generation import Generation, ResolvedRequest
from gateway.messages import Messages
from gateway.sampling import Sampling
from gateway.text.tokenizer import TextTokenizer
from gateway.token_stream import Tokens
from pagekeeper.v1.generate_pb2 import CandidateDelta, GenerateResponse
from pagekeeper.v1.types_pb2 import TokenLogprobs
from tests.fakes.tokenizer import END_OF_TURN_ID, byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZERS = {
    "byte-level": TextTokenizer(byte_level_tokenizer().to_str()),
    "byte-fallback": TextTokenizer(byte_fallback_tokenizer().to_str()),
}
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
MAX_TOKENS = 24
any_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


@dataclass
class Received:
    """What a client joins of one candidate."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    last: CandidateDelta | None = None

    def take(self, delta: CandidateDelta, num_resumed: int = 0) -> None:
        assert delta.position == num_resumed + len(self.token_ids)
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += [token.logprob for token in delta.logprobs]
        if delta.finish_reason:
            self.last = delta


@dataclass(frozen=True)
class Answers:
    """What a model says to one request: each candidate's tokens, and why they end."""

    request: ResolvedRequest
    token_ids: Mapping[int, list[int]]
    branch: Sequence[int]

    def end(self, candidate: int) -> FinishReason:
        return LENGTH if len(self.token_ids[candidate]) == MAX_TOKENS else STOP


def stream(
    tokenizer: TextTokenizer,
    answers: Answers,
    sizes: Iterable[int],
    resumed: Mapping[int, list[int]],
    ended: Collection[int] = (),
) -> list[GenerateResponse]:
    """Every message of a stream; `sizes` says how many tokens each step brings, in turn for each candidate."""
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(answers.branch)
    messages = Messages(answers.request, detokenizer, GenerateResponse())
    generation = messages.begin(resumed, ended)
    steps, found = itertools.cycle(sizes), []
    if not messages.open:
        found.append(messages.take_last(generation))
    while messages.open:
        for candidate in sorted(generation.stream.open):
            make(generation, answers, candidate, next(steps))
        for candidate in messages.add(generation.stream.take()):
            generation.stream.close(candidate)
        found.append(messages.take() if messages.open else messages.take_last(generation))
    return found


def make(generation: Generation, answers: Answers, candidate: int, size: int) -> None:
    """A runner's step: the next tokens of a candidate."""
    position = len(generation.token_ids[candidate])
    whole = answers.token_ids[candidate]
    token_ids = whole[position : position + size]
    is_last = position + len(token_ids) == len(whole) and (size > len(token_ids) or answers.end(candidate) is LENGTH)
    logprobs = [TokenLogprobs(token_id=token_id, logprob=-1.0 - token_id) for token_id in token_ids]
    tokens = Tokens(candidate, list(token_ids), answers.end(candidate) if is_last else None, logprobs)
    generation.accept(position, tokens)


def joined(
    messages: Sequence[GenerateResponse], num_candidates: int, resumed: Mapping[int, list[int]]
) -> list[Received]:
    received = [Received() for _ in range(num_candidates)]
    for message in messages:
        for delta in message.deltas:
            received[delta.index].take(delta, len(resumed.get(delta.index, ())))
    return received


@st.composite
def all_answers(draw: st.DrawFn, tokenizer: TextTokenizer) -> Answers:
    """Random tokens, or text with characters of several tokens; random stop strings, of which some occur."""
    texts = st.text(st.sampled_from("ab th🙂é東 \n\ufffd"), max_size=12).map(tokenizer.encode)
    ids = st.lists(st.integers(3, 290), max_size=MAX_TOKENS) | texts
    candidates = draw(st.lists(ids, min_size=1, max_size=3))
    token_ids = {index: each[:MAX_TOKENS] for index, each in enumerate(candidates)}
    text = tokenizer.decode(token_ids[0])
    part = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 4)).map(
        lambda at: text[at[0] : at[0] + at[1]] or "x"
    )
    stops = draw(st.lists(part | st.text(st.sampled_from("abt h"), min_size=1, max_size=4), max_size=3))
    sampling = Sampling(
        max_tokens=MAX_TOKENS,
        n=len(candidates),
        stop=tuple(stops),
        include_stop_str=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 8)),
        logprobs=0,
    )
    request = ResolvedRequest(
        "r", "default", [5], sampling, 1, MAX_TOKENS, stop_token_ids=frozenset([END_OF_TURN_ID]), is_resumed=True
    )
    return Answers(request, token_ids, draw(ids))


sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


@any_tokenizer
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_both_parts_of_a_cut_stream_are_the_uncut_one(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    answers = data.draw(all_answers(tokenizer))
    count = len(answers.token_ids)
    whole = joined(stream(tokenizer, answers, [1], {}), count, {})
    parts = [Received() for _ in range(count)]
    # Cut more than once, each time behind any message, the first one, or before it.
    for _ in range(data.draw(st.integers(1, 3))):
        resumed = {index: part.token_ids for index, part in enumerate(parts)}
        messages = stream(tokenizer, answers, data.draw(sizes), resumed)
        cut = data.draw(st.integers(0, len(messages) - 1))
        merge(parts, joined(messages[:cut], count, resumed))
    resumed = {index: part.token_ids for index, part in enumerate(parts) if part.token_ids or data.draw(st.booleans())}
    # A client may say what it knows to have ended, and does not hear of it again.
    ended = {index for index, part in enumerate(parts) if part.last and index in resumed and data.draw(st.booleans())}
    messages = stream(tokenizer, answers, data.draw(sizes), resumed, ended)
    assert ended.isdisjoint(delta.index for message in messages for delta in message.deltas)
    merge(parts, joined(messages, count, resumed))
    for index, (part, expected) in enumerate(zip(parts, whole, strict=True)):
        assert part.last is not None
        assert expected.last is not None
        assert (part.token_ids, part.text, part.logprobs) == (expected.token_ids, expected.text, expected.logprobs)
        assert part.last.finish_reason == expected.last.finish_reason, index
    usage = messages[-1].usage
    assert usage.completion_tokens == sum(len(part.token_ids) for part in parts)
    assert usage.resumed_tokens == sum(map(len, resumed.values()))


def merge(parts: list[Received], more: list[Received]) -> None:
    """What a later stream of the same request brings; of a candidate that has ended, it only says that again."""
    for part, added in zip(parts, more, strict=True):
        assert added.last is None or added.last.cumulative_logprob == sum(added.logprobs)
        if part.last is not None:
            assert added.token_ids == []
            continue
        part.token_ids = part.token_ids + added.token_ids
        part.text += added.text
        part.logprobs += added.logprobs
        part.last = added.last
