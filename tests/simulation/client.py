"""A client that goes on, at any gateway, behind the tokens that it has; and checks every one of them."""

from collections.abc import Callable

from tests.simulation.answer import Answer
from tests.simulation.network import End, Network
from tests.simulation.process import Process
from tests.simulation.requests import Call, Message, Request
from tests.simulation.world import Violation

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0
_MANY_LOSSES = 5
"""Whoever has lost so many runners without a token is taken for the cause."""


class Client(Process):
    """One request, until it has its whole answer or gives up.

    Args:
        network: the network.
        request: what it asks for.
        gateways: which it may ask.
        on_end: is called once.
        rounds: what rounding decides may come out either way.
    """

    def __init__(
        self,
        network: Network,
        request: Request,
        gateways: tuple[str, ...],
        on_end: Callable[["Client"], None],
        *,
        rounds: bool,
    ) -> None:
        super().__init__(network.world, f"client {request.request_id}")
        self.request = request
        self.answers = {index: Answer(request, index, rounds=rounds) for index in range(request.num_candidates)}
        self.has_ended = False
        self.num_streams = 0
        self._network = network
        self._gateways = gateways
        self._on_end = on_end
        self._end: End | None = None
        self._backoff_s = _FIRST_BACKOFF_S

    @property
    def token_ids(self) -> dict[int, list[int]]:
        """What has come so far, by candidate."""
        return {index: answer.token_ids.copy() for index, answer in self.answers.items()}

    def start(self) -> None:
        """Ask, for the first time or again with what is there."""
        if self.has_ended:
            return
        self.num_streams += 1
        gateway = self.world.random.choice(self._gateways)
        self._network.connect(self, gateway, "generate", self._set_up)

    def leave(self) -> None:
        """Want nothing more."""
        if not self.has_ended:
            self._finish("leaves")

    def break_off(self) -> None:
        """Lose the connection, and come again."""
        if self._end is not None and self._end.is_open:
            self._end.close()
            self._try_again("breaks off")

    def _set_up(self, end: End) -> None:
        self._end = end
        stream = self.num_streams
        end.on_message = lambda message: self._take(message, stream)
        end.on_end = lambda: self._try_again("lost")
        resumed = None
        if stream > 1:
            resumed = {} if self.request.beam_width else self.token_ids
        end.send(Call(self.request, resumed))

    def _try_again(self, why: str) -> None:
        self.world.note(self.name, why, self.token_ids)
        if not self.has_ended:
            self.after(self._backoff_s * (0.5 + self.world.random.random()), self.start)
            self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)

    def _take(self, message: Message, stream: int) -> None:
        if message.error is not None:
            self._fail(message.error)
            return
        try:
            for delta in message.deltas:
                self._backoff_s = _FIRST_BACKOFF_S
                self.answers[delta.candidate].take(delta)
            if message.is_last:
                self._check_end()
                self._finish("has its answer")
        except Violation as violation:
            raise Violation(f"{self.name}, stream {stream}: {violation}") from None

    def _fail(self, error: str) -> None:
        if self._end is None:
            raise Violation(f"{self.name} hears {error!r} of nobody")
        if error.startswith(("UnavailableError", "DuplicateRequestError", "SlowReaderError")):
            self._end.close()
            self._try_again(error)
        elif "runners were lost in a row" in error and self._end.peer.process.num_losses >= _MANY_LOSSES:
            self._finish(error)
        else:
            raise Violation(f"{self.name}: {error}")

    def _check_end(self) -> None:
        missing = [index for index, answer in self.answers.items() if answer.finish_reason is None]
        if missing:
            raise Violation(f"the stream ends before candidates {missing} do")

    def _finish(self, how: str) -> None:
        self.world.note(self.name, how)
        self.has_ended = True
        if self._end is not None:
            self._end.close()
        self._on_end(self)
