"""From values to request messages. What does not even fit its field is an InvalidRequestError that names it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

from pagekeeper.client.values import Message, Prompt, Resume, Sampling
from pagekeeper.common.errors import FieldViolation, InvalidRequestError
from pagekeeper.v1 import generate_pb2, types_pb2

_MAX_DESCRIPTION_LENGTH = 200


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
            if not fields[name].is_repeated:
                setattr(params, name, value)
            elif isinstance(value, str):
                raise TypeError("a list of strings, not one string")
            else:
                getattr(params, name).extend(value)


def _set_resume(message: generate_pb2.Resume, resume: Resume) -> None:
    with _fitting("resume.seed"):
        message.seed = resume.seed
    for index, token_ids in enumerate(resume.token_ids):
        with _fitting(f"resume.candidates[{index}].token_ids"):
            message.candidates.add(index=index, token_ids=token_ids)


@contextlib.contextmanager
def _fitting(field: str) -> Iterator[None]:
    """Name the field whose value protobuf refuses: another type, out of range, or text that is not Unicode."""
    try:
        yield
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:_MAX_DESCRIPTION_LENGTH]
        raise InvalidRequestError(FieldViolation(field, f"the value does not fit: {reason}")) from error
