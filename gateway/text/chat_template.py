"""A model's chat template, rendered as the model's own library renders it, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pagekeeper.common.errors import ConfigurationError, FieldViolation, InvalidRequestError


class ChatTemplate:
    """Renders messages to the text that the model was trained on, ending where its answer begins.

    Templates are written for `transformers.PreTrainedTokenizer.apply_chat_template`, whose environment this is: blocks
    trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`.

    Raises:
        ConfigurationError: the template is not valid.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"chat template: {_first_line(error)}") from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for `messages`, each with "role" and "content".

        Raises:
            InvalidRequestError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            text = f"the model's chat template refuses the messages: {_first_line(error)}"
            raise InvalidRequestError(FieldViolation("chat.messages", text)) from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it only holds its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:  # noqa: ANN401 - json.dumps' own options
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().astimezone().strftime(date_format)


def _first_line(error: jinja2.TemplateError) -> str:
    return (error.message or type(error).__name__).splitlines()[0]
