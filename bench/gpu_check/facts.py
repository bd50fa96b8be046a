"""What the machine is, and its two ceilings: copy bandwidth and bf16 matrix rate."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator

from bench.gpu_check.task import Check, NotRunError, Setting, Task, recorded

COPY_BANDWIDTH, MATRIX_RATE = "copy bandwidth, read + write", "bf16 matrix rate, 8192 cubed"
_PACKAGES = ("torch", "triton", "cupy-cuda13x", "cuda-bindings", "grpcio", "protobuf", "flashinfer-python")
_COPY_BYTES = 4 << 30
_SIZE = 8192


def tasks(setting: Setting) -> list[Task]:
    """The section."""
    del setting
    return [
        Task("software", _software),
        Task("device", _device, needs_device=True),
        Task(COPY_BANDWIDTH, _copy_bandwidth, needs_device=True),
        Task(MATRIX_RATE, _matrix_rate, needs_device=True),
    ]


def copy_bandwidth(setting: Setting) -> float:
    """Bytes a second, as measured.

    Raises:
        NotRunError: it was not.
    """
    if COPY_BANDWIDTH not in setting.facts:
        raise NotRunError("the copy bandwidth was not measured: run the section facts too")
    return setting.facts[COPY_BANDWIDTH]


def _software(setting: Setting) -> Iterator[Check]:
    del setting
    yield recorded("machine", f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}")
    for name in _PACKAGES:
        try:
            yield recorded(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield recorded(name, "not installed")


def _device(setting: Setting) -> Iterator[Check]:
    del setting
    import torch

    properties = torch.cuda.get_device_properties(0)
    yield recorded("GPU", properties.name)
    yield recorded("compute capability", f"{properties.major}.{properties.minor}")
    yield recorded("multiprocessors", str(properties.multi_processor_count), properties.multi_processor_count)
    yield recorded("memory", f"{properties.total_memory / 2**30:.1f} GiB", properties.total_memory)
    yield recorded("L2 cache", f"{properties.L2_cache_size / 2**20:.0f} MiB", properties.L2_cache_size)
    yield recorded("CUDA of torch", str(torch.version.cuda))
    fields = (
        "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,compute_mode,mig.mode.current"
    )
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    for name, value in zip(fields.split(","), done.stdout.splitlines()[0].split(","), strict=True):
        yield recorded(f"nvidia-smi {name}", value.strip())


def _copy_bandwidth(setting: Setting) -> Iterator[Check]:
    del setting
    import torch

    from bench.gpu_check.timing import median_s

    source = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    rate = 2 * _COPY_BYTES / median_s(lambda: destination.copy_(source))
    yield recorded(COPY_BANDWIDTH, f"{rate / 1e12:.2f} TB/s", rate)


def _matrix_rate(setting: Setting) -> Iterator[Check]:
    del setting
    import torch

    from bench.gpu_check.timing import median_s

    left, right = torch.randn(2, _SIZE, _SIZE, dtype=torch.bfloat16, device="cuda")
    rate = 2 * _SIZE**3 / median_s(lambda: left @ right)
    yield recorded(MATRIX_RATE, f"{rate / 1e12:.0f} TFLOP/s", rate)
