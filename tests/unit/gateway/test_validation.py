"""Validation: every wrong field is named, and nothing wrong gets through."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from gateway.sampling import BeamSearch, Caps, SamplingDefaults, check_bans
from gateway.validation import (
    Limits,
    ValidRequest,
    check_parameters,
    check_token_ids,
    fit,
    text_or_chat,
    validate,
)
from pagekeeper.common.errors import InvalidRequestError, UnknownModelError
from pagekeeper.v1 import types_pb2
from pagekeeper.v1.generate_pb2 import (
    Branch,
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    Resume,
    TokenIds,
    TokenizeRequest,
)
from pagekeeper.v1.types_pb2 import SamplingParams

V = 384
LIMITS = Limits(vocab_size=V, max_context_length=100)
LONGEST_TOKEN = 5
CAPS = Caps(max_logprob_values=2000)


def check(request: GenerateRequest, defaults: SamplingDefaults | None = None) -> ValidRequest:
    return validate(request, "tiny", defaults or SamplingDefaults(), CAPS, LIMITS, LONGEST_TOKEN)


def wrong_fields(request: GenerateRequest) -> list[str]:
    with pytest.raises(InvalidRequestError) as error:
        check(request)
    return [violation.field for violation in error.value.violations]


def sampling(**fields: Any) -> GenerateRequest:
    return GenerateRequest(text="hi", sampling=SamplingParams(**fields))


def resuming(*candidates: list[int], **fields: Any) -> GenerateRequest:
    request = sampling(**fields)
    request.resume.candidates.extend(
        Resume.Candidate(index=index, token_ids=ids) for index, ids in enumerate(candidates)
    )
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
        ("typical_p", 0.0),
        ("typical_p", 1.1),
        ("typical_p", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 100.1),
        ("repetition_penalty", math.nan),
        ("min_tokens", 257),
        ("max_tokens", 0),
        ("n", 0),
        ("n", 17),
        ("n", 2**32 - 1),
    ],
)
def test_a_sampling_value_out_of_range_is_named(field: str, value: float) -> None:
    assert wrong_fields(sampling(**{field: value})) == [f"sampling.{field}"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("typical_p", 1.0),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 0.01),
        ("min_tokens", 256),
        ("logprobs", 20),
        ("prompt_logprobs", 0),
        ("n", 16),
        ("temperature", 0.0),
        ("top_p", 1e-9),
        ("top_p", 1.0),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", V + 1),
        ("n", 1),
    ],
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


@pytest.mark.parametrize(
    ("field", "value", "within"),
    [
        ("n", 17, 16),
        ("n", 2**32 - 1, 1),
        ("logprobs", 21, 20),
        ("prompt_logprobs", 21, 20),
        ("logit_bias", dict.fromkeys(range(1025), math.nan), dict.fromkeys(range(V), 1.0)),
        ("allowed_token_ids", [-1] * 4097, [5] * 4096),
        ("bad_words", [""] * 65, ["x" * 256] * 64),
        ("stop_token_ids", [-1] * 65, [5] * 64),
        ("beam_search.width", 17, 16),
    ],
)
def test_case_25_huge_counts_and_lists_are_refused_by_name_and_number(field: str, value: Any, within: Any) -> None:
    """Case 25: caps are checked at the door, before anything is looked at one by one."""
    name, _, member = field.partition(".")
    assert wrong_fields(sampling(**{name: {member: value} if member else value})) == [f"sampling.{field}"]
    check(sampling(**{name: {member: within} if member else within}))


def test_case_25_caps_are_those_of_the_server() -> None:
    """Case 25: what is configured is what is enforced."""
    caps = Caps(max_n=2, max_beam_width=3, max_logprobs=0)
    request = sampling(n=3, beam_search={"width": 4}, logprobs=1)
    with pytest.raises(InvalidRequestError) as error:
        validate(request, "tiny", SamplingDefaults(), caps, LIMITS, LONGEST_TOKEN)
    fields = [violation.field for violation in error.value.violations]
    assert sorted(fields) == ["sampling.beam_search.width", "sampling.logprobs", "sampling.n"]


@pytest.mark.parametrize(
    ("fields", "prompt_length", "field"),
    [
        # 2,000 values: (K + 2) for each token of each candidate and of the prompt.
        ({"n": 10, "max_tokens": 50, "logprobs": 2}, 5, None),
        ({"n": 10, "max_tokens": 51, "logprobs": 2}, 5, "sampling.logprobs"),
        ({"max_tokens": 1, "prompt_logprobs": 18}, 99, None),
        ({"max_tokens": 1, "prompt_logprobs": 19}, 99, "sampling.prompt_logprobs"),
        ({"n": 2, "max_tokens": 20, "logprobs": 18, "prompt_logprobs": 18}, 60, None),
        ({"n": 2, "max_tokens": 21, "logprobs": 18, "prompt_logprobs": 18}, 60, "sampling.logprobs"),
        # What the context cuts off does not count.
        ({"max_tokens": 2**32 - 1, "logprobs": 18}, 5, None),
        ({"n": 16, "max_tokens": 256}, 5, None),
    ],
)
def test_case_25_the_memory_of_logprobs_has_a_budget(
    fields: dict[str, Any], prompt_length: int, field: str | None
) -> None:
    """Case 25: candidates x tokens x logprobs is bounded at the door, and the error says by how much."""
    request = check(sampling(**fields))
    if field is None:
        fit(request, [5] * prompt_length, LIMITS, CAPS)
        return
    with pytest.raises(InvalidRequestError, match=f"{field}: 2,[0-9]* values are more than the 2,000"):
        fit(request, [5] * prompt_length, LIMITS, CAPS)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_case_29_no_logprobs_and_those_of_the_chosen_token_alone_are_told_apart(field: str) -> None:
    """Case 29: 0 is the chosen token's only; above the cap and -1 are refused."""
    assert getattr(check(sampling()).sampling, field) is None
    assert getattr(check(sampling(**{field: 0})).sampling, field) == 0
    for wrong in (-1, 21, 2**31 - 1):
        assert wrong_fields(sampling(**{field: wrong})) == [f"sampling.{field}"]


