"""The header of a GGUF file, read without believing it: nothing is allocated for more than the file holds.

Format: the GGUF specification, versions 2 and 3, little endian.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.gguf.tensor_types import TENSOR_TYPES, TensorType

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
# Python's objects take many times the bytes that a file spends on them, and a sparse file spends none at all. The
# vocabularies in use have a quarter of a million tokens, each with a string, a score, a type and up to two merges.
_MAX_HEADER_BYTES = 2**28
_MAX_VALUES = 2**22


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor's bytes are."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as in torch; the file has it the other way round."""
    type: TensorType
    offset: int
    """From the beginning of the file."""
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    metadata: dict[str, Any]
    tensors: list[GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of the file at `path`.

    Raises:
        ConfigurationError: it is no GGUF file, is damaged, or has a tensor of a type that is not supported.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path.name).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped: ValueError
        raise ConfigurationError(f"weights: cannot read {path.name}: {error}") from error


class _Reader:
    """A cursor over the header.

    Whatever is counted is read one by one or sliced, and each takes bytes, so a count that lies ends with the file.
    """

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._size = len(data)
        self._name = name
        self._position = 0
        self._num_values = 0

    def header(self) -> GgufHeader:
        if self._size < 4 or self._data[:4] != b"GGUF":
            raise ConfigurationError(f"weights: {self._name} is not a GGUF file")
        self._position = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ConfigurationError(f"weights: {self._name} has GGUF version {version}; supported: 2 and 3")
        num_tensors, num_entries = self._count(), self._count()
        metadata = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self._damaged(f"alignment {alignment!r}")
        start = -(-self._position // alignment) * alignment
        return GgufHeader(metadata, [self._tensor(start, *info) for info in infos])

    def _value(self, kind: int) -> Any:  # noqa: ANN401 - metadata values are of many types
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(self._format(kind))

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._count()
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        code = self._format(kind)
        raw = self._take(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", raw))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        if not name.isprintable():
            raise self._damaged(f"a tensor named {name!r}")
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"{num_dimensions} dimensions of tensor {name}")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in TENSOR_TYPES:
            supported = ", ".join(known.name for known in TENSOR_TYPES.values())
            raise ConfigurationError(f"weights: tensor {name} has GGUF type {kind}; supported: {supported}")
        tensor_type = TENSOR_TYPES[kind]
        num_values = 1
        for size in shape:
            num_values *= size
        if num_values < 1 or shape[-1] % tensor_type.block_values:
            raise self._damaged(f"shape {list(shape)} of tensor {name}")
        num_bytes = num_values // tensor_type.block_values * tensor_type.block_bytes
        if start + offset + num_bytes > self._size:
            raise self._damaged(f"tensor {name} ends after the file")
        return GgufTensor(name, shape, tensor_type, start + offset, num_bytes)

    def _string(self) -> str:
        raw = self._take(self._scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._damaged("a string that is not UTF-8") from error

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"value type {kind}")
        return _SCALARS[kind]

    def _count(self) -> int:
        """How many values come next; over the whole header there is a limit."""
        count: int = self._scalar("Q")
        self._num_values += count
        if self._num_values > _MAX_VALUES:
            raise self._damaged(f"more than {_MAX_VALUES} values in the header")
        return count

    def _scalar(self, code: str) -> Any:  # noqa: ANN401 - the type follows from the code
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > min(self._size, _MAX_HEADER_BYTES):
            raise self._damaged("the header ends after the file, or is too long")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _damaged(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"weights: {self._name} is damaged: {what}")
