"""Weight files that lie about their content."""

import json
import resource
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kernels.select import select_kernels
from model_runner.model.files import open_model
from model_runner.model.load import check_weights, load_decoder
from model_runner.model.weights.gguf_file import GgufFile
from model_runner.model.weights.safetensors_file import SafetensorsFile
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.gguf.header import read_header
from tests.models import write_tiny_gguf, write_tiny_model

HUGE = 2**62
ALLOCATION_LIMIT_BYTES = 64 * 2**20


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_bytes(num_tensors: int = 0, num_entries: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + body


def tensor_bytes(shape: list[int], kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    dimensions = len(shape) if dimensions is None else dimensions
    return string("t") + struct.pack(f"<I{len(shape)}QIQ", dimensions, *shape, kind, offset)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GG",
        b"GGUF",
        gguf_bytes(version=1),
        gguf_bytes(version=1 << 24),
        gguf_bytes(num_tensors=HUGE),
        gguf_bytes(num_entries=HUGE),
        gguf_bytes(num_entries=1, body=struct.pack("<Q", HUGE) + bytes(100)),
        gguf_bytes(num_entries=1, body=string("k") + struct.pack("<IIQ", 9, 0, HUGE) + bytes(100)),
        gguf_bytes(num_entries=1, body=string("k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(100)),
        gguf_bytes(num_entries=1, body=string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(100)),
        gguf_bytes(num_entries=1, body=string("k") + struct.pack("<I", 99) + bytes(100)),
        gguf_bytes(num_entries=1, body=string("general.alignment") + struct.pack("<II", 4, 0) + bytes(100)),
        gguf_bytes(num_entries=1, body=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(100)),
        gguf_bytes(num_tensors=1, body=tensor_bytes([HUGE, HUGE]) + bytes(100)),
        gguf_bytes(num_tensors=1, body=tensor_bytes([0]) + bytes(100)),
        gguf_bytes(num_tensors=1, body=tensor_bytes([4], offset=HUGE) + bytes(100)),
        gguf_bytes(num_tensors=1, body=tensor_bytes([1000]) + bytes(100)),
        gguf_bytes(num_tensors=1, body=tensor_bytes([33], kind=8) + bytes(100)),
        gguf_bytes(num_tensors=1, body=tensor_bytes([4], kind=77) + bytes(100)),
        gguf_bytes(num_tensors=1, body=tensor_bytes([4], dimensions=2**31) + bytes(100)),
    ],
)
def test_case_35_a_gguf_header_is_not_believed(content: bytes, tmp_path: Path) -> None:
    """Case 35: sizes, counts and offsets past the file's end are an error that allocates nothing by their word."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigurationError) as raised:
        load_decoder(path, select_kernels("reference"))
    assert "\n" not in str(raised.value)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < ALLOCATION_LIMIT_BYTES


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", HUGE),
        struct.pack("<Q", 50) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        *(
            struct.pack("<Q", len(header)) + header
            for header in (
                json.dumps({"t": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
                for shape, offsets in ([[HUGE], [0, 4 * HUGE]], [[2], [0, 8]], [[2], [8, 0]], [[3], [0, 8]])
            )
        ),
    ],
)
def test_case_35_a_safetensors_header_is_not_believed(content: bytes, tmp_path: Path) -> None:
    """Case 35: the same for safetensors."""
    directory = write_tiny_model(tmp_path)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors") as raised:
        load_decoder(directory, select_kernels("reference"))
    assert "\n" not in str(raised.value)


def test_a_dtype_that_is_no_float_is_named(tmp_path: Path) -> None:
    save_file({"t": torch.ones(3, dtype=torch.int8)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigurationError, match="tensor t is I8"):
        SafetensorsFile(tmp_path / "x.safetensors")


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf")
    return write_tiny_gguf(path / "model.gguf", write_tiny_model(path / "model", num_hidden_layers=1)).read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused_and_nothing_else(
    good_gguf: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(good_gguf)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 1500))] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        files = open_model(path)
        check_weights(files)
    except ConfigurationError:
        return
    assert all(tensor.offset + tensor.num_bytes <= path.stat().st_size for tensor in read_header(path).tensors)


def test_a_gguf_tensor_that_is_there_twice_is_named(tmp_path: Path) -> None:
    metadata = string("general.architecture") + struct.pack("<I", 8) + string("llama")
    tensor = string("output_norm.weight") + struct.pack("<IQIQ", 1, 4, 0, 0)
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(2, 1, metadata + 2 * tensor) + bytes(100))
    header = read_header(tmp_path / "model.gguf")
    with pytest.raises(ConfigurationError, match=r"output_norm\.weight is there twice"):
        GgufFile(tmp_path / "model.gguf", header, 1, 1)
