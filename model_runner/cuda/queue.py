"""The few things that a device needs of torch.cuda, so that its logic can be tested where there is no GPU."""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a queue: reached once all work before it has been done."""

    def query(self) -> bool:
        """Whether it was reached. Does not wait.

        Raises:
            RuntimeError: work in the queue has failed.
        """
        ...

    def synchronize(self) -> None:
        """Wait until it is reached.

        Raises:
            RuntimeError: work in the queue has failed.
        """
        ...

    def seconds_since(self, earlier: "Event") -> float:
        """Seconds between two events of a queue, both reached."""
        ...


class Graph(Protocol):
    """Captured work, to be done again and again on the same tensors."""

    def replay(self) -> None:
        """Do the work once more. Only within `Queue.run`."""
        ...


class Queue(Protocol):
    """A stream of a GPU: work is done in the order in which it was run, some time later."""

    device: torch.device

    def run(self, work: Callable[[], None]) -> None:
        """Queue what `work` does on tensors of the device. It may wait for nothing and look at no value."""
        ...

    def record(self) -> Event:
        """An event behind everything that was run so far."""
        ...

    def capture(self, work: Callable[[], None], memory: object) -> Graph:
        """Capture what `work` does instead of doing it. It was run before, so everything in it is compiled."""
        ...

    def new_graph_memory(self) -> object:
        """Memory that graphs share, given that one is replayed at a time; freed with the last of them."""
        ...

    def pin(self, num_words: int) -> torch.Tensor:
        """`[num_words]` int64 on the host, from and to which copies need not wait."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that the device was given, here or elsewhere in this process."""
        ...

    def release_memory(self) -> None:
        """Give the device back what no tensor and no graph uses."""
        ...


class TorchEvent:
    """An event that notes its time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def query(self) -> bool:
        """See `Event`."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """See `Event`. Lets go of the interpreter lock while it waits."""
        self._event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """See `Event`."""
        if not isinstance(earlier, TorchEvent):
            raise TypeError("events of one queue only")
        return float(earlier._event.elapsed_time(self._event)) / 1000  # noqa: SLF001 - of the same class


class TorchQueue:
    """A stream of its own on `device`. Torch's default stream would wait for others and make them wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> None:
        """See `Queue`."""
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> TorchEvent:
        """See `Queue`."""
        return TorchEvent(self._stream)

    def capture(self, work: Callable[[], None], memory: object) -> torch.cuda.CUDAGraph:
        """See `Queue`."""
        graph = torch.cuda.CUDAGraph()
        # Before a capture torch waits for the current device, which may be another one. Other threads may map or unmap
        # memory meanwhile, which must not end the capture.
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=memory, stream=self._stream, capture_error_mode="thread_local"),  # type: ignore[arg-type]  # a handle of torch's, opaque here
        ):
            work()
        return graph

    def new_graph_memory(self) -> object:
        """See `Queue`. A handle cannot be used again once the last graph with it is gone."""
        return torch.cuda.graph_pool_handle()

    def pin(self, num_words: int) -> torch.Tensor:
        """See `Queue`."""
        return torch.zeros(num_words, dtype=torch.int64, pin_memory=True)

    def synchronize(self) -> None:
        """See `Queue`."""
        torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        """See `Queue`."""
        torch.cuda.empty_cache()
