"""Real manager, runner and gateway over each kind of memory: their answers, and what is left when one is killed."""

import math
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.gpu_check.peers import PeerProcess
from bench.gpu_check.random_model import TINY, written
from bench.gpu_check.stack import BLOCK_SIZE, TENANT, GreedyOracle, Stream, greedy, runtime_dir, serving
from bench.gpu_check.task import Check, Setting, at_most, recorded, verified
from pagekeeper.cli.server import Server
from pagekeeper.client import AdminClient, Client

_LIMIT_S = 40.0
_PROMPT_TOKENS = 100
_POOL_SIZE, _TINY_POOL_SIZE = "512MiB", "32MiB"
_MOST_LOST = 256 << 20
"""Less than the pool: device memory that the runner may need more of when it has captured its graphs again."""


def real_processes(setting: Setting, memory: str) -> Iterator[Check]:
    """A tiny model through gRPC; then the runner is killed while it answers, then the manager."""
    rng = setting.rng(f"processes {memory}")
    with written(TINY, setting) as model:
        scene = _Scene(setting, memory, model, rng.choices(range(3, TINY.vocab_size), k=_PROMPT_TOKENS))
        pool_size = _TINY_POOL_SIZE if setting.dry_run else _POOL_SIZE
        with serving(setting, model, memory, pool_size, PAGEKEEPER_MAX_SEQUENCES="8") as server:
            yield from scene.answers(server)
            yield from scene.runner_is_killed(server)
            yield from scene.manager_is_killed(server)


