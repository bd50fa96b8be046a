"""`python -m bench.gpu_check.peer FD`: a runner or a manager without a model, told what to do over a socket.

It maps pools, looks at their bytes, keeps a device busy, and can be killed at any moment. Requests and answers are
JSON messages, with descriptors beside them; `peers.py` is the other end.
"""

import hashlib
import importlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from cache_manager import wire
from cache_manager.client import CacheClient, Fingerprint
from cache_manager.memory.cuda_driver import CudaDriver
from cache_manager.memory.cuda_ipc import CudaIpcPool
from cache_manager.memory.cuda_vmm import CudaVmmPool
from cache_manager.memory.interface import MappedPool, PoolMemory
from cache_manager.memory.mapping import map_pool
from cache_manager.memory.memfd import MemfdPool
from kernels.kv_layout import KvLayout
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import Open, Opened
from pagekeeper.common.sockets import RuntimeDir
from pagekeeper.v1 import cache_pb2

MESSAGE_BYTES = 1 << 18
_MOST_DESCRIPTORS = 8
_TIMEOUT_S = 20.0
_COUNT = r"""
extern "C" __global__ void count(volatile unsigned long long* counter, unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        *counter += 1;
        __threadfence_system();
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""


class Peer:
    """What the process holds. Its public methods are the commands; they take and return what JSON has."""

    def __init__(self) -> None:
        self.received: list[int] = []
        """Descriptors that came with the request."""
        self.to_send: list[int] = []
        """Descriptors that go with the answer; they stay ours."""
        self._cuda: CudaDriver | None = None
        self._exported: PoolMemory | None = None
        self._mapped: MappedPool | None = None
        self._client: CacheClient | None = None
        self._layout: KvLayout | None = None

    def begin(self, cuda: bool) -> int:
        """Get ready for a device, or for the CPU; returns the pid as this process sees it."""
        if cuda:
            from cache_manager.memory.cupy_driver import load_cuda_driver

            self._cuda = load_cuda_driver(0)
        return os.getpid()

    def free_bytes(self) -> int:
        """Of the device, or of the machine's memory."""
        if self._cuda is not None:
            return self._cuda.memory_info()[0]
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemFree"].split()[0]) * 1024

    def export(self, backend: str, size: int) -> str:
        """Make a pool as a manager does; returns its handle and sends its descriptors."""
        if self._cuda is None:
            self._exported = MemfdPool(size, preallocate=True)
        else:
            self._exported = (CudaIpcPool if backend == "cuda_ipc" else CudaVmmPool)(self._cuda, size)
        self.to_send = self._exported.descriptors()
        return wire.memory_to_proto(self._exported.handle()).SerializeToString().hex()

    def map(self, handle: str) -> int:
        """Map a pool as a runner does, with the descriptors that came along; returns its size."""
        parsed = wire.memory_from_proto(cache_pb2.MemoryHandle.FromString(bytes.fromhex(handle)))
        self._mapped = map_pool(parsed, self.received, self._cuda)
        return self._mapped.size

    def unmap(self) -> None:
        """Give the mapping up."""
        if self._mapped is not None:
            self._mapped.close()
        self._mapped = None

    def attach(self, runtime_dir: str, layout: dict[str, Any], fingerprint: dict[str, str]) -> int:
        """Attach to a manager as a runner; returns the number of blocks."""
        self._layout = KvLayout(**layout)
        directory = RuntimeDir(Path(runtime_dir))
        name, expected = f"peer-{os.getpid()}", Fingerprint(**fingerprint)
        self._client = CacheClient.connect(directory, name, self._layout, expected, _TIMEOUT_S, self._cuda)
        self._mapped = self._client.memory
        return self._client.granted.num_blocks

    def open(self, token_ids: list[int], tenant: str) -> dict[str, Any]:
        """Open a sequence, once: how many tokens are cached in whole blocks, and a checksum of these blocks."""
        if self._client is None or self._layout is None:
            raise RuntimeError("not attached")
        self._client.send(1, 0, [Open(SequenceId(1), tenant, token_ids, len(token_ids) - 1, len(token_ids))])
        (opened,) = self._client.receive(_TIMEOUT_S)
        if not isinstance(opened, Opened):
            raise RuntimeError(f"the sequence was not opened: {opened}")
        num_blocks = opened.num_cached_tokens // self._layout.block_size
        digest = hashlib.sha256()
        for block in opened.blocks[:num_blocks]:
            digest.update(self._read(block.id * self._layout.block_bytes, self._layout.block_bytes))
        return {"cached_tokens": num_blocks * self._layout.block_size, "checksum": digest.hexdigest()}

    def write(self, offset: int, size: int, seed: int) -> str:
        """Write random bytes; returns their checksum."""
        data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        target = self._view(offset, size)
        if self._cuda is None:
            target[:] = data
        else:
            target.set(data)
            self._cuda.synchronize()
        return hashlib.sha256(data.tobytes()).hexdigest()

    def checksum(self, offset: int, size: int) -> str:
        """Of what is there."""
        return hashlib.sha256(self._read(offset, size)).hexdigest()

    def spin(self, offset: int, seconds: float, queued_s: float) -> None:
        """Start work that counts at `offset` for so long, and queue more behind it that counts 8 bytes further."""
        counters = self._view(offset, 16).view("uint64")
        if self._cuda is None:
            threading.Thread(target=_count, args=(counters, seconds, queued_s), daemon=True).start()
            return
        kernel = importlib.import_module("cupy").RawKernel(_COUNT, "count")
        kernel((1,), (1,), (counters, int(seconds * 1e9)))
        kernel((1,), (1,), (counters[1:], int(queued_s * 1e9)))

    def counts(self, offset: int) -> list[int]:
        """Both counters of `spin`."""
        first, second = np.frombuffer(self._read(offset, 16), np.uint64).tolist()
        return [first, second]

    def watch(self, offset: int, quiet_s: float) -> dict[str, Any]:
        """Look at the counters until they have not changed for so long; when they did last, by the monotonic clock."""
        last = self.counts(offset)
        changed = looked = time.monotonic()
        longest = 0.0
        while looked - changed < quiet_s:
            now = self.counts(offset)
            before, looked = looked, time.monotonic()
            longest = max(longest, looked - before)
            if now != last:
                last, changed = now, looked
        return {"changed": changed, "counts": last, "longest_look_s": longest}

    def _view(self, offset: int, size: int) -> Any:  # noqa: ANN401 - an array of numpy or CuPy, which is optional
        if self._mapped is None:
            raise RuntimeError("nothing is mapped")
        array: Any = self._mapped.array()
        return array[offset : offset + size]

    def _read(self, offset: int, size: int) -> bytes:
        view = self._view(offset, size)
        return bytes((view if self._cuda is None else view.get()).tobytes())


def _count(counters: "np.ndarray[tuple[int], np.dtype[np.uint64]]", seconds: float, queued_s: float) -> None:
    for index, duration in enumerate((seconds, queued_s)):
        end = time.monotonic() + duration
        while time.monotonic() < end:
            counters[index] += np.uint64(1)


def main() -> None:
    """Answer requests until the other end is gone."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    peer = Peer()
    while True:
        data, peer.received, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not data:
            os._exit(0)  # without a tear-down, as a process that is killed
        request = json.loads(data)
        peer.to_send = []
        try:
            answer = {"value": getattr(peer, request.pop("command"))(**request)}
        except Exception as error:  # noqa: BLE001 - whatever happens here is what is to be found out
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        for descriptor in peer.received:
            os.close(descriptor)
        socket.send_fds(connection, [json.dumps(answer).encode()], peer.to_send)


if __name__ == "__main__":
    main()