@pytest.mark.parametrize("bias", [math.nan, math.inf, 100.1, -100.1])
def test_case_20_a_bias_that_is_no_bias_is_named_by_its_token(bias: float) -> None:
    """Case 20: NaN bias is refused; minus infinity is a ban."""
    assert wrong_fields(sampling(logit_bias={7: bias, 8: 1.0})) == ["sampling.logit_bias[7]"]
    assert check(sampling(logit_bias={7: -math.inf, 8: 100.0})).sampling.logit_bias == {7: -math.inf, 8: 100.0}


def test_what_bans_every_token_is_refused() -> None:
    def bans(words: list[list[int]], stops: tuple[int, ...] = (), **fields: Any) -> None:
        check_bans(check(sampling(**fields)).sampling, words, frozenset(stops), V)

    bans([[1], [9, 2]], (3,), allowed_token_ids=[1, 2, 3, 4], min_tokens=1)
    bans([], (3,), allowed_token_ids=[3])
    for fields in ({"logit_bias": {4: -math.inf}}, {"stop_token_ids": [4]}):
        stops = (3, *fields.get("stop_token_ids", ()))
        with pytest.raises(InvalidRequestError, match=r"sampling\.allowed_token_ids"):
            bans([[1], [9, 2]], stops, allowed_token_ids=[1, 2, 3, 4], min_tokens=1, **fields)
    with pytest.raises(InvalidRequestError, match=r"sampling\.logit_bias"):
        bans([], logit_bias=dict.fromkeys(range(V), -math.inf))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": 0.5}, "sampling.temperature"),
        ({"top_p": 0.5}, "sampling.top_p"),
        ({"top_k": 5}, "sampling.top_k"),
        ({"min_p": 0.5}, "sampling.min_p"),
        ({"typical_p": 0.5}, "sampling.typical_p"),
        ({"stop": ["x"]}, "sampling.stop"),
        ({"n": 5}, "sampling.n"),
        ({"beam_search": {"width": 0}}, "sampling.beam_search.width"),
        ({"beam_search": {"width": 4, "length_penalty": math.nan}}, "sampling.beam_search.length_penalty"),
        ({"beam_search": {"width": 4, "length_penalty": 11}}, "sampling.beam_search.length_penalty"),
        ({"beam_search": {"width": 4, "early_stopping": 4}}, "sampling.beam_search.early_stopping"),
    ],
)
def test_what_makes_no_sense_with_beam_search_is_named(fields: dict[str, Any], field: str) -> None:
    assert wrong_fields(sampling(**{"beam_search": {"width": 4}, **fields})) == [field]


