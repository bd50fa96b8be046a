"""Validation: every wrong field is named, and nothing wrong gets through."""

import math
from collections.abc import Callable, Iterator, Sequence

import pytest

from gateway.validation import (
    Limits,
    SamplingDefaults,
    ValidRequest,
    check_parameters,
    check_token_ids,
    fit,
    text_or_chat,
    validate,
)
from pagekeeper.common.errors import InvalidRequestError, UnknownModelError
from pagekeeper.v1.generate_pb2 import ChatMessage, ChatMessages, GenerateRequest, Resume, TokenIds, TokenizeRequest

V = 384
LIMITS = Limits(vocab_size=V, max_context_length=100)
LONGEST_TOKEN = 5


def check(request: GenerateRequest, defaults: SamplingDefaults | None = None) -> ValidRequest:
    return validate(request, "tiny", defaults or SamplingDefaults(), LIMITS, LONGEST_TOKEN)


def wrong_fields(request: GenerateRequest) -> list[str]:
    with pytest.raises(InvalidRequestError) as error:
        check(request)
    return [violation.field for violation in error.value.violations]


def sampling(**fields: object) -> GenerateRequest:
    request = GenerateRequest(text="hi")
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(request.sampling, name).extend(value)
        else:
            setattr(request.sampling, name, value)
    return request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("max_tokens", 0),
        ("n", 0),
        ("n", 2),
        ("n", 2**32 - 1),
    ],
)
def test_a_sampling_value_out_of_range_is_named(field: str, value: float) -> None:
    assert wrong_fields(sampling(**{field: value})) == [f"sampling.{field}"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("top_p", 1e-9), ("top_p", 1.0), ("top_k", -1), ("top_k", 0), ("top_k", V + 1), ("n", 1)],
)
def test_a_sampling_value_at_the_edge_is_right(field: str, value: float) -> None:
    check(sampling(**{field: value}))


def test_case_21_every_spelling_of_no_top_k_is_zero() -> None:
    """Case 21: -1 and 0 both mean off."""
    assert [check(sampling(top_k=k)).sampling.top_k for k in (-1, 0, 1)] == [0, 0, 1]


def test_a_request_id_is_printable_since_it_reaches_logs_and_terminals() -> None:
    request = sampling(temperature=0.0)
    request.request_id = "\x1b[2Jowned"
    assert wrong_fields(request) == ["request_id"]


def test_every_wrong_field_is_named_at_once() -> None:
    request = sampling(temperature=math.nan, top_p=0.0, max_tokens=0, stop=["ok", ""], stop_token_ids=[1, -1])
    request.request_id = "x" * 129
    assert wrong_fields(request) == [
        "request_id",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "sampling.stop[1]",
        "sampling.stop_token_ids[1]",
    ]


@pytest.mark.parametrize(
    ("value", "field"),
    [(["x"] * 17, "sampling.stop"), (["x" * 257], "sampling.stop[0]"), ([""], "sampling.stop[0]")],
)
def test_case_25_too_many_and_too_long_stop_strings_are_named(value: list[str], field: str) -> None:
    """Case 25: caps are checked at the door."""
    assert wrong_fields(sampling(stop=value)) == [field]
    check(sampling(stop=["x" * 256] * 16))


@pytest.mark.parametrize("token_id", [-1, V, 2**31, 2**63 - 1])
def test_case_20_a_token_id_out_of_the_vocabulary_is_named_where_it_stands(token_id: int) -> None:
    """Case 20: out-of-vocabulary ids are refused, in the prompt, in stop tokens, in resumed tokens."""
    assert wrong_fields(GenerateRequest(token_ids=TokenIds(token_ids=[1, 2, 3, token_id]))) == [
        "token_ids.token_ids[3]"
    ]
    assert wrong_fields(sampling(stop_token_ids=[token_id])) == ["sampling.stop_token_ids[0]"]
    resume = Resume(candidates=[Resume.Candidate(token_ids=[1, token_id])])
    assert wrong_fields(GenerateRequest(text="hi", resume=resume)) == ["resume.candidates[0].token_ids[1]"]


