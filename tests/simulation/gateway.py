"""A gateway's process: the real router, admission and live requests between simulated streams.

A mirror of `gateway.service.GenerateService` towards clients; towards runners, of `gateway.runner_stream` around the
real link.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.admission import Admission
from gateway.finish_reason import FinishReason
from gateway.fleet import Link
from gateway.generation import CacheUse, Generation
from gateway.intake import Intake
from gateway.live_requests import LiveRequest, LiveRequests
from gateway.router import Router
from gateway.token_stream import Tokens
from pagekeeper.common.errors import PagekeeperError
from tests.simulation.network import End, Network
from tests.simulation.process import Process
from tests.simulation.requests import Call, Delta, Message
from tests.simulation.runner_stream import RunnerStream
from tests.simulation.world import Violation

_RECONNECT_S = 0.1
_SWEEP_INTERVAL_S = 1.0


@dataclass(frozen=True)
class GatewaySettings:
    """What a gateway is started with.

    Attributes:
        runners: their names.
        runner_wait_s: longest time that a request waits for a runner, in seconds.
        max_concurrent: sequences that are with runners at once.
        slow_reader_s: longest time that a client may leave `slow_reader_tokens` unread.
    """

    runners: tuple[str, ...]
    runner_wait_s: float
    max_concurrent: int
    slow_reader_tokens: int
    slow_reader_s: float


class _CheckedRouter(Router):
    """The router; that of an attempt which is over nothing may come is seen to."""

    def __init__(self, gateway: str, wait_s: float, clock: Callable[[], float]) -> None:
        super().__init__(wait_s, clock)
        self._gateway = gateway

    def take_tokens(
        self, link: Link, number: int, attempt: int, position: int, tokens: Tokens, use: CacheUse | None = None
    ) -> None:
        before = self._known_to_others(number, attempt)
        super().take_tokens(link, number, attempt, position, tokens, use)
        if before is not None and before != self._known_to_others(number, attempt):
            raise Violation(f"{self._gateway} takes {tokens} of attempt {attempt}, which is over")

    def _known_to_others(self, number: int, attempt: int) -> list[list[int]] | None:
        """Every token of the answer, if this attempt is over."""
        place = self._places.get(number)
        if place is None or (place.runner is not None and place.generation.attempt == attempt):
            return None
        return [token_ids.copy() for token_ids in place.generation.token_ids.values()]


class Gateway(Process):
    """One life of a gateway."""

    def __init__(self, network: Network, name: str, settings: GatewaySettings) -> None:
        super().__init__(network.world, name)
        self.router = _CheckedRouter(name, settings.runner_wait_s, lambda: network.world.now)
        self.admission = Admission(settings.max_concurrent, max_queue=1000)
        self.live = LiveRequests()
        self.intake = Intake(self.live, self.admission, self.router)
        self.num_losses = 0
        """Of runners that did not drain."""
        self._network = network
        self._settings = settings
        self._handlers: list[_Handler] = []

    def start(self) -> None:
        """Listen, look for runners, and for readers that do not read."""
        self._network.servers[self.name] = self
        for name in self._settings.runners:
            self.run(self._keep_link, name)
        self.run(self._sweep)

    @property
    def holds(self) -> str:
        """What is left of requests, if anything."""
        parts = {
            "live requests": len(self.live),
            "permits": self.admission.running,
            "queued": self.admission.waiting,
            "generations": len(self.router._places),
        }
        return ", ".join(f"{count} {what}" for what, count in parts.items() if count)

    def accept(self, what: str, end: End) -> None:
        """A client connects; its first message is the call."""
        handler = _Handler(self, end)
        end.on_message = lambda call: self.run_handler(handler, call)
        end.on_end = handler.close

    def run_handler(self, handler: "_Handler", call: Call) -> None:
        """Begin to answer."""
        self._handlers.append(handler)
        handler.begin(call)
        self.pump()

    def ended(self, handler: "_Handler") -> None:
        """Nothing more is to be sent to this client."""
        if handler in self._handlers:
            self._handlers.remove(handler)

    def pump(self) -> None:
        """Let every handler go on whose stream has something for it."""
        for handler in list(self._handlers):
            handler.pump()

    def _keep_link(self, name: str) -> None:
        def lost(was_loss: bool) -> None:
            self.num_losses += was_loss
            self.after(_RECONNECT_S, self._keep_link, name)

        RunnerStream(self._network, self, self.router, name, self.pump, lost)

    def _sweep(self) -> None:
        self.router.tick()
        self.live.end_slow_readers(self._settings.slow_reader_tokens, self._settings.slow_reader_s)
        self.pump()
        self.after(_SWEEP_INTERVAL_S, self._sweep)


class _Handler:
    """One call of a client: `GenerateService.Generate`."""

    def __init__(self, gateway: Gateway, end: End) -> None:
        self._gateway = gateway
        self._end = end
        self._live: LiveRequest | None = None
        self._positions: dict[int, int] = {}
        self._open: set[int] = set()
        self._read_s = 0.0
        self._stop_word = 0
        self._is_waiting = False
        """For the client to read what it was sent."""

    def begin(self, call: Call) -> None:
        """Resolve, enter, take a permit."""
        gateway, request, resumed = self._gateway, call.request, call.resumed or {}
        self._read_s, self._stop_word = request.read_s, request.stop_word
        generation = Generation(request.resolved(is_resumed=call.resumed is not None), resumed)
        generation.stream._clock = lambda: gateway.world.now
        self._open = set(range(request.num_candidates))
        self._positions = {index: len(resumed.get(index, ())) for index in self._open}
        for index, token_ids in resumed.items():
            if len(token_ids) >= request.max_tokens:
                generation.end_resumed(index, FinishReason.LENGTH)
        self._live = live = LiveRequest(generation)
        try:
            gateway.intake.enter(live, takes_over=call.resumed is not None)
        except PagekeeperError as error:
            self._fail(error)

    def close(self) -> None:
        """The client has left, or has all."""
        if self._live is not None:
            self._live.release.close()
        self._gateway.ended(self)
        self._gateway.pump()

    def pump(self) -> None:
        """Send what waits, if the client is ready for it."""
        if self._live is None or self._is_waiting or not self._live.generation.stream._changed.is_set():
            return
        try:
            news = self._live.generation.stream.take()
        except PagekeeperError as error:
            self._fail(error)
            return
        deltas = [self._delta(tokens) for tokens in news.tokens]
        if not self._open:
            self._live.release.close()
            self._end.send(Message(deltas, is_last=True))
            self._gateway.ended(self)
            self._end.close()
            self._gateway.pump()
        elif deltas:
            self._end.send(Message(deltas))
            if self._read_s:
                self._is_waiting = True
                self._gateway.after(self._read_s, self._has_read)

    def _delta(self, tokens: Tokens) -> Delta:
        index, token_ids, reason = tokens.candidate, tokens.token_ids, tokens.finish_reason
        if self._stop_word in token_ids:
            token_ids, reason = token_ids[: token_ids.index(self._stop_word)], FinishReason.STOP
        delta = Delta(index, self._positions[index], token_ids, reason)
        self._positions[index] += len(token_ids)
        if reason is not None:
            self._open.discard(index)
        if reason is not tokens.finish_reason and self._live is not None:
            self._gateway.router.cancel_candidate(self._live.generation, index)
        return delta

    def _has_read(self) -> None:
        self._is_waiting = False
        self.pump()

    def _fail(self, error: PagekeeperError) -> None:
        if self._live is not None:
            self._live.release.close()
        self._end.send(Message(error=f"{type(error).__name__}: {error}"))
        self._gateway.ended(self)
        self._end.close()