def test_beam_search_takes_what_changes_nothing_and_no_default_of_the_model() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, typical_p=0.5, repetition_penalty=1.1)
    harmless = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "typical_p": 1.0, "seed": 5}
    request = sampling(n=4, beam_search={"width": 4}, stop_token_ids=[5], bad_words=["x"], **harmless)
    chosen = check(request, defaults).sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.typical_p) == (0.0, 1.0, 0, 1.0)
    assert chosen.repetition_penalty == 1.1
    assert chosen.beam_search == BeamSearch(4, 1.0, types_pb2.EARLY_STOPPING_FALSE, intermediate=False)


def test_beams_are_only_shown_to_who_streams() -> None:
    request = sampling(beam_search={"width": 4, "intermediate": True})
    check(request)
    request.stream = False
    assert wrong_fields(request) == ["sampling.beam_search.intermediate"]


def test_a_branch_is_checked_like_a_prompt() -> None:
    def branching(*token_ids: int) -> GenerateRequest:
        return GenerateRequest(text="hi", branch=Branch(token_ids=token_ids))

    assert check(branching(5, 6)).branch == [5, 6]
    assert check(branching()).branch == []
    assert check(GenerateRequest(text="hi")).branch is None
    assert wrong_fields(branching(5, V)) == ["branch.token_ids[1]"]
    assert wrong_fields(branching(*[-1] * 101)) == ["branch.token_ids"]
    with pytest.raises(InvalidRequestError, match=r"branch\.token_ids: the prompt has 100 tokens"):
        fit(check(branching(5, 6)), [5] * 100, LIMITS, CAPS)


@pytest.mark.parametrize("token_id", [-1, V, 2**31, 2**63 - 1])
def test_case_20_a_token_id_out_of_the_vocabulary_is_named_where_it_stands(token_id: int) -> None:
    """Case 20: out-of-vocabulary ids are refused, in the prompt, in stop tokens, in resumed tokens."""
    assert wrong_fields(GenerateRequest(token_ids=TokenIds(token_ids=[1, 2, 3, token_id]))) == [
        "token_ids.token_ids[3]"
    ]
    assert wrong_fields(sampling(stop_token_ids=[token_id])) == ["sampling.stop_token_ids[0]"]
    assert wrong_fields(sampling(allowed_token_ids=[5, token_id])) == ["sampling.allowed_token_ids[1]"]
    assert wrong_fields(sampling(logit_bias={token_id: 1.0})) == [f"sampling.logit_bias[{token_id}]"]
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
    check_parameters(GenerateRequest(token_ids=TokenIds(token_ids=[-1])), "tiny", SamplingDefaults(), CAPS)
    for wrong in (sampling(top_p=0.0), sampling(stop=["x"] * 17), sampling(n=17)):
        with pytest.raises(InvalidRequestError):
            check_parameters(wrong, "tiny", SamplingDefaults(), CAPS)
    with pytest.raises(UnknownModelError):
        check_parameters(GenerateRequest(model="other"), "tiny", SamplingDefaults(), CAPS)


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
    assert check(request).resumed == {}
    request.sampling.seed = 8
    assert wrong_fields(request) == ["resume.seed"]


