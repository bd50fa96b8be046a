"""Pools shared between processes: the real ones, and what becomes of memory and writes when processes die."""

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from bench.gpu_check.peers import Death, PeerError, PeerProcess, can_unshare
from bench.gpu_check.processes import real_processes
from bench.gpu_check.stack import wait_until
from bench.gpu_check.task import Check, Setting, Task, at_most, recorded, verified

_POOL_BYTES = 512 << 20
_SMALL_POOL_BYTES = 16 << 20
_OFFSET = 1 << 20
_SAMPLE_BYTES = 4 << 20
_COUNTERS = 8 << 20
_GRACE_S = 10.0
_TEARDOWN_S = 1.0
"""A killed process's context may take so long to go."""


def tasks(setting: Setting) -> list[Task]:
    """The section: the kind of memory that a GPU's pool has by default."""
    return tasks_over("memfd", num_deaths=2) if setting.dry_run else tasks_over("cuda_ipc", num_deaths=10)


def tasks_over(memory: str, num_deaths: int, *, needs_device: bool = False) -> list[Task]:
    """Everything that is checked of one kind of memory.

    Args:
        memory: the backend.
        num_deaths: how many runners are killed while a kernel of theirs writes.
        needs_device: whether a dry run leaves it out.
    """

    def task(name: str, run: Callable[..., Iterator[Check]], limit_s: float) -> Task:
        return Task(f"{memory}: {name}", functools.partial(run, memory=memory), limit_s, needs_device)

    return [
        task("real processes", real_processes, 75),
        task("deaths", functools.partial(_deaths, count=num_deaths), 45),
        task("owner killed", _owner_killed, 30),
        task("PID namespaces", _namespaces, 25),
    ]


def _pool_bytes(setting: Setting) -> int:
    return _SMALL_POOL_BYTES if setting.dry_run else _POOL_BYTES


def _owner_killed(setting: Setting, memory: str) -> Iterator[Check]:
    """The process that made a pool is killed while another has it mapped: what still works, and when it is freed."""
    with ExitStack() as stack:
        user, late, observer = (stack.enter_context(PeerProcess(setting)) for _ in range(3))
        for peer in (user, late, observer):
            peer.begin()
        free = observer.ask("free_bytes")
        owner = stack.enter_context(PeerProcess(setting))
        owner.begin()
        owner.send("export", backend=memory, size=_pool_bytes(setting))
        handle, descriptors = owner.receive()
        user.ask("map", descriptors, handle=handle)
        written = user.ask("write", offset=_OFFSET, size=_SAMPLE_BYTES, seed=setting.seed)
        owner.kill()

        def taken() -> float:
            return float(free - observer.ask("free_bytes")) / 2**20

        name = f"{memory}, owner killed"
        same = user.ask("checksum", offset=_OFFSET, size=_SAMPLE_BYTES) == written
        yield verified(f"{name}: mapping can be read", same, "same bytes" if same else "differ", "same bytes")
        again = user.ask("write", offset=_COUNTERS, size=_SAMPLE_BYTES, seed=setting.seed + 1)
        same = user.ask("checksum", offset=_COUNTERS, size=_SAMPLE_BYTES) == again
        yield verified(f"{name}: mapping can be written", same, "yes" if same else "no", "yes")
        if not setting.dry_run:
            time.sleep(_TEARDOWN_S)
        figure = f"{taken():.0f} MiB of {_pool_bytes(setting) / 2**20:.0f}"
        yield recorded(f"{name}: another process maps it", _outcome(late, handle, descriptors, written))
        late.ask("unmap")
        user.ask("unmap")
        kept = taken()
        for descriptor in descriptors:
            os.close(descriptor)
        if setting.dry_run:
            return  # other programs use the machine's memory as well
        yield recorded(f"{name}: memory in use while it is mapped", figure)
        yield recorded(f"{name}: memory in use while only descriptors are left", f"{kept:.0f} MiB", kept)
        deadline = time.monotonic() + _GRACE_S
        while taken() > _SAMPLE_BYTES / 2**20 and time.monotonic() < deadline:
            time.sleep(0.1)
        yield at_most(f"{name}: memory in use after the last has let go", taken(), 64, " MiB")


def _outcome(peer: PeerProcess, handle: str, descriptors: list[int], written: str) -> str:
    try:
        peer.ask("map", descriptors, handle=handle)
        same = peer.ask("checksum", offset=_OFFSET, size=_SAMPLE_BYTES) == written
    except PeerError as error:
        return str(error)
    return "it can, same bytes" if same else "it can, bytes differ"


