"""From a request message to typed values; every wrong field is named."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.sampling import (
    Caps,
    Sampling,
    SamplingDefaults,
    check_budget,
    check_counts,
    check_vocabulary,
    read_sampling,
)
from gateway.text.tokenizer import ChatTurn
from gateway.violations import Violations
from pagekeeper.common.errors import UnknownModelError
from pagekeeper.v1 import generate_pb2

MAX_REQUEST_ID_LENGTH = 128
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


Prompt = str | tuple[ChatTurn, ...] | list[int]
"""Text, a chat, or token ids."""


@dataclass(frozen=True)
class ValidRequest:
    """A request whose fields are right; whether its prompt fits is known when it is tokenised (`fit`).

    Attributes:
        request_id: may be empty.
        input_field: which member of `input` holds the prompt.
        branch: the tokens of an earlier answer that follow the prompt; None: the request does not branch.
        resumed: by candidate, the tokens that the client has, which may be none; None: the request does not resume.
        ended: the candidates of which that is all, as the client knows.
    """

    request_id: str
    input_field: str
    prompt: Prompt
    sampling: Sampling
    stream: bool
    priority: int
    branch: list[int] | None
    resumed: dict[int, list[int]] | None
    ended: frozenset[int]


def check_parameters(
    request: generate_pb2.GenerateRequest, model_name: str, defaults: SamplingDefaults, caps: Caps
) -> None:
    """Check what is wrong whatever the model can take; `validate` checks it too.

    Raises:
        UnknownModelError: another model is asked for.
        InvalidRequestError: names each wrong field.
    """
    check_model(request.model, model_name)
    found = Violations()
    check_counts(found, request.sampling)
    found.raise_if_any()
    read_sampling(found, request, defaults, caps)
    found.raise_if_any()


def validate(
    request: generate_pb2.GenerateRequest,
    model_name: str,
    defaults: SamplingDefaults,
    caps: Caps,
    limits: Limits,
    longest_token: int,
) -> ValidRequest:
    """Check every field that can be checked without the tokenizer.

    Sizes come first, so that what is looked at one by one afterwards is never more than an answer could need.

    Args:
        request: what the client sent.
        model_name: the model that is served.
        defaults: for the fields that are not set.
        caps: the most that it may ask for.
        limits: of the model.
        longest_token: of the vocabulary, in characters.

    Raises:
        UnknownModelError: another model is asked for.
        InvalidRequestError: names each wrong field.
    """
    check_model(request.model, model_name)
    found = Violations()
    _check_input_size(found, request, limits, longest_token)
    check_counts(found, request.sampling)
    _check_count(found, "branch.token_ids", len(request.branch.token_ids), limits.max_context_length)
    found.unless(len(request.resume.candidates) <= caps.max_n, "resume.candidates", f"at most {caps.max_n} candidates")
    for position, candidate in enumerate(request.resume.candidates[: caps.max_n]):
        _check_count(
            found, f"resume.candidates[{position}].token_ids", len(candidate.token_ids), limits.max_context_length
        )
    found.raise_if_any()
    _check_request_id(found, "request_id", request.request_id)
    _check_request_id(found, "branch.request_id", request.branch.request_id)
    sampling = read_sampling(found, request, defaults, caps)
    valid = ValidRequest(
        request_id=request.request_id,
        input_field=request.WhichOneof("input") or "text",
        prompt=_prompt(found, request, limits),
        sampling=sampling,
        stream=request.stream if request.HasField("stream") else True,
        priority=request.priority,
        branch=list(request.branch.token_ids) if request.HasField("branch") else None,
        resumed=_resumed(found, request.resume, sampling, limits) if request.HasField("resume") else None,
        # Whatever the reason: one that a newer server has given is an end as well.
        ended=frozenset(candidate.index for candidate in request.resume.candidates if candidate.finish_reason),
    )
    is_seen = valid.stream or not request.sampling.beam_search.intermediate
    found.unless(is_seen, "sampling.beam_search.intermediate", "needs stream")
    check_vocabulary(found, request.sampling, limits.vocab_size)
    found.unless_token_ids("branch.token_ids", request.branch.token_ids, limits.vocab_size)
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
    found = Violations()
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
    found = Violations()
    _check_count(found, field, len(token_ids), most)
    found.raise_if_any()
    found.unless_token_ids(field, token_ids, vocab_size)
    found.raise_if_any()


def fit(valid: ValidRequest, prompt_token_ids: Sequence[int], limits: Limits, caps: Caps) -> int:
    """How many tokens each candidate may have: as many as asked for, or as the context length leaves room for.

    Raises:
        InvalidRequestError: the prompt is empty, or leaves no room for an answer; or the log-probabilities asked for
            take more than a request may have.
    """
    found = Violations()
    length, most = len(prompt_token_ids), limits.max_context_length
    found.unless(length > 0, valid.input_field, "the prompt is empty")
    _check_prompt_length(found, "branch.token_ids" if valid.branch else valid.input_field, length, most)
    for position, token_ids in enumerate((valid.resumed or {}).values()):
        found.unless(
            length + len(token_ids) <= most or length >= most,
            f"resume.candidates[{position}].token_ids",
            f"prompt and resumed tokens are more than the context of {most} tokens",
        )
    found.raise_if_any()
    max_tokens = min(valid.sampling.max_tokens, most - length)
    check_budget(valid.sampling, length, max_tokens, caps)
    return max_tokens


def _check_input_size(
    found: Violations,
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


def _check_prompt_length(found: Violations, field: str, length: int, most: int) -> None:
    found.unless(
        length < most,
        field,
        f"the prompt has {length} tokens; at most {most - 1} leave room for an answer in the context of {most} tokens",
    )


def _check_count(found: Violations, field: str, count: int, most: int) -> None:
    found.unless(count <= most, field, f"{count} tokens are more than the context of {most} tokens")


def _prompt(found: Violations, request: generate_pb2.GenerateRequest, limits: Limits) -> Prompt:
    match request.WhichOneof("input"):
        case "chat":
            return _chat_turns(found, request.chat)
        case "token_ids":
            found.unless_token_ids("token_ids.token_ids", request.token_ids.token_ids, limits.vocab_size)
            found.unless(len(request.token_ids.token_ids) > 0, "token_ids", "the prompt is empty")
            return list(request.token_ids.token_ids)
        case "text":
            return request.text
        case _:
            found.unless(False, "text", "the prompt is empty")
            return ""


def _chat_turns(found: Violations, chat: generate_pb2.ChatMessages) -> tuple[ChatTurn, ...]:
    found.unless(len(chat.messages) > 0, "chat.messages", "the prompt is empty")
    for index, message in enumerate(chat.messages):
        if found.are_enough:
            break
        is_word = _ROLE.fullmatch(message.role) is not None
        found.unless(is_word, f"chat.messages[{index}].role", "a word such as system, user or assistant")
    return tuple(ChatTurn(message.role, message.content) for message in chat.messages)


def _check_request_id(found: Violations, field: str, request_id: str) -> None:
    is_right = len(request_id) <= MAX_REQUEST_ID_LENGTH and request_id.isprintable()
    found.unless(is_right, field, f"at most {MAX_REQUEST_ID_LENGTH} printable characters")


def _resumed(
    found: Violations, resume: generate_pb2.Resume, sampling: Sampling, limits: Limits
) -> dict[int, list[int]]:
    resumed: dict[int, list[int]] = {}
    for position, candidate in enumerate(resume.candidates):
        field = f"resume.candidates[{position}]"
        found.unless(candidate.index < sampling.n, f"{field}.index", f"below n, which is {sampling.n}")
        found.unless(candidate.index not in resumed, f"{field}.index", f"{candidate.index} comes twice")
        found.unless_token_ids(f"{field}.token_ids", candidate.token_ids, limits.vocab_size)
        is_search = sampling.beam_search is not None
        found.unless(not (is_search and candidate.token_ids), f"{field}.token_ids", "a beam search starts again")
        is_ended = is_search and bool(candidate.finish_reason)
        found.unless(not is_ended, f"{field}.finish_reason", "a beam search starts again")
        resumed[candidate.index] = list(candidate.token_ids)
    return resumed
