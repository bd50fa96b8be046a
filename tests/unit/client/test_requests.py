"""What the clients send."""

import math
from typing import Any

import pytest

from pagekeeper import BeamSearch, InvalidRequestError, Message, Resume
from pagekeeper.client.requests import branch_request, detokenize_request, generate_request, tokenize_request
from pagekeeper.client.values import Sampling
from pagekeeper.v1 import generate_pb2, types_pb2


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


def test_every_parameter_of_the_protocol_can_be_set() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.25,
        "typical_p": 0.75,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {9: 2.0, 8: -math.inf},
        "allowed_token_ids": [10, 11],
        "bad_words": ["owl"],
        "seed": 1,
        "min_tokens": 2,
        "max_tokens": 5,
        "stop": ["x"],
        "include_stop_str": True,
        "stop_token_ids": [30],
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 3,
        "echo": True,
        "n": 2,
        "beam_search": BeamSearch(4, length_penalty=0.5, early_stopping="never", intermediate=True),
    }
    assert set(given) == set(Sampling.__annotations__) == set(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    beams = types_pb2.BeamSearch(
        width=4, length_penalty=0.5, early_stopping=types_pb2.EARLY_STOPPING_NEVER, intermediate=True
    )
    assert request(**given).sampling == types_pb2.SamplingParams(**given | {"beam_search": beams})
    assert not request(**dict.fromkeys(given)).sampling.ListFields()


@pytest.mark.parametrize(("value", "wire"), [(False, 1), (True, 2), ("never", 3)])
def test_early_stopping_has_the_values_of_transformers(value: Any, wire: int) -> None:
    assert request(beam_search=BeamSearch(2, early_stopping=value)).sampling.beam_search.early_stopping == wire


def branch(position: int, **sampling: Any) -> generate_pb2.GenerateRequest:
    first = request("x", Resume(3, [[5]]), seed=3, temperature=0.5, stop=["a"], n=2)
    first.request_id = "first"
    return branch_request(
        first, [5, 6, 7], position, request_id="second", earlier_request_id="first", sampling=Sampling(**sampling)
    )


def test_a_branch_asks_for_the_same_behind_the_tokens_that_are_kept() -> None:
    sent = branch(2)
    assert (sent.text, sent.request_id, sent.branch.request_id) == ("x", "second", "first")
    assert list(sent.branch.token_ids) == [5, 6]
    assert not sent.HasField("resume")
    assert sent.sampling == types_pb2.SamplingParams(temperature=0.5, stop=["a"], n=2)


def test_a_branch_takes_other_sampling_and_none_clears_it() -> None:
    sent = branch(0, temperature=None, stop=["b"], n=4, seed=9)
    assert sent.sampling == types_pb2.SamplingParams(stop=["b"], n=4, seed=9)
    assert sent.HasField("branch")


def test_a_branch_of_a_branch_keeps_the_tokens_of_both() -> None:
    again = branch_request(branch(2), [8, 9], 1, request_id="", earlier_request_id="second", sampling=Sampling())
    assert (list(again.branch.token_ids), again.branch.request_id) == ([5, 6, 8], "second")


@pytest.mark.parametrize("position", [-1, 4])
def test_a_branch_from_where_the_answer_has_no_token_is_refused(position: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"position: .*; the answer has 3 tokens"):
        branch(position)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("sampling.logit_bias", {"logit_bias": {"five": 1.0}}),
        ("sampling.logit_bias", {"logit_bias": [5]}),
        ("sampling.bad_words", {"bad_words": "not a list"}),
        ("sampling.logprobs", {"logprobs": 2**31}),
        ("sampling.beam_search", {"beam_search": {"width": 2}}),
        ("sampling.beam_search", {"beam_search": BeamSearch(-1)}),
        ("sampling.beam_search", {"beam_search": BeamSearch(2, early_stopping="soon")}),
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
        ("resume.candidates[1].finish_reason", {"resume": Resume(1, [[1], [2]], [None, "tired"])}),
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


def test_an_end_of_a_candidate_without_tokens_of_its_own_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="finish_reasons"):
        request(resume=Resume(1, [[5]], ["stop", "stop"]))
