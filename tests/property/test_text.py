"""Text of answers: whatever the tokens and wherever the messages end, the join is the text of all tokens."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.finish_reason import FinishReason
from gateway.text.answer import Answer
from gateway.text.chat_template import ChatTemplate
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenizer import ChatTurn, TextTokenizer
from tests.fakes.tokenizer import (
    CHAT_TEMPLATE,
    END,
    END_OF_TURN,
    START_OF_TURN,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
)

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {})
TOKENIZERS = {
    "byte-level": TextTokenizer(byte_level_tokenizer().to_str(), TEMPLATE),
    "byte-fallback": TextTokenizer(byte_fallback_tokenizer().to_str(), TEMPLATE),
}
SPECIAL = (END, START_OF_TURN, END_OF_TURN)

any_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
examples = settings(max_examples=150, deadline=None)
random_ids = st.lists(st.integers(0, 383), max_size=40)
# Whole characters, spaces and special tokens are likelier than in random_ids.
texts = st.text(st.sampled_from("ab th🙂é東 \n\ufffd"), max_size=24) | st.text(max_size=24)
stops = st.lists(st.text(st.sampled_from("abt h"), min_size=1, max_size=4), max_size=3)


def divided(token_ids: Sequence[int], cuts: list[int]) -> list[list[int]]:
    """The same tokens in several messages."""
    bounds = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    return [list(token_ids[low:high]) for low, high in itertools.pairwise(bounds)]


def streamed(tokenizer: TextTokenizer, messages: list[list[int]], stop: Sequence[str] = ()) -> tuple[list[int], str]:
    """Tokens and text that a client joins; the last message also ends the answer."""
    answer = Answer(tokenizer.detokenizer(), stop)
    token_ids: list[int] = []
    text = ""
    for message in [*messages, []]:
        piece = answer.push(message, None if message else FinishReason.LENGTH)
        token_ids += piece.token_ids
        text += piece.text
        if piece.finish_reason:
            break
    return token_ids, text


@any_tokenizer
@examples
@given(token_ids=random_ids, cuts=st.lists(st.integers(0, 99), max_size=8))
def test_joined_text_of_any_tokens_is_the_text_of_all_of_them(
    tokenizer: TextTokenizer, token_ids: list[int], cuts: list[int]
) -> None:
    assert streamed(tokenizer, divided(token_ids, cuts)) == (token_ids, tokenizer.decode(token_ids))


@any_tokenizer
@examples
@given(text=texts, cuts=st.lists(st.integers(0, 99), max_size=8))
def test_joined_text_of_any_text_is_the_text_of_all_of_it(tokenizer: TextTokenizer, text: str, cuts: list[int]) -> None:
    token_ids = tokenizer.encode(text)
    assert streamed(tokenizer, divided(token_ids, cuts))[1] == tokenizer.decode(token_ids)


@any_tokenizer
@examples
@given(text=texts.filter(lambda text: "\ufffd" not in text))
def test_no_replacement_character_stands_for_a_pending_one(tokenizer: TextTokenizer, text: str) -> None:
    detokenizer = tokenizer.detokenizer()
    token_ids = tokenizer.encode(text)
    whole = tokenizer.decode(token_ids)
    joined = ""
    for token_id in token_ids:
        joined += detokenizer.push([token_id])
        assert whole.startswith(joined)


@any_tokenizer
@examples
@given(token_ids=random_ids, cuts=st.lists(st.integers(0, 99), max_size=8))
def test_the_text_so_far_depends_on_the_tokens_alone(
    tokenizer: TextTokenizer, token_ids: list[int], cuts: list[int]
) -> None:
    at_once, one_by_one = tokenizer.detokenizer(), tokenizer.detokenizer()
    for message in divided(token_ids, cuts):
        text = at_once.push(message)
        assert text == "".join(one_by_one.push([token_id]) for token_id in message)


@any_tokenizer
@examples
@given(token_ids=random_ids, stop=stops, cuts=st.lists(st.integers(0, 99), max_size=8))
def test_case_27_stop_strings_across_messages_neither_repeat_nor_lose_text(
    tokenizer: TextTokenizer, token_ids: list[int], stop: list[str], cuts: list[int]
) -> None:
    """Case 27: joined deltas are the text of the one-message answer, always: the text up to the stop string."""
    taken, text = streamed(tokenizer, divided(token_ids, cuts), stop)
    assert (taken, text) == streamed(tokenizer, [token_ids] if token_ids else [], stop)
    assert taken == token_ids[: len(taken)]
    whole = tokenizer.decode(token_ids)
    ends = [(whole.find(string) + len(string), whole.find(string)) for string in stop if string in whole]
    assert text == (whole[: min(ends)[1]] if ends else whole)


@examples
@given(text=st.text("ab", max_size=30), stop=stops, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stop: list[str], cuts: list[int]) -> None:
    strings = StopStrings(stop)
    seen = passed = ""
    for piece in divided(list(text), cuts):
        seen += "".join(piece)
        let_through, stopped = strings.push("".join(piece))
        passed += let_through
        if stopped:
            return
        held = seen[len(passed) :]
        assert seen == passed + held
        assert not held or any(string.startswith(held) and string != held for string in stop)


@any_tokenizer
@examples
@given(contents=st.lists(texts, min_size=1, max_size=3))
def test_an_ordinary_chat_is_encoded_as_its_plain_rendering(tokenizer: TextTokenizer, contents: list[str]) -> None:
    turns = tuple(ChatTurn("user", content) for content in contents)
    rendered = TEMPLATE.render([turn._asdict() for turn in turns])
    plain = tokenizer._tokenizer.encode(rendered, add_special_tokens=False).ids
    assert tokenizer.encode_chat(turns) == plain
    # The guard's way, taken only where a user's text names a special token, agrees wherever both can be compared.
    assert tokenizer._guard.encode(rendered) == plain


@examples
@given(
    parts=st.lists(st.sampled_from([*SPECIAL, "<|im", "_start|>", "<|", "<", "|>", "hello", " ", "é"]), max_size=8),
    before=texts,
)
def test_case_30_no_text_of_a_user_becomes_a_special_token(parts: list[str], before: str) -> None:
    """Case 30: special-token text typed into a chat stays text, whole, cut off or put together from pieces."""
    tokenizer = TOKENIZERS["byte-level"]
    content = before + "".join(parts)
    token_ids = tokenizer.encode_chat((ChatTurn("user", content),))
    of_template = tokenizer.encode_chat((ChatTurn("user", ""),))
    assert [i for i in token_ids if i < 3] == [i for i in of_template if i < 3]
    assert tokenizer._tokenizer.decode(token_ids, skip_special_tokens=False) == TEMPLATE.render(
        [{"role": "user", "content": content}]
    )
