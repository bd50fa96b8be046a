"""Streams between processes: reliable and in order as long as they live, and when they break, they lose their end."""

from collections.abc import Callable
from typing import Any

from tests.simulation.process import Process
from tests.simulation.world import World


class End:
    """One end of a stream. Its owner sets the two handlers before anything can arrive."""

    def __init__(self, stream: "Stream", process: Process) -> None:
        self.process = process
        self.is_open = True
        self.on_message: Callable[[Any], object] = _ignore
        self.on_end: Callable[[], object] = _ignore
        self.peer: End
        self._stream = stream
        self._num_sent = 0
        self._num_arrived = 0
        self._last_arrival = 0.0
        self._first_lost: int | None = None

    def send(self, message: Any) -> None:
        """Send, if the stream still lives."""
        if self.is_open:
            self.process.effect(self._put, message)

    def close(self) -> None:
        """End the stream in good order: what was sent still arrives, nothing more is heard."""
        if self.is_open:
            self.is_open = False
            self.process.effect(self._stream.end, self)

    def _put(self, message: Any) -> None:
        peer, network = self.peer, self._stream.network
        if self._stream.is_broken:
            return
        self._num_sent += 1
        arrival = max(peer._last_arrival, network.world.now + network.delay())
        peer._last_arrival = arrival
        network.world.at(arrival, peer._arrive, self._num_sent, message)

    def _arrive(self, number: int, message: Any) -> None:
        self._num_arrived = number
        if self._first_lost is None or number < self._first_lost:
            self.process.run(self._take, message)

    def _take(self, message: Any) -> None:
        if self.is_open:
            self.on_message(message)

    def lose_from(self, number: int) -> None:
        """The messages to here from this one on are lost; behind the others comes the end of the stream."""
        self._first_lost = number
        world = self._stream.network.world
        world.at(max(self._last_arrival, world.now + self._stream.network.delay()), self.process.run, self._end)

    def _end(self) -> None:
        if self.is_open:
            self.is_open = False
            self.on_end()


class Stream:
    """Two ends."""

    def __init__(self, network: "Network", client: Process, server: Process) -> None:
        self.network = network
        self.client = End(self, client)
        self.server = End(self, server)
        self.client.peer, self.server.peer = self.server, self.client
        self.is_broken = False

    def end(self, closed_by: End) -> None:
        """One side has ended it."""
        if not self.is_broken:
            self.is_broken = True
            closed_by.peer.lose_from(closed_by._num_sent + 1)
            self.network.forget(self)

    def lose(self) -> None:
        """The stream breaks: of what is under way, each side gets as much as chance will have it, then the end."""
        if self.is_broken:
            return
        self.is_broken = True
        for end in (self.client, self.server):
            if end.process.is_alive:
                end.lose_from(self.network.world.random.randint(end._num_arrived, end.peer._num_sent) + 1)
        self.network.forget(self)


class Network:
    """Connects processes by their names.

    Args:
        world: the world.
        usual_s: how long a message takes, in seconds.
        slow_s: how long one may take at most that is held up.
        slow_share: how many are.
    """

    def __init__(self, world: World, usual_s: float, slow_s: float, slow_share: float) -> None:
        self.world = world
        self._usual_s, self._slow_s, self._slow_share = usual_s, slow_s, slow_share
        self.servers: dict[str, Any] = {}
        """Who listens, by name."""
        self.streams: dict[Stream, str] = {}
        """Those that live, and what they carry, in the order in which they were made."""

    def delay(self) -> float:
        """Of one message, in seconds."""
        chance = self.world.random.random()
        if chance < self._slow_share:
            return self._slow_s * chance / self._slow_share
        return self._usual_s * (0.5 + chance)

    def calm(self) -> None:
        """No message is held up from now on."""
        self._slow_share = 0.0

    def connect(self, client: Process, server: str, what: str, set_up: Callable[[End], None]) -> None:
        """Have `client` connect; `set_up` is given its end, which ends at once if nobody listens."""
        client.effect(self._connect, client, server, what, set_up)

    def _connect(self, client: Process, name: str, what: str, set_up: Callable[[End], None]) -> None:
        server = self.servers.get(name)
        if server is None or not server.is_alive:
            stream = Stream(self, client, client)
            stream.is_broken = True
            set_up(stream.client)
            stream.client.lose_from(0)
            return
        stream = Stream(self, client, server)
        self.streams[stream] = what
        stream.server._last_arrival = self.world.now + self.delay()
        self.world.at(stream.server._last_arrival, server.run, server.accept, what, stream.server)
        set_up(stream.client)

    def forget(self, stream: Stream) -> None:
        """It is broken."""
        self.streams.pop(stream, None)

    def process_died(self, process: Process) -> None:
        """The kernel closes the streams of a process that has died."""
        for stream in [s for s in self.streams if process in (s.client.process, s.server.process)]:
            stream.lose()


def _ignore(*_: Any) -> None:
    pass
