"""SamplingParams: from the message of a request to typed values, every wrong field named."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.violations import Violations
from pagekeeper.v1 import generate_pb2, types_pb2

MAX_STOPS = 16
MAX_BAD_WORDS = 64
MAX_WORD_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
# What its field in a request can hold.
_MAX_TOP_K = 2**31 - 1

# Comparisons with NaN are false, so it is in no range.
_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: math.isfinite(value) and value >= 0, "finite and at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_k": (lambda value: -1 <= value <= _MAX_TOP_K, f"-1 to {_MAX_TOP_K}; -1 and 0 are off"),
    "min_p": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "typical_p": (lambda value: 0 < value <= 1, "above 0 and at most 1; 1 is off"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "from -2 to 2"),
    "repetition_penalty": (lambda value: 0.01 <= value <= 100, "from 0.01 to 100; 1 is off"),
    "max_tokens": (lambda value: value >= 1, "at least 1"),
}
_WHOLE = frozenset({"top_k", "max_tokens"})
# A beam search takes the likeliest tokens: only values that would change nothing go with it.
_WITH_BEAMS: Mapping[str, tuple[float, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of fields that a request does not set; checked like those of a request."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        found = Violations()
        for name, value in vars(self).items():
            # Not isinstance: `true` in a file is no number.
            is_right = type(value) is int or (type(value) is float and name not in _WHOLE)
            found.unless(is_right, name, f"{value!r} is not a {'whole ' if name in _WHOLE else ''}number")
        found.raise_if_any()
        for name, value in vars(self).items():
            is_in_range, description = _RANGES[name]
            found.unless(is_in_range(value), name, description)
        found.raise_if_any()


@dataclass(frozen=True)
class Caps:
    """The most that the server lets a request ask for.

    Attributes:
        max_n: candidates.
        max_beam_width: beams.
        max_logprobs: alternatives to each token.
        max_logprob_values: log-probabilities of a request in all, and with them the memory and the message that they
            take: at most 50 and 10 bytes each.
    """

    max_n: int = 16
    max_beam_width: int = 16
    max_logprobs: int = 20
    max_logprob_values: int = 1_000_000


@dataclass(frozen=True)
class BeamSearch:
    """A search for the likeliest answers; see types.proto."""

    width: int
    length_penalty: float
    early_stopping: "types_pb2.EarlyStopping.ValueType"
    intermediate: bool


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, where to stop, and what to tell of it; see types.proto. The values given here are off.

    Attributes:
        seed: None: the server draws one.
        max_tokens: resumed tokens count.
        logprobs: None: none at all.
        n: candidates, or hypotheses of the beam search.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    n: int = 1
    beam_search: BeamSearch | None = None


def check_counts(found: Violations, given: types_pb2.SamplingParams) -> None:
    """Note lists that are too long, before their elements are looked at."""
    for name, most, what in (
        ("stop", MAX_STOPS, "stop strings"),
        ("stop_token_ids", MAX_STOP_TOKEN_IDS, "stop tokens"),
        ("logit_bias", MAX_LOGIT_BIASES, "biases"),
        ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, "allowed tokens"),
        ("bad_words", MAX_BAD_WORDS, "bad words"),
    ):
        found.unless(len(getattr(given, name)) <= most, f"sampling.{name}", f"at most {most:,} {what}")


def read_sampling(
    found: Violations, request: generate_pb2.GenerateRequest, defaults: SamplingDefaults, caps: Caps
) -> Sampling:
    """The request's sampling; whether its token ids are in the vocabulary is for `check_vocabulary`."""
    given = request.sampling
    beam_search = _beam_search(found, given, caps) if given.HasField("beam_search") else None
    numbers = _numbers(found, given, defaults)
    if beam_search is not None:
        numbers |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0}
    found.unless(
        given.min_tokens <= numbers["max_tokens"],
        "sampling.min_tokens",
        f"at most max_tokens, which is {numbers['max_tokens']}",
    )
    _check_words(found, "sampling.stop", given.stop)
    _check_words(found, "sampling.bad_words", given.bad_words)
    for token_id, bias in sorted(given.logit_bias.items()):
        is_right = -100 <= bias <= 100 or bias == -math.inf
        found.unless(is_right, f"sampling.logit_bias[{token_id}]", "from -100 to 100, or minus infinity")
    return Sampling(
        **numbers,
        logit_bias=dict(given.logit_bias),
        allowed_token_ids=tuple(given.allowed_token_ids),
        bad_words=tuple(given.bad_words),
        seed=_seed(found, request),
        min_tokens=given.min_tokens,
        stop=tuple(given.stop),
        include_stop_str=given.include_stop_str,
        stop_token_ids=frozenset(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        logprobs=_logprobs(found, given, "logprobs", caps),
        prompt_logprobs=_logprobs(found, given, "prompt_logprobs", caps),
        echo=given.echo,
        n=_n(found, given, beam_search, caps),
        beam_search=beam_search,
    )


def check_vocabulary(found: Violations, given: types_pb2.SamplingParams, vocab_size: int) -> None:
    """Note each token id that is not in the vocabulary."""
    found.unless_token_ids("sampling.stop_token_ids", given.stop_token_ids, vocab_size)
    found.unless_token_ids("sampling.allowed_token_ids", given.allowed_token_ids, vocab_size)
    for token_id in sorted(given.logit_bias):
        found.unless_token_id(f"sampling.logit_bias[{token_id}]", token_id, vocab_size)


def check_bans(
    sampling: Sampling, bad_words: Iterable[Sequence[int]], stop_token_ids: frozenset[int], vocab_size: int
) -> None:
    """Raise InvalidRequestError unless some token may be chosen whatever the answer has become.

    Args:
        sampling: of the request.
        bad_words: the token sequences of its bad words.
        stop_token_ids: every token that ends the answer.
        vocab_size: of the model.
    """
    banned = {token_id for token_id, bias in sampling.logit_bias.items() if bias == -math.inf}
    banned.update(sequence[-1] for sequence in bad_words)
    if sampling.min_tokens:
        banned |= stop_token_ids
    allowed = sampling.allowed_token_ids
    is_any_free = not banned.issuperset(allowed) if allowed else len(banned) < vocab_size
    found = Violations()
    field_ = "sampling.allowed_token_ids" if allowed else "sampling.logit_bias"
    found.unless(is_any_free, field_, "biases, bad words and min_tokens leave no token that can always be chosen")
    found.raise_if_any()


def check_budget(sampling: Sampling, prompt_length: int, max_tokens: int, caps: Caps) -> None:
    """Raise InvalidRequestError if the request's log-probabilities could take more memory than one request may."""
    found = Violations()
    most = caps.max_logprob_values
    # A token's own log-probability and rank count as two values.
    in_prompt = prompt_length * (sampling.prompt_logprobs + 2) if sampling.prompt_logprobs is not None else 0
    in_answer = sampling.n * max_tokens * (sampling.logprobs + 2) if sampling.logprobs is not None else 0
    over = f"values are more than the {most:,} that a request may have; ask for fewer tokens, candidates or logprobs"
    found.unless(in_prompt <= most, "sampling.prompt_logprobs", f"{in_prompt:,} {over}")
    if in_prompt <= most:
        found.unless(in_prompt + in_answer <= most, "sampling.logprobs", f"{in_prompt + in_answer:,} {over}")
    found.raise_if_any()


def _numbers(found: Violations, given: types_pb2.SamplingParams, defaults: SamplingDefaults) -> dict[str, Any]:
    """The fields of `_RANGES`, as the request or else the defaults have them."""
    numbers = {}
    for name, (is_in_range, description) in _RANGES.items():
        numbers[name] = getattr(given if given.HasField(name) else defaults, name)  # type: ignore[arg-type]  # any field
        found.unless(is_in_range(numbers[name]), f"sampling.{name}", description)
    numbers["top_k"] = max(numbers["top_k"], 0)
    return numbers


def _n(found: Violations, given: types_pb2.SamplingParams, beam_search: BeamSearch | None, caps: Caps) -> int:
    n = given.n if given.HasField("n") else 1
    found.unless(1 <= n <= caps.max_n, "sampling.n", f"1 to {caps.max_n}")
    if beam_search is not None:
        found.unless(n <= max(1, beam_search.width), "sampling.n", "at most the width of the beam search")
    return n


def _beam_search(found: Violations, given: types_pb2.SamplingParams, caps: Caps) -> BeamSearch:
    beams = given.beam_search
    length_penalty = beams.length_penalty if beams.HasField("length_penalty") else 1.0
    prefix = "sampling.beam_search"
    most = caps.max_beam_width
    found.unless(1 <= beams.width <= most, f"{prefix}.width", f"1 to {most}")
    found.unless(-10 <= length_penalty <= 10, f"{prefix}.length_penalty", "from -10 to 10")
    is_known = beams.early_stopping in types_pb2.EarlyStopping.values()
    found.unless(is_known, f"{prefix}.early_stopping", "one of EarlyStopping")
    for name, harmless in _WITH_BEAMS.items():
        is_harmless = not given.HasField(name) or getattr(given, name) in harmless  # type: ignore[arg-type]  # any field
        found.unless(is_harmless, f"sampling.{name}", "does not go with beam_search")
    found.unless(not given.stop, "sampling.stop", "does not go with beam_search; stop_token_ids do")
    return BeamSearch(
        width=beams.width,
        length_penalty=length_penalty,
        early_stopping=beams.early_stopping or types_pb2.EARLY_STOPPING_FALSE,
        intermediate=beams.intermediate,
    )


def _check_words(found: Violations, field_: str, words: Sequence[str]) -> None:
    for index, word in enumerate(words):
        found.unless(1 <= len(word) <= MAX_WORD_LENGTH, f"{field_}[{index}]", f"1 to {MAX_WORD_LENGTH} characters")


def _logprobs(found: Violations, given: types_pb2.SamplingParams, name: str, caps: Caps) -> int | None:
    if not given.HasField(name):  # type: ignore[arg-type]  # one of two fields
        return None
    count: int = getattr(given, name)
    found.unless(0 <= count <= caps.max_logprobs, f"sampling.{name}", f"0 to {caps.max_logprobs}")
    return count


def _seed(found: Violations, request: generate_pb2.GenerateRequest) -> int | None:
    """The request's own, else that of the stream it resumes, so that the answer goes on as it began.

    A client that has received nothing may not know it; then any seed will do.
    """
    given = request.sampling.seed if request.sampling.HasField("seed") else None
    if not request.resume.seed and not any(candidate.token_ids for candidate in request.resume.candidates):
        return given
    is_same = given is None or given == request.resume.seed
    found.unless(is_same, "resume.seed", "must equal sampling.seed where both are set")
    return request.resume.seed
