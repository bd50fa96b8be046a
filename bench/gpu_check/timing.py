"""How long work on the device takes, by CUDA events."""

import statistics
from collections.abc import Callable, Sequence

import torch

_WARM_UP = 3
_MEDIAN_OF = 15
L2_BYTES = 64 << 20
"""Of the largest device in mind; what is read in turns must be several times as much to come from memory."""


def median_s(work: Callable[[], object], repeats: int = _MEDIAN_OF) -> float:
    """Seconds of one call, queued at once: the median of many, after a few that do not count."""
    for _ in range(_WARM_UP):
        work()
    times: list[float] = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) / 1e3)
    return statistics.median(times)


def captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """The calls as one CUDA graph, so that the time of launching them from Python is not measured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles, and allocates what is kept between calls
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def per_call_s(calls: Sequence[Callable[[], object]], repeats: int = _MEDIAN_OF) -> float:
    """Seconds of one of `calls`, which are run in turns; to read memory they must touch several times `L2_BYTES`."""
    return median_s(captured(calls), repeats) / len(calls)