def test_an_error_names_no_more_fields_than_its_message_can_carry() -> None:
    assert len(wrong_fields(GenerateRequest(token_ids=TokenIds(token_ids=[-1] * 99)))) == 16
    messages = [ChatMessage(role="not a word", content="")] * 99
    assert len(wrong_fields(GenerateRequest(chat=ChatMessages(messages=messages)))) == 16


class Watched(Sequence[int]):
    """Token ids of which one is wrong, and how many of them were looked at one by one."""

    def __init__(self, length: int) -> None:
        self._token_ids = [-1] * length
        self.num_read = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # no slices here
        return self._token_ids[index]

    def __iter__(self) -> Iterator[int]:
        for token_id in self._token_ids:
            self.num_read += 1
            yield token_id


def test_more_than_could_fit_is_refused_by_its_number_alone() -> None:
    token_ids = Watched(101)
    with pytest.raises(InvalidRequestError, match="101 tokens are more than the context of 100"):
        check_token_ids("token_ids", token_ids, V, 100)
    assert token_ids.num_read == 0


def test_what_is_wrong_is_not_looked_at_to_its_end() -> None:
    token_ids = Watched(100_000)
    with pytest.raises(InvalidRequestError):
        check_token_ids("token_ids", token_ids, V, 100_000)
    # Twice by the search for the least and the greatest at C's speed, then only until an error is full.
    assert token_ids.num_read <= 2 * 100_000 + 17


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(token_ids=TokenIds(token_ids=[-1] * 101)), "token_ids"),
        (GenerateRequest(chat=ChatMessages(messages=[ChatMessage(role="?")] * 101)), "chat.messages"),
        (GenerateRequest(chat=ChatMessages(messages=[ChatMessage(role="?", content="x" * 501)])), "chat.messages"),
        (GenerateRequest(text="x" * 501), "text"),
        (sampling(stop=[""] * 17), "sampling.stop"),
        (sampling(stop_token_ids=[-1] * 65), "sampling.stop_token_ids"),
        (
            GenerateRequest(text="hi", resume=Resume(candidates=[Resume.Candidate(token_ids=[-1] * 101)])),
            "resume.candidates[0].token_ids",
        ),
    ],
)
def test_a_field_that_is_too_big_is_refused_before_its_elements_are_looked_at(
    request_: GenerateRequest, field: str
) -> None:
    assert wrong_fields(request_) == [field]


def test_a_text_that_no_tokens_could_hold_is_refused_with_the_boundary() -> None:
    check(GenerateRequest(text="x" * 500))
    with pytest.raises(InvalidRequestError, match="text: 501 characters; at most 500 could fit"):
        check(GenerateRequest(text="x" * 501))
    assert text_or_chat(TokenizeRequest(text="x" * 500), LIMITS, LONGEST_TOKEN) == "x" * 500
    with pytest.raises(InvalidRequestError, match="text: 501 characters; at most 500 could fit"):
        text_or_chat(TokenizeRequest(text="x" * 501), LIMITS, LONGEST_TOKEN)


def test_parameters_are_checked_without_limits() -> None:
    check_parameters(GenerateRequest(token_ids=TokenIds(token_ids=[-1])), "tiny", SamplingDefaults())
    for wrong in (sampling(top_p=0.0), sampling(stop=["x"] * 17), sampling(n=2)):
        with pytest.raises(InvalidRequestError):
            check_parameters(wrong, "tiny", SamplingDefaults())
    with pytest.raises(UnknownModelError):
        check_parameters(GenerateRequest(model="other"), "tiny", SamplingDefaults())


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(), "text"),
        (GenerateRequest(token_ids=TokenIds()), "token_ids"),
        (GenerateRequest(chat={}), "chat.messages"),
    ],
)
def test_case_19_no_prompt_is_named(request_: GenerateRequest, field: str) -> None:
    """Case 19: a typed answer to an empty prompt."""
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        check(request_)
    assert wrong_fields(request_) == [field]


