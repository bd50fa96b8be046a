"""Afterwards: what is still held, and what became of every stream."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from bench.chaos.observer import Observer
from bench.chaos.report import Report
from bench.chaos.streams import Expected, Stream, difference
from bench.chaos.waiting import NoRecoveryError, until
from bench.chaos.workload import Prompt
from bench.reference import Reference


async def settle(observer: Observer) -> list[str]:
    """Wait until nothing is held by anyone; returns what is, in spite of that, and every broken invariant."""

    async def is_empty() -> bool:
        stats = await observer.stats()
        return not stats["usage"]["sequences"] and stats["pool"]["free_blocks"] == stats["pool"]["total_blocks"] - 1

    with contextlib.suppress(NoRecoveryError):
        await until(is_empty, "nothing is held")
    stats = await observer.stats()
    held = {name: stats["pool"][f"{name}_blocks"] for name in ("leased", "sealed", "quarantined")}
    held |= {"live sequences": stats["usage"]["sequences"]}
    left = [f"{count} {name} left" for name, count in held.items() if count]
    return left + await observer.audit()


def count_streams(
    report: Report,
    streams: Sequence[Stream],
    expected: Sequence[Expected],
    prompts: Sequence[Prompt],
    reference: Reference,
) -> None:
    """Fill in what became of the streams, and how clear each choice was that another one was made of."""
    whole = [stream for stream in streams if stream.is_whole]
    report.num_whole = len(whole)
    report.errors = [stream.error for stream in streams if stream.error]
    report.lost_tokens = sum(stream.lost_tokens for stream in streams)
    report.doubled_tokens = sum(stream.doubled_tokens for stream in streams)
    gaps: dict[tuple[int, int], float | None] = {}
    for stream in whole:
        answer = expected[stream.prompt]
        found = difference(stream, answer)
        if found is None:
            continue
        place = (found.prompt, found.position)
        if place not in gaps:
            prompt = list(prompts[stream.prompt].token_ids)
            parting = reference.gap_where_they_part(prompt, list(answer.token_ids), stream.token_ids)
            gaps[place] = parting.gap if parting else None
        report.differences.append(replace(found, gap=gaps[place]))
