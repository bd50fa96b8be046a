"""Weight files that lie about their content."""

import ast
import contextlib
import json
import os
import random
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gateway.model import load_model
from kernels.select import select_kernels
from model_runner.model.files import open_model
from model_runner.model.load import check_weights, load_decoder
from model_runner.model.weights.gguf_file import GgufFile
from model_runner.model.weights.safetensors_file import SafetensorsFile
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.gguf.header import read_header
from tests.models import tiny_tokenizer, write_tiny_gguf, write_tiny_model

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
    model = write_tiny_model(path / "model", num_hidden_layers=1)
    return write_tiny_gguf(path / "model.gguf", model, tokenizer=tiny_tokenizer()).read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused_and_nothing_else(
    good_gguf: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(good_gguf)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 20_000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
    with contextlib.suppress(ConfigurationError):
        load_model(path)  # the gateway reads the tokenizer
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


WORDS = {
    "shard": "names b.safetensors, which is not there",
    "path": "files of the same directory",
    "missing": "model.norm.weight is missing",
    "extra": "no place for tensors extra",
    "twice": "there twice",
    "nested": "cannot read",
    "name": "a tensor named 'a\\nb'",
    "sparse": "more than 4194304 values",
}
"""Of bad models: what the error says."""


def bad_models(directory: Path) -> Iterator[tuple[str, Path]]:
    """Models of either format that are cut off, or whose headers lie, with the key of what their error says if any."""
    rng = random.Random(0)
    good = write_tiny_model(directory / "good")
    gguf_content = write_tiny_gguf(directory / "good.gguf", good).read_bytes()
    content = (good / "model.safetensors").read_bytes()

    def with_weights(name: str, content: bytes) -> Path:
        model = write_tiny_model(directory / name)
        (model / "model.safetensors").write_bytes(content)
        return model

    def with_index(name: str, **files: str) -> Path:
        model = write_tiny_model(directory / name)
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return model

    def with_tensors(name: str, **extra: torch.Tensor) -> Path:
        model = write_tiny_model(directory / name)
        weights = load_file(model / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights | extra, model / "model.safetensors")
        return model

    for format_, whole in (("gguf", gguf_content), ("safetensors", content)):
        for size in [*rng.sample(range(len(whole)), 15), len(whole) - 1]:
            if format_ == "gguf":
                path = directory / f"cut-{size}.gguf"
                path.write_bytes(whole[:size])
                yield "", path
            else:
                yield "", with_weights(f"cut-{size}", whole[:size])
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    for name, shift in (("overlap", -8), ("gap", 8), ("far", HUGE)):
        changed = json.loads(json.dumps(header))
        begin, end = changed["model.norm.weight"]["data_offsets"]
        changed["model.norm.weight"]["data_offsets"] = [begin + shift, end + shift]
        encoded = json.dumps(changed).encode()
        yield "", with_weights(name, struct.pack("<Q", len(encoded)) + encoded + content[-data_size(content) :])
    yield "shard", with_index("shard", a="model.safetensors", b="b.safetensors")
    for number, outside in enumerate(("../good/model.safetensors", "..", "", "/etc/passwd", "model.bin")):
        yield "path", with_index(f"path-{number}", a=outside)
    yield "missing", with_tensors("missing")
    yield "extra", with_tensors("extra", **{"extra": torch.ones(1), "model.norm.weight": torch.ones(64)})
    yield "name", with_tensors("name", **{"a\nb": torch.ones(1)})
    two_files = write_tiny_model(directory / "two-files")
    (two_files / "copy.safetensors").write_bytes(content)
    yield "twice", two_files
    for name in ("config.json", "generation_config.json"):
        nested = write_tiny_model(directory / f"nested-{name}")
        (nested / name).write_text("[" * 100_000)
        yield "nested", nested
    sparse = directory / "sparse.gguf"
    sparse.write_bytes(gguf_bytes(num_entries=1, body=string("k") + struct.pack("<IIQ", 9, 0, 2**23)))
    os.truncate(sparse, 2**23 + 100)
    yield "sparse", sparse


def data_size(content: bytes) -> int:
    """Bytes after the header of a safetensors file."""
    return len(content) - 8 - struct.unpack("<Q", content[:8])[0]


READ_WITHOUT_MEMORY = """
import pathlib, resource, sys
from kernels.select import select_kernels
from model_runner.model.load import load_decoder
from pagekeeper.common.errors import ConfigurationError

good, *paths = sys.stdin.read().splitlines()
kernels = select_kernels("cpu")
load_decoder(pathlib.Path(good), kernels)  # whatever is loaded late is there from now on
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
for path in paths:
    try:
        load_decoder(pathlib.Path(path), kernels)
    except ConfigurationError as error:
        print(repr(str(error)))
    else:
        print("loaded")
"""


def test_case_35_files_that_are_cut_off_or_lie_are_errors_of_one_line_and_need_no_memory(tmp_path: Path) -> None:
    """Case 35: truncation, offsets, counts, names and indexes of either format, in a process that cannot allocate."""
    models = list(bad_models(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", READ_WITHOUT_MEMORY, str(ALLOCATION_LIMIT_BYTES)],
        input="\n".join(map(str, [tmp_path / "good", *(path for _, path in models)])),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(models)
    for (key, path), line in zip(models, lines, strict=True):
        assert line.startswith(("'", '"')), f"{path.name}: {line}"
        message = ast.literal_eval(line)
        assert "\n" not in message
        assert WORDS.get(key, "") in message
