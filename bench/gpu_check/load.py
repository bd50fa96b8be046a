"""`python -m bench.gpu_check.load`: sends requests and notes when each token came, in a process of its own.

Each line of standard input is a `Load` as JSON, each of standard output the list of its `Reading`s. Several such
processes keep the client from being what is measured.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from pagekeeper.client import AsyncClient

_START_S = 0.2
"""Until every process has read its load and has connected."""


@dataclass(frozen=True)
class Load:
    """Requests to be sent at the same time; greedy, of exactly `max_tokens` each."""

    address: str
    prompts: list[list[int]]
    max_tokens: int
    start_at: float
    """time.monotonic()."""


@dataclass(frozen=True)
class Reading:
    """One answer."""

    began: float
    """time.monotonic() of the request."""
    times: list[float]
    """time.monotonic() of each token."""
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.times[0] - self.began


class Clients:
    """Processes that send requests to one server; ended with the `with` block.

    Args:
        address: of the gateway.
        num_processes: among which requests are dealt out.
    """

    def __init__(self, address: str, num_processes: int = 4) -> None:
        self._address = address
        self._num_processes = num_processes
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", __name__]
        for _ in range(self._num_processes):
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            )
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def send(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Reading]:
        """Send these prompts at once and wait for all answers; a task's time limit is the only one.

        Raises:
            RuntimeError: a request failed.
        """
        start_at = time.monotonic() + _START_S
        busy = list(zip(self._processes, range(len(prompts)), strict=False))
        for process, i in busy:
            assert process.stdin is not None
            load = Load(self._address, list(prompts[i :: len(busy)]), max_tokens, start_at)
            process.stdin.write(json.dumps(asdict(load)) + "\n")
        readings: list[Reading] = []
        for process, _ in busy:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a request failed; see log.txt")
            readings += [Reading(**reading) for reading in json.loads(line)]
        return readings


async def _ask(client: AsyncClient, load: Load, prompt: list[int]) -> Reading:
    await asyncio.sleep(load.start_at - time.monotonic())
    began = time.monotonic()
    times: list[float] = []
    answer = client.generate(prompt, temperature=0, max_tokens=load.max_tokens, ignore_eos=True)
    async for delta in answer:
        times += [time.monotonic()] * len(delta.token_ids)
    if len(times) != load.max_tokens:
        raise RuntimeError(f"an answer has {len(times)} tokens, not {load.max_tokens}")
    return Reading(began, times, answer.usage.cached_tokens if answer.usage else 0)


async def _run(load: Load) -> list[Reading]:
    async with AsyncClient(load.address) as client:
        await client.health()  # connects
        return await asyncio.gather(*(_ask(client, load, prompt) for prompt in load.prompts))


def main() -> None:
    """Send one load after the other."""
    for line in sys.stdin:
        readings = asyncio.run(_run(Load(**json.loads(line))))
        sys.stdout.write(json.dumps([asdict(reading) for reading in readings]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
