"""Typed access to the fields of a configuration file. What a file says is checked before anything is sized by it."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pagekeeper.common.errors import ConfigurationError

MOST = 2**31 - 1
# Beyond any sense, and near enough to 1 that no formula overflows.
_LEAST_NUMBER, _MOST_NUMBER = 1e-15, 1e15
T = TypeVar("T")


def read(fields: Mapping[str, Any], name: str, kind: Callable[..., T], default: T | None = None) -> T:
    """The field `name`, of type `kind`; an integer will do for a float.

    Raises:
        ConfigurationError: it has another type, or is missing or null and there is no default.
    """
    value = fields.get(name)
    if value is None:
        if default is None:
            raise ConfigurationError(f"model: {name} is missing")
        return default
    number = kind is float and type(value) is int
    if not number and type(value) is not kind:
        raise ConfigurationError(f"model: {name} must be of type {kind.__name__}, not {reprlib.repr(value)}")
    try:
        return kind(value)
    except OverflowError as error:
        raise ConfigurationError(f"model: {name} is too large") from error


def read_count(fields: Mapping[str, Any], name: str, default: int | None = None, most: int = MOST) -> int:
    """An integer from 1 to `most`.

    Raises:
        ConfigurationError: it is none.
    """
    value = read(fields, name, int, default)
    if not 1 <= value <= most:
        raise ConfigurationError(f"model: {name} must be from 1 to {most}, not {value}")
    return value


def read_number(fields: Mapping[str, Any], name: str, default: float | None = None, above: float = 0.0) -> float:
    """A number greater than `above`, neither infinite nor absurd.

    Raises:
        ConfigurationError: it is none.
    """
    value = read(fields, name, float, default)
    if not (above < value and _LEAST_NUMBER <= value <= _MOST_NUMBER):
        raise ConfigurationError(f"model: {name} must be a number above {above:g}, not {value:g}")
    return value
