"""From a request message to typed values; every wrong field is named."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.text.tokenizer import ChatTurn
from pagekeeper.common.errors import FieldViolation, InvalidRequestError, UnknownModelError
from pagekeeper.v1 import generate_pb2

MAX_REQUEST_ID_LENGTH = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
# An answer's details travel in trailing metadata, which peers limit to 8 KiB.
_MAX_VIOLATIONS = 16
# What its field in a request can hold.
_MAX_TOP_K = 2**31 - 1
_SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "n"}
)
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Limits:
    """What the model can take, as its runner says.

    Attributes:
        vocab_size: token ids are below it.
        max_context_length: most tokens of prompt and answer together.
    """

    vocab_size: int
    max_context_length: int


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of fields that a request does not set; checked like those of a request."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        found = _Violations()
        for name, value in vars(self).items():
            is_whole = name in ("top_k", "max_tokens")
            # Not isinstance: `true` in a file is no number.
            is_right = type(value) is int or (type(value) is float and not is_whole)
            found.unless(is_right, name, f"{value!r} is not a {'whole ' if is_whole else ''}number")
        found.raise_if_any()
        _check_ranges(found, "", self.temperature, self.top_p, self.top_k, self.min_p, self.max_tokens)
        found.raise_if_any()


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens and where to stop.

    Attributes:
        top_k: 0 is off.
        seed: None: the server draws one.
        max_tokens: resumed tokens count.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool


Prompt = str | tuple[ChatTurn, ...] | list[int]
"""Text, a chat, or token ids."""


@dataclass(frozen=True)
class ValidRequest:
    """A request whose fields are right; whether its prompt fits is known when it is tokenised (`fit`).

    Attributes:
        request_id: may be empty.
        input_field: which member of `input` holds the prompt.
        resumed: None: the request does not resume; otherwise the tokens that the client has.
    """

    request_id: str
    input_field: str
    prompt: Prompt
    sampling: Sampling
    stream: bool
    priority: int
    resumed: list[int] | None


def check_parameters(request: generate_pb2.GenerateRequest, model_name: str, defaults: SamplingDefaults) -> None:
    """Check what is wrong whatever the model can take; `validate` checks it too.

    Raises:
        UnknownModelError: another model is asked for.
        InvalidRequestError: names each wrong field.
    """
    check_model(request.model, model_name)
    found = _Violations()
    _check_parameter_counts(found, request)
    found.raise_if_any()
    _sampling(found, request, defaults)
    found.raise_if_any()


def validate(
    request: generate_pb2.GenerateRequest,
    model_name: str,
    defaults: SamplingDefaults,
    limits: Limits,
    longest_token: int,
) -> ValidRequest:
    """Check every field that can be checked without the tokenizer.

    Sizes come first, so that what is looked at one by one afterwards is never more than an answer could need.

    Args:
        request: what the client sent.
        model_name: the model that is served.
        defaults: for the fields that are not set.
        limits: of the model.
        longest_token: of the vocabulary, in characters.

    Raises:
        UnknownModelError: another model is asked for.
        InvalidRequestError: names each wrong field.
    """
    check_model(request.model, model_name)
    found = _Violations()
    _check_input_size(found, request, limits, longest_token)
    _check_parameter_counts(found, request)
    for position, candidate in enumerate(request.resume.candidates[:1]):
        _check_count(
            found, f"resume.candidates[{position}].token_ids", len(candidate.token_ids), limits.max_context_length
        )
    found.raise_if_any()
    found.unless(
        len(request.request_id) <= MAX_REQUEST_ID_LENGTH and request.request_id.isprintable(),
        "request_id",
        f"at most {MAX_REQUEST_ID_LENGTH} printable characters",
    )
    valid = ValidRequest(
        request_id=request.request_id,
        input_field=request.WhichOneof("input") or "text",
        prompt=_prompt(found, request, limits),
        sampling=_sampling(found, request, defaults),
        stream=request.stream if request.HasField("stream") else True,
        priority=request.priority,
        resumed=_resumed(found, request.resume, limits) if request.HasField("resume") else None,
    )
    _check_token_ids(found, "sampling.stop_token_ids", request.sampling.stop_token_ids, limits.vocab_size)
    found.raise_if_any()
    return valid


def check_model(requested: str, served: str) -> None:
    """Raise UnknownModelError unless the request names no model or the one that is served."""
    if requested not in ("", served):
        raise UnknownModelError(f"there is no model {requested[:100]!r} here; {served!r} is served")


def text_or_chat(request: generate_pb2.TokenizeRequest, limits: Limits, longest_token: int) -> Prompt:
    """What is to be tokenised.

    Raises:
        InvalidRequestError: there is nothing, or more than the context could hold; or a role is not a word.
    """
    found = _Violations()
    _check_input_size(found, request, limits, longest_token)
    found.raise_if_any()
    if not request.HasField("chat"):
        found.unless(request.HasField("text"), "text", "set text or chat")
        found.raise_if_any()
        return request.text
    turns = _chat_turns(found, request.chat)
    found.raise_if_any()
    return turns


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int, most: int) -> None:
    """Raise InvalidRequestError if there are more than `most`, or one is not in the vocabulary."""
    found = _Violations()
    _check_count(found, field, len(token_ids), most)
    found.raise_if_any()
    _check_token_ids(found, field, token_ids, vocab_size)
    found.raise_if_any()


def fit(valid: ValidRequest, prompt_token_ids: Sequence[int], limits: Limits) -> int:
    """How many tokens the answer may have: as many as asked for, or as the context length leaves room for.

    Raises:
        InvalidRequestError: the prompt is empty, or leaves no room for an answer.
    """
    found = _Violations()
    length, most = len(prompt_token_ids), limits.max_context_length
    found.unless(length > 0, valid.input_field, "the prompt is empty")
    _check_prompt_length(found, valid.input_field, length, most)
    found.unless(
        length + len(valid.resumed or ()) <= most or length >= most,
        "resume.candidates[0].token_ids",
        f"prompt and resumed tokens are more than the context of {most} tokens",
    )
    found.raise_if_any()
    return min(valid.sampling.max_tokens, most - length)


class _Violations:
    """Collects what is wrong, up to a number that an answer can carry."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    @property
    def are_enough(self) -> bool:
        return len(self._found) >= _MAX_VIOLATIONS

    def unless(self, right: bool, field: str, description: str) -> None:
        if not right and not self.are_enough:
            self._found.append(FieldViolation(field, description))

    def raise_if_any(self) -> None:
        if self._found:
            raise InvalidRequestError(*self._found)