def test_a_resume_names_candidates_that_cannot_be() -> None:
    two = Resume(candidates=[Resume.Candidate(), Resume.Candidate(index=1)])
    assert wrong_fields(GenerateRequest(text="hi", resume=two)) == ["resume.candidates[1].index"]
    other = Resume(candidates=[Resume.Candidate(index=1)])
    assert wrong_fields(GenerateRequest(text="hi", resume=other)) == ["resume.candidates[0].index"]
    twice = Resume(candidates=[Resume.Candidate(index=1)] * 2)
    assert wrong_fields(GenerateRequest(text="hi", resume=twice, sampling={"n": 2})) == ["resume.candidates[1].index"]
    assert wrong_fields(resuming(*[[]] * 17, n=16)) == ["resume.candidates"]


def test_candidates_resume_each_behind_its_own_tokens() -> None:
    assert check(resuming([5], [], [6, 7], n=4)).resumed == {0: [5], 1: [], 2: [6, 7]}
    with pytest.raises(InvalidRequestError, match=r"resume\.candidates\[2\]\.token_ids"):
        fit(check(resuming([5], [], [6, 7], n=4)), [5] * 99, LIMITS, CAPS)


def test_a_beam_search_starts_again_and_has_no_tokens_to_resume() -> None:
    assert check(resuming([], n=2, beam_search={"width": 2})).resumed == {0: []}
    assert wrong_fields(resuming([5], beam_search={"width": 2})) == ["resume.candidates[0].token_ids"]
    ended = resuming([], beam_search={"width": 2})
    ended.resume.candidates[0].finish_reason = types_pb2.FINISH_REASON_LENGTH
    assert wrong_fields(ended) == ["resume.candidates[0].finish_reason"]


@pytest.mark.parametrize("reason", [types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, 77])
def test_a_candidate_may_have_ended_for_any_reason(reason: int) -> None:
    request = resuming([5], [], [6, 7], n=3)
    assert check(request).ended == frozenset()
    request.resume.candidates[1].finish_reason = reason
    assert check(request).ended == {1}


@pytest.mark.parametrize("length", [98, 99])
def test_case_14_the_longest_prompts_leave_room_for_an_answer(length: int) -> None:
    """Case 14: one boundary; up to it the answer is capped by the context."""
    assert fit(check(sampling(max_tokens=10)), [5] * length, LIMITS, CAPS) == 100 - length


@pytest.mark.parametrize("length", [100, 101])
def test_case_14_a_longer_prompt_is_refused_with_the_boundary(length: int) -> None:
    """Case 14: the error states the boundary that is enforced."""
    request = check(GenerateRequest(token_ids=TokenIds(token_ids=[5])))
    with pytest.raises(InvalidRequestError, match=f"token_ids: .* {length} tokens; at most 99"):
        fit(request, [5] * length, LIMITS, CAPS)


def test_resumed_tokens_must_fit_behind_the_prompt() -> None:
    def resumed(count: int) -> ValidRequest:
        resume = Resume(candidates=[Resume.Candidate(token_ids=[5] * count)])
        return check(GenerateRequest(text="hi", resume=resume))

    assert fit(resumed(50), [5] * 50, LIMITS, CAPS) == 50
    with pytest.raises(InvalidRequestError, match=r"resume.candidates\[0\].token_ids"):
        fit(resumed(51), [5] * 50, LIMITS, CAPS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingDefaults(temperature=-1),
        lambda: SamplingDefaults(max_tokens=0),
        lambda: SamplingDefaults(top_k=50.5),
        lambda: SamplingDefaults(top_k=True),
        lambda: SamplingDefaults(top_k=2**31),
        lambda: SamplingDefaults(top_p="1"),
        lambda: SamplingDefaults(repetition_penalty=0),
    ],
)
def test_defaults_are_checked_like_a_request(make: Callable[[], SamplingDefaults]) -> None:
    with pytest.raises(InvalidRequestError):
        make()