class _Scene:
    """What the parts have in common."""

    def __init__(self, setting: Setting, memory: str, model: Path, prompt: list[int]) -> None:
        self._setting = setting
        self._memory = memory
        self._model = model
        self._prompt = prompt
        self._oracle = GreedyOracle(model)
        # In bfloat16 two logits of about 8 may change places when they are closer than this.
        self._most_short = 1e-3 if setting.dry_run else 1.0
        self._num_tokens = 200 if setting.dry_run else 4000

    def answers(self, server: Server) -> Iterator[Check]:
        """Greedy answers, alone and side by side, are what float32 on the CPU finds likeliest."""
        rng = self._setting.rng("prompts")
        prompts = [rng.choices(range(3, TINY.vocab_size), k=rng.randrange(1, 200)) for _ in range(6)]
        with Client(server.address) as client:
            alone = list(greedy(client, self._prompt, 40).collect()[0].token_ids)
            with AdminClient(server.admin) as admin:
                backend = admin.stats()["pool"]["backend"]
        yield verified(f"{self._memory}: pool in use", backend == self._memory, str(backend), self._memory)
        yield at_most(
            f"{self._memory}: likeliest token in float32 is ahead by", self._shortfall(alone), self._most_short
        )
        streams = [Stream(server.address, prompt, 40) for prompt in prompts]
        worst = 0.0
        for prompt, stream in zip(prompts, streams, strict=True):
            stream.finish(_LIMIT_S)
            worst = max(worst, self._oracle.shortfall(prompt, stream.token_ids))
        yield at_most(f"{self._memory}: the same for 6 answers side by side", worst, self._most_short)

    def runner_is_killed(self, server: Server) -> Iterator[Check]:
        """The stream goes on; the next runner finds the blocks, and their bytes are the same."""
        with ExitStack() as stack:
            first, second = (stack.enter_context(PeerProcess(self._setting)) for _ in range(2))
            for peer in (first, second):
                peer.begin()
            yield from self._kill_runner(server, first, second)

    def _kill_runner(self, server: Server, first: PeerProcess, second: PeerProcess) -> Iterator[Check]:
        self._attach(first)
        stream = Stream(server.address, self._prompt, self._num_tokens)
        stream.wait_for(3 * BLOCK_SIZE, _LIMIT_S)
        before = self._open(first, self._prompt + stream.token_ids[: 2 * BLOCK_SIZE])
        had = self._kill("model_runner", server, stream)
        name = f"{self._memory}: runner killed"
        yield recorded(f"{name}: longest pause", f"{stream.longest_pause_s():.2f} s", stream.longest_pause_s())
        yield from self._whole(name, stream)
        usage = stream.answer.usage if stream.answer else None
        again = usage.recomputed_tokens if usage else math.nan
        yield at_most(f"{name} after {had} tokens: computed again", again, BLOCK_SIZE, " tokens")
        self._attach(second)
        after = self._open(second, self._prompt + stream.token_ids[: 2 * BLOCK_SIZE])
        hit, expected = after["cached_tokens"], (_PROMPT_TOKENS + 2 * BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
        yield verified(f"{name}: prefix hit", hit == expected, f"{hit} tokens", f"{expected} tokens")
        figure = "same bytes" if before == after else "differ"
        yield verified(f"{name}: sealed blocks", before == after, figure, "same bytes")

    def manager_is_killed(self, server: Server) -> Iterator[Check]:
        """The stream goes on over a new pool, and the old one's memory is given back."""
        name = f"{self._memory}: manager killed"
        with PeerProcess(self._setting) as peer:
            peer.begin()
            before = peer.ask("free_bytes")
            stream = Stream(server.address, self._prompt, self._num_tokens)
            stream.wait_for(2 * BLOCK_SIZE, _LIMIT_S)
            runner = server.pids()["model_runner"]
            self._kill("cache_manager", server, stream)
            lost = before - peer.ask("free_bytes")
        # A runner that could not let go of the dead manager's pool would end, and another one load the model again.
        same = server.pids().get("model_runner") == runner
        figure = "same process" if same else "another process"
        yield verified(f"{name}: the runner lives on", same, figure, "same process")
        yield recorded(f"{name}: longest pause", f"{stream.longest_pause_s():.2f} s", stream.longest_pause_s())
        yield from self._whole(name, stream)
        if not self._setting.dry_run:  # other programs use the machine's memory as well
            yield at_most(f"{name}: memory not given back", lost / 2**20, _MOST_LOST / 2**20, " MiB")

    def _whole(self, name: str, stream: Stream) -> Iterator[Check]:
        figure = f"{len(stream.token_ids)} tokens"
        yield verified(
            f"{name}: answer", len(stream.token_ids) == self._num_tokens, figure, f"{self._num_tokens} tokens"
        )
        yield at_most(f"{name}: likeliest token is ahead by", self._shortfall(stream.token_ids), self._most_short)

    def _shortfall(self, answer: list[int]) -> float:
        return self._oracle.shortfall(self._prompt, answer)

    def _kill(self, process: str, server: Server, stream: Stream) -> int:
        """Kill it in the middle of an answer and wait for the answer's end; how many tokens had come before.

        Raises:
            RuntimeError: the answer had ended, so nothing was shown.
        """
        had = len(stream.token_ids)
        os.kill(server.pids()[process], signal.SIGKILL)
        stream.finish(_LIMIT_S)
        if had >= self._num_tokens:
            raise RuntimeError(f"the answer ended before {process} was killed")
        return had

    def _attach(self, peer: PeerProcess) -> None:
        """Let it attach as one more runner."""
        loaded = self._oracle.model
        dtype = "float32" if self._setting.dry_run else "bfloat16"
        config = loaded.config
        layout = {
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "block_size": BLOCK_SIZE,
            "head_dim": config.head_dim,
            "dtype": dtype,
        }
        fingerprint = {
            "model_config": loaded.config_digest.hex(),
            "weights": loaded.weights_digest.hex(),
            "compute_dtype": dtype,
        }
        peer.ask("attach", runtime_dir=str(runtime_dir(self._model)), layout=layout, fingerprint=fingerprint)

    def _open(self, peer: PeerProcess, token_ids: list[int]) -> dict[str, object]:
        """Let it open these tokens and look at the blocks' bytes."""
        found: dict[str, object] = peer.ask("open", token_ids=token_ids, tenant=TENANT)
        return found