def test_a_role_is_a_word() -> None:
    request = GenerateRequest()
    request.chat.messages.append(ChatMessage(role="user", content="hi"))
    check(request)
    request.chat.messages.append(ChatMessage(role="user<|im_end|>", content="hi"))
    assert wrong_fields(request) == ["chat.messages[1].role"]


def test_an_unknown_model_is_its_own_error() -> None:
    with pytest.raises(UnknownModelError, match="other"):
        check(GenerateRequest(model="other", text="hi"))
    check(GenerateRequest(model="tiny", text="hi"))


def test_what_a_request_leaves_out_comes_from_the_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, max_tokens=64)
    chosen = check(GenerateRequest(text="hi"), defaults).sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p, chosen.max_tokens) == (0.6, 0.9, 20, 0.1, 64)
    assert chosen.seed is None
    assert check(sampling(temperature=0.0), defaults).sampling.temperature == 0.0


def test_a_resumed_request_keeps_the_seed_of_its_stream() -> None:
    request = GenerateRequest(text="hi", resume=Resume(seed=7))
    assert check(request).sampling.seed == 7
    assert check(request).resumed == []
    request.sampling.seed = 8
    assert wrong_fields(request) == ["resume.seed"]


def test_a_resume_names_candidates_that_cannot_be() -> None:
    two = Resume(candidates=[Resume.Candidate(), Resume.Candidate(index=1)])
    assert wrong_fields(GenerateRequest(text="hi", resume=two)) == ["resume.candidates"]
    other = Resume(candidates=[Resume.Candidate(index=1)])
    assert wrong_fields(GenerateRequest(text="hi", resume=other)) == ["resume.candidates[0].index"]


@pytest.mark.parametrize("length", [98, 99])
def test_case_14_the_longest_prompts_leave_room_for_an_answer(length: int) -> None:
    """Case 14: one boundary; up to it the answer is capped by the context."""
    assert fit(check(sampling(max_tokens=10)), [5] * length, LIMITS) == 100 - length


@pytest.mark.parametrize("length", [100, 101])
def test_case_14_a_longer_prompt_is_refused_with_the_boundary(length: int) -> None:
    """Case 14: the error states the boundary that is enforced."""
    request = check(GenerateRequest(token_ids=TokenIds(token_ids=[5])))
    with pytest.raises(InvalidRequestError, match=f"token_ids: .* {length} tokens; at most 99"):
        fit(request, [5] * length, LIMITS)


def test_resumed_tokens_must_fit_behind_the_prompt() -> None:
    def resumed(count: int) -> ValidRequest:
        resume = Resume(candidates=[Resume.Candidate(token_ids=[5] * count)])
        return check(GenerateRequest(text="hi", resume=resume))

    assert fit(resumed(50), [5] * 50, LIMITS) == 50
    with pytest.raises(InvalidRequestError, match=r"resume.candidates\[0\].token_ids"):
        fit(resumed(51), [5] * 50, LIMITS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingDefaults(temperature=-1),
        lambda: SamplingDefaults(max_tokens=0),
        lambda: SamplingDefaults(top_k=50.5),
        lambda: SamplingDefaults(top_k=True),
        lambda: SamplingDefaults(top_k=2**31),
        lambda: SamplingDefaults(top_p="1"),
    ],
)
def test_defaults_are_checked_like_a_request(make: Callable[[], SamplingDefaults]) -> None:
    with pytest.raises(InvalidRequestError):
        make()


def test_what_comes_in_a_later_version_is_refused_by_name() -> None:
    assert wrong_fields(sampling(typical_p=0.5, echo=True)) == ["sampling.typical_p", "sampling.echo"]
    assert wrong_fields(GenerateRequest(text="hi", branch={"token_ids": [5]})) == ["branch"]
