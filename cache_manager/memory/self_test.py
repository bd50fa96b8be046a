"""Whether CUDA IPC works here: another process opens the handle, since its exporter cannot.

`python -m cache_manager.memory.self_test GPU` is that process. It reads a `MemoryHandle` from standard input, maps the
pool as a runner would, and ends with 0 or with one line of what is wrong.
"""

import subprocess
import sys

from cache_manager import wire
from cache_manager.memory.cupy_driver import load_cuda_driver
from cache_manager.memory.interface import CudaIpcHandle
from cache_manager.memory.mapping import map_pool
from pagekeeper.common.process import run_process
from pagekeeper.v1 import cache_pb2 as pb

_LIMIT_SECONDS = 60.0


def what_fails(handle: CudaIpcHandle, gpu: int) -> str | None:
    """Let another process map the pool; why it could not, or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cache_manager.memory.self_test", str(gpu)],
            input=wire.memory_to_proto(handle).SerializeToString(),
            capture_output=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no result within {_LIMIT_SECONDS:.0f} s"
    if not done.returncode:
        return None
    lines = done.stderr.decode(errors="replace").splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def main() -> int:
    """Map the pool and let it go; returns the exit code."""
    handle = wire.memory_from_proto(pb.MemoryHandle.FromString(sys.stdin.buffer.read()))
    map_pool(handle, [], load_cuda_driver(int(sys.argv[1]))).close()
    return 0


if __name__ == "__main__":
    run_process("self-test", main)