def _namespaces(setting: Setting, memory: str) -> Iterator[Check]:
    """Owner and user of a pool in separate PID namespaces."""
    can_unshare()
    with ExitStack() as stack:
        peers = [stack.enter_context(PeerProcess(setting, own_pid_namespace=apart)) for apart in (False, True)]
        pids = [peer.begin() for peer in peers]
        yield recorded(f"{memory}, PID namespaces: pids as their processes see them", f"{pids[0]} and {pids[1]}")
        for (owner, user), name in ((peers, "user in its own"), (peers[::-1], "owner in its own")):
            owner.send("export", backend=memory, size=_SMALL_POOL_BYTES)
            handle, descriptors = owner.receive()
            user.ask("unmap")
            try:
                user.ask("map", descriptors, handle=handle)
                written = user.ask("write", offset=_OFFSET, size=_SAMPLE_BYTES, seed=setting.seed)
                works, figure = bool(written), "works"
            except PeerError as error:
                works, figure = False, str(error)
            for descriptor in descriptors:
                os.close(descriptor)
            title = f"{memory}, PID namespaces: {name}"
            if memory == "cuda_ipc":
                yield recorded(title, figure)
            else:
                yield verified(title, works, figure, "works")


def _deaths(setting: Setting, memory: str, count: int) -> Iterator[Check]:
    """Runners killed while work of theirs is writing: when the writes end, and when their death can be seen."""
    work_s, queued_s = (1.0, 0.2) if setting.dry_run else (2.0, 0.3)
    quiet_s = 0.3 if setting.dry_run else 0.6
    rng = setting.rng(f"deaths {memory}")
    deaths: list[tuple[Death, float]] = []
    after_queue, longest_look = 0, 0.0
    with ExitStack() as stack:
        owner, watcher = (stack.enter_context(PeerProcess(setting)) for _ in range(2))
        runners = [stack.enter_context(PeerProcess(setting)) for _ in range(count)]
        for peer in (owner, watcher, *runners):
            peer.send("begin", cuda=not setting.dry_run)
        for peer in (owner, watcher, *runners):
            peer.receive()
        owner.send("export", backend=memory, size=_SMALL_POOL_BYTES)
        handle, descriptors = owner.receive()
        for peer in (watcher, *runners):
            peer.ask("map", descriptors, handle=handle)
        for descriptor in descriptors:
            os.close(descriptor)
        for number, runner in enumerate(runners):
            offset = _COUNTERS + 4096 * number
            before = watcher.ask("counts", offset=offset)
            runner.ask("spin", offset=offset, seconds=work_s, queued_s=queued_s)
            wait_until(functools.partial(_counts_differ, watcher, offset, before), _GRACE_S, "the runner's writes")
            time.sleep(rng.uniform(0.05, 0.4))
            watcher.send("watch", offset=offset, quiet_s=quiet_s)
            time.sleep(0.02)
            death = runner.kill()
            seen, _ = watcher.receive()
            deaths.append((death, seen["changed"] - death.killed_at))
            after_queue += seen["counts"][1] != before[1]
            longest_look = max(longest_look, seen["longest_look_s"])
    name = f"{memory}, {count} runners killed in a kernel of {work_s:g} s"
    yield _spread(f"{name}: writes end", [writes for _, writes in deaths])
    yield _spread(f"{name}: hand-over connection ends", [death.socket_s for death, _ in deaths])
    yield _spread(f"{name}: pidfd is readable", [death.pidfd_s for death, _ in deaths])
    yield _spread(f"{name}: writes after the connection's end", [writes - death.socket_s for death, writes in deaths])
    yield _spread(f"{name}: writes after the pidfd", [writes - death.pidfd_s for death, writes in deaths])
    yield recorded(f"{name}: kernels queued behind it ran", f"{after_queue} of {count}", after_queue)
    yield recorded(f"{name}: longest time between two looks", f"{longest_look * 1e3:.2f} ms", longest_look)


def _counts_differ(watcher: PeerProcess, offset: int, before: list[int]) -> bool:
    return bool(watcher.ask("counts", offset=offset) != before)


def _spread(name: str, seconds: list[float]) -> Check:
    low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
    return recorded(name, f"min {low:.1f}, median {middle:.1f}, max {high:.1f} ms", max(seconds))
