"""What the clients send."""

from typing import Any

import pytest

from pagekeeper import InvalidRequestError, Message, Resume
from pagekeeper.client.requests import detokenize_request, generate_request, tokenize_request
from pagekeeper.v1 import generate_pb2


def request(prompt: Any = "x", resume: Resume | None = None, **sampling: Any) -> generate_pb2.GenerateRequest:
    return generate_request(prompt, model="", request_id="", stream=True, priority=0, resume=resume, sampling=sampling)


def test_text_is_sent_as_it_is() -> None:
    sent = request("Größe 🦉\0\n")
    assert sent.WhichOneof("input") == "text"
    assert sent.text == "Größe 🦉\0\n"


def test_an_empty_list_is_a_prompt_of_no_tokens() -> None:
    assert request([]).WhichOneof("input") == "token_ids"


def test_token_ids_no_vocabulary_has_still_reach_the_server() -> None:
    assert list(request([-1, 2**31]).token_ids.token_ids) == [-1, 2**31]


def test_messages_make_a_chat() -> None:
    turns = [Message("system", "Be brief."), Message("user", "Hello")]
    for sent in (request(turns), tokenize_request(turns, "")):
        assert [(m.role, m.content) for m in sent.chat.messages] == [("system", "Be brief."), ("user", "Hello")]


def test_only_what_was_set_is_sent() -> None:
    sent = request(temperature=0, top_p=None, stop=["\n"], stop_token_ids=[7], n=2)
    assert [field.name for field, _ in sent.sampling.ListFields()] == ["temperature", "stop", "stop_token_ids", "n"]
    assert not sent.HasField("resume")


def test_what_was_received_is_sent_for_each_candidate() -> None:
    sent = request(resume=Resume(seed=2**64 - 1, token_ids=[[5, 6], []]))
    assert sent.resume.seed == 2**64 - 1
    assert [(c.index, list(c.token_ids)) for c in sent.resume.candidates] == [(0, [5, 6]), (1, [])]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("text", {"prompt": "half a character: \ud800"}),
        ("token_ids", {"prompt": [2**63]}),
        ("token_ids", {"prompt": ["Hello"]}),
        ("token_ids", {"prompt": [1.5]}),
        ("chat.messages[1]", {"prompt": [Message("user", "Hello"), 5]}),
        ("chat.messages[0]", {"prompt": [Message("user", "\udc00")]}),
        ("sampling.seed", {"seed": -1}),
        ("sampling.temperature", {"temperature": "hot"}),
        ("sampling.max_tokens", {"max_tokens": 2**32}),
        ("sampling.stop", {"stop": "not a list"}),
        ("sampling.stop", {"stop": ["fine", 7]}),
        ("sampling.stop_token_ids", {"stop_token_ids": 7}),
        ("resume.seed", {"resume": Resume(-1, [])}),
        ("resume.candidates[1].token_ids", {"resume": Resume(1, [[1], [None]])}),
    ],
)
def test_a_value_that_does_not_fit_its_field_is_named_in_one_short_line(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request(**options)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_tokens_that_do_not_fit_are_named_for_detokenize_too() -> None:
    with pytest.raises(InvalidRequestError, match="token_ids: "):
        detokenize_request([2**64], "")


def test_a_misspelt_parameter_is_a_type_error_as_for_any_function() -> None:
    with pytest.raises(TypeError, match=r"'warmth'; there are temperature, top_p"):
        request(warmth=1)