def _check_parameter_counts(found: _Violations, request: generate_pb2.GenerateRequest) -> None:
    sampling = request.sampling
    found.unless(len(sampling.stop) <= MAX_STOPS, "sampling.stop", f"at most {MAX_STOPS} stop strings")
    found.unless(
        len(sampling.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
        "sampling.stop_token_ids",
        f"at most {MAX_STOP_TOKEN_IDS} stop tokens",
    )
    found.unless(len(request.resume.candidates) <= 1, "resume.candidates", "this version makes one candidate")


def _check_input_size(
    found: _Violations,
    request: generate_pb2.GenerateRequest | generate_pb2.TokenizeRequest,
    limits: Limits,
    longest_token: int,
) -> None:
    """Refuse what could not fit the context however well its text went into tokens."""
    most = limits.max_context_length
    if isinstance(request, generate_pb2.GenerateRequest) and request.HasField("token_ids"):
        _check_prompt_length(found, "token_ids", len(request.token_ids.token_ids), most)
        return
    messages = request.chat.messages
    if len(messages) > most:
        found.unless(False, "chat.messages", f"{len(messages)} messages; the context of {most} tokens holds no more")
        return
    length = len(request.text) + sum(len(message.content) for message in messages)
    found.unless(
        length <= most * longest_token,
        "chat.messages" if messages else "text",
        f"{length} characters; at most {most * longest_token} could fit the context of {most} tokens",
    )


def _check_prompt_length(found: _Violations, field: str, length: int, most: int) -> None:
    found.unless(
        length < most,
        field,
        f"the prompt has {length} tokens; at most {most - 1} leave room for an answer in the context of {most} tokens",
    )


def _check_count(found: _Violations, field: str, count: int, most: int) -> None:
    found.unless(count <= most, field, f"{count} tokens are more than the context of {most} tokens")


def _prompt(found: _Violations, request: generate_pb2.GenerateRequest, limits: Limits) -> Prompt:
    match request.WhichOneof("input"):
        case "chat":
            return _chat_turns(found, request.chat)
        case "token_ids":
            _check_token_ids(found, "token_ids.token_ids", request.token_ids.token_ids, limits.vocab_size)
            found.unless(len(request.token_ids.token_ids) > 0, "token_ids", "the prompt is empty")
            return list(request.token_ids.token_ids)
        case "text":
            return request.text
        case _:
            found.unless(False, "text", "the prompt is empty")
            return ""


def _chat_turns(found: _Violations, chat: generate_pb2.ChatMessages) -> tuple[ChatTurn, ...]:
    found.unless(len(chat.messages) > 0, "chat.messages", "the prompt is empty")
    for index, message in enumerate(chat.messages):
        if found.are_enough:
            break
        is_word = _ROLE.fullmatch(message.role) is not None
        found.unless(is_word, f"chat.messages[{index}].role", "a word such as system, user or assistant")
    return tuple(ChatTurn(message.role, message.content) for message in chat.messages)


def _sampling(found: _Violations, request: generate_pb2.GenerateRequest, defaults: SamplingDefaults) -> Sampling:
    given = request.sampling
    temperature = given.temperature if given.HasField("temperature") else defaults.temperature
    top_p = given.top_p if given.HasField("top_p") else defaults.top_p
    top_k = given.top_k if given.HasField("top_k") else defaults.top_k
    min_p = given.min_p if given.HasField("min_p") else defaults.min_p
    max_tokens = given.max_tokens if given.HasField("max_tokens") else defaults.max_tokens
    _check_ranges(found, "sampling.", temperature, top_p, top_k, min_p, max_tokens)
    if given.HasField("n"):
        found.unless(given.n >= 1, "sampling.n", "at least 1")
        found.unless(given.n <= 1, "sampling.n", "this version makes one candidate; more come in a later one")
    for field, _ in given.ListFields():
        found.unless(field.name in _SAMPLING, f"sampling.{field.name}", "comes in a later version")
    found.unless(not request.HasField("branch"), "branch", "comes in a later version")
    for index, stop in enumerate(given.stop):
        is_right = 1 <= len(stop) <= MAX_STOP_LENGTH
        found.unless(is_right, f"sampling.stop[{index}]", f"1 to {MAX_STOP_LENGTH} characters")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        seed=_seed(found, request),
        max_tokens=max_tokens,
        stop=tuple(given.stop),
        stop_token_ids=frozenset(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
    )


def _check_ranges(
    found: _Violations, prefix: str, temperature: float, top_p: float, top_k: int, min_p: float, max_tokens: int
) -> None:
    found.unless(math.isfinite(temperature) and temperature >= 0, f"{prefix}temperature", "finite and at least 0")
    found.unless(0 < top_p <= 1, f"{prefix}top_p", "above 0 and at most 1")
    found.unless(-1 <= top_k <= _MAX_TOP_K, f"{prefix}top_k", f"-1 to {_MAX_TOP_K}; -1 and 0 are off")
    found.unless(0 <= min_p <= 1, f"{prefix}min_p", "from 0 to 1")
    found.unless(max_tokens >= 1, f"{prefix}max_tokens", "at least 1")


def _seed(found: _Violations, request: generate_pb2.GenerateRequest) -> int | None:
    """The request's own, else that of the stream it resumes, so that the answer goes on as it began."""
    given = request.sampling.seed if request.sampling.HasField("seed") else None
    if not request.HasField("resume"):
        return given
    is_same = given is None or given == request.resume.seed
    found.unless(is_same, "resume.seed", "must equal sampling.seed where both are set")
    return request.resume.seed


def _resumed(found: _Violations, resume: generate_pb2.Resume, limits: Limits) -> list[int]:
    for position, candidate in enumerate(resume.candidates):
        found.unless(candidate.index == 0, f"resume.candidates[{position}].index", "0, as there is one candidate")
        _check_token_ids(found, f"resume.candidates[{position}].token_ids", candidate.token_ids, limits.vocab_size)
    return list(resume.candidates[0].token_ids) if resume.candidates else []


def _check_token_ids(found: _Violations, field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if found.are_enough:
            return
        is_right = 0 <= token_id < vocab_size
        found.unless(is_right, f"{field}[{index}]", f"{token_id} is not a token id; they are 0 to {vocab_size - 1}")
