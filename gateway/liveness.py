"""Whether a runner and its cache manager are alive, as its answers to pings tell."""

from pagekeeper.v1.runner_pb2 import EngineReport

PING_INTERVAL_S = 0.25
"""How often a runner is to be pinged, in seconds."""

# No Pong for 1.5 s. Pings are counted, not seconds, so that a gateway which itself was held up blames nobody.
_MAX_UNANSWERED_PINGS = 6
# The engine, idle or not, calls its manager at least every half a second. This tells of one that hangs; one that is
# dead breaks the session, of which the engine knows at once.
_MAX_MANAGER_SILENCE_S = 1.0


class Liveness:
    """Counts the pings that one runner owes an answer to."""

    def __init__(self) -> None:
        self.num_unanswered = 0

    @property
    def is_lost(self) -> bool:
        """Whether so many pings are unanswered that the runner counts as dead; to be asked when the next is due."""
        return self.num_unanswered >= _MAX_UNANSWERED_PINGS

    def ping(self) -> None:
        """A ping is sent."""
        self.num_unanswered += 1

    def pong(self) -> None:
        """An answer has come, to whichever ping."""
        self.num_unanswered = 0


def is_hung(engine: EngineReport) -> bool:
    """Whether the engine's step takes longer than a step of its size may."""
    return engine.state == EngineReport.STATE_IN_STEP and engine.seconds > engine.limit_seconds


def has_manager(engine: EngineReport) -> bool:
    """Whether the engine has a session with a cache manager, which answers, or is late by no more than may be."""
    waits = engine.state == EngineReport.STATE_WAITING_FOR_MANAGER
    return not engine.detached and not (waits and engine.seconds > _MAX_MANAGER_SILENCE_S)
