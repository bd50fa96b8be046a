"""From values to request messages. What does not even fit its field is an InvalidRequestError that names it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

from pagekeeper.client.values import BeamSearch, Message, Prompt, Resume, Sampling
from pagekeeper.common.errors import FieldViolation, InvalidRequestError
from pagekeeper.v1 import generate_pb2, types_pb2

_MAX_DESCRIPTION_LENGTH = 200
_EARLY_STOPPING = {
    False: types_pb2.EARLY_STOPPING_FALSE,
    True: types_pb2.EARLY_STOPPING_TRUE,
    "never": types_pb2.EARLY_STOPPING_NEVER,
}
FINISH_REASONS = {"stop": types_pb2.FINISH_REASON_STOP, "length": types_pb2.FINISH_REASON_LENGTH}
"""As they go over the wire."""

UNKNOWN_FINISH_REASON = "other"
"""A newer server may know more; the candidate has ended all the same."""


def generate_request(
    prompt: Prompt,
    *,
    model: str,
    request_id: str,
    stream: bool,
    priority: int,
    resume: Resume | None,
    sampling: Sampling,
) -> generate_pb2.GenerateRequest:
    """The message for `Client.generate`, whose arguments these are."""
    request = generate_pb2.GenerateRequest(model=model, stream=stream)
    with _fitting("request_id"):
        request.request_id = request_id
    with _fitting("priority"):
        request.priority = priority
    if isinstance(prompt, str):
        with _fitting("text"):
            request.text = prompt
    elif _is_chat(prompt):
        request.chat.CopyFrom(_chat(cast("Sequence[Message]", prompt)))
    else:
        with _fitting("token_ids"):
            request.token_ids.CopyFrom(generate_pb2.TokenIds(token_ids=cast("Sequence[int]", prompt)))
    _set_sampling(request.sampling, sampling)
    if resume is not None:
        _set_resume(request.resume, resume)
    return request


def resuming_request(request: generate_pb2.GenerateRequest, received: Resume) -> generate_pb2.GenerateRequest:
    """The message that goes on with the answer to `request` after what was received of it, which may be nothing."""
    rest = generate_pb2.GenerateRequest()
    rest.CopyFrom(request)
    # Present even without a token: it says that a live stream with this id is ours, and is to be taken over.
    rest.resume.Clear()
    rest.resume.SetInParent()
    _set_resume(rest.resume, received)
    return rest


def branch_request(
    request: generate_pb2.GenerateRequest,
    answer: Sequence[int],
    position: int,
    *,
    request_id: str,
    earlier_request_id: str,
    sampling: Sampling,
) -> generate_pb2.GenerateRequest:
    """The message for `Answer.branch`: what `request` asked for, behind the first `position` tokens of `answer`."""
    if not 0 <= position <= len(answer):
        raise InvalidRequestError(FieldViolation("position", f"{position}; the answer has {len(answer)} tokens so far"))
    branch = generate_pb2.GenerateRequest()
    branch.CopyFrom(request)
    branch.ClearField("resume")
    branch.branch.token_ids.extend(answer[:position])
    branch.branch.request_id = earlier_request_id
    with _fitting("request_id"):
        branch.request_id = request_id
    # With the same seed, the first tokens of all branches would be drawn by the same numbers.
    branch.sampling.ClearField("seed")
    for name in sampling:
        if name in branch.sampling.DESCRIPTOR.fields_by_name:
            branch.sampling.ClearField(name)  # type: ignore[arg-type]  # one of its fields
    _set_sampling(branch.sampling, sampling)
    return branch


def tokenize_request(prompt: str | Sequence[Message], model: str) -> generate_pb2.TokenizeRequest:
    """The message for `Client.tokenize`."""
    request = generate_pb2.TokenizeRequest(model=model)
    if isinstance(prompt, str):
        with _fitting("text"):
            request.text = prompt
    else:
        request.chat.CopyFrom(_chat(prompt))
    return request


def detokenize_request(token_ids: Sequence[int], model: str) -> generate_pb2.DetokenizeRequest:
    """The message for `Client.detokenize`."""
    with _fitting("token_ids"):
        return generate_pb2.DetokenizeRequest(model=model, token_ids=token_ids)


def _is_chat(prompt: Sequence[int] | Sequence[Message]) -> bool:
    return any(isinstance(part, Message) for part in prompt)


def _chat(messages: Sequence[Message]) -> generate_pb2.ChatMessages:
    chat = generate_pb2.ChatMessages()
    for index, message in enumerate(messages):
        with _fitting(f"chat.messages[{index}]"):
            if not isinstance(message, Message):
                raise TypeError(f"a chat holds messages only, not {type(message).__name__}")
            chat.messages.add(role=message.role, content=message.content)
    return chat


def _set_sampling(params: types_pb2.SamplingParams, sampling: Sampling) -> None:
    fields = params.DESCRIPTOR.fields_by_name
    for name, value in sampling.items():
        if name not in fields:
            raise TypeError(f"there is no sampling parameter {name!r}; there are {', '.join(fields)}")
        if value is None:
            continue
        with _fitting(f"sampling.{name}"):
            _set_parameter(params, name, value)


def _set_parameter(params: types_pb2.SamplingParams, name: str, value: Any) -> None:  # noqa: ANN401 - of any field
    if name == "beam_search":
        params.beam_search.CopyFrom(_beam_search(value))
    elif name == "logit_bias":
        params.logit_bias.update(value)
    elif not params.DESCRIPTOR.fields_by_name[name].is_repeated:
        setattr(params, name, value)
    elif isinstance(value, str):
        raise TypeError("a list of strings, not one string")
    else:
        getattr(params, name).extend(value)


def _beam_search(value: BeamSearch) -> types_pb2.BeamSearch:
    if not isinstance(value, BeamSearch):
        raise TypeError(f"a BeamSearch, not {type(value).__name__}")
    if value.early_stopping not in _EARLY_STOPPING:
        raise ValueError('early_stopping is False, True or "never"')
    return types_pb2.BeamSearch(
        width=value.width,
        length_penalty=value.length_penalty,
        early_stopping=_EARLY_STOPPING[value.early_stopping],
        intermediate=value.intermediate,
    )


def _set_resume(message: generate_pb2.Resume, resume: Resume) -> None:
    with _fitting("resume.seed"):
        message.seed = resume.seed
    for index, token_ids in enumerate(resume.token_ids):
        with _fitting(f"resume.candidates[{index}].token_ids"):
            message.candidates.add(index=index, token_ids=token_ids)
    with _fitting("resume.finish_reasons"):
        if len(resume.finish_reasons) > len(resume.token_ids):
            raise ValueError("there are more than token_ids")
    for candidate, reason in zip(message.candidates, resume.finish_reasons, strict=False):
        with _fitting(f"resume.candidates[{candidate.index}].finish_reason"):
            candidate.finish_reason = _finish_reason(reason)


def _finish_reason(reason: str | None) -> "types_pb2.FinishReason.ValueType":
    if reason is None or reason == UNKNOWN_FINISH_REASON:
        return types_pb2.FINISH_REASON_UNSPECIFIED
    if reason not in FINISH_REASONS:
        raise ValueError(f"{reason!r}; there are {', '.join(FINISH_REASONS)}")
    return FINISH_REASONS[reason]


@contextlib.contextmanager
def _fitting(field: str) -> Iterator[None]:
    """Name the field whose value protobuf refuses: another type, out of range, or text that is not Unicode."""
    try:
        yield
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:_MAX_DESCRIPTION_LENGTH]
        raise InvalidRequestError(FieldViolation(field, f"the value does not fit: {reason}")) from error
