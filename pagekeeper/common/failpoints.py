"""Places where a test has a process die, stop or wait: at the boundaries where dying is hardest.

PAGEKEEPER_FAILPOINTS="runner.before_seal=kill@7;manager.after_apply=stop" has a runner kill itself the seventh time
that it is about to send a message with a seal, and the manager stop itself (SIGSTOP) at its first answer. It counts in
a test build only, which is an editable install: a wheel or an image never dies of its environment.
"""

import json
import os
import signal
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution

from pagekeeper.common.errors import BugError, ConfigurationError

VARIABLE = "PAGEKEEPER_FAILPOINTS"

NAMES = (
    "runner.mid_attach",  # the session is granted, the pool not yet mapped
    "runner.mid_reattach",  # the stream broke, the manager lives, the new session is not opened yet
    "runner.before_seal",  # a step has ended, the message that seals its blocks is not sent
    "runner.after_seal",  # the seals are answered, the tokens behind them not emitted
    "runner.after_emit",  # the tokens are handed to the event loop
    "runner.mid_copy",  # a step with copy-on-write is launched
    "runner.mid_release",  # a message with a release is sent and not answered
    "manager.mid_attach",  # the session is begun, and not granted yet
    "manager.before_apply",  # a message has come
    "manager.after_apply",  # it is applied and not answered
    "manager.mid_release",  # a runner has died, its session is not ended yet
    "gateway.before_submit",  # a request has its permit and no runner
    "gateway.after_tokens",  # a runner's tokens have come, and are not passed on
    "gateway.after_emit",  # a message has been given to the client's stream
)


def failpoint(name: str) -> None:
    """Do here what the environment asks for, if it does."""
    if _ARMED is not None:
        _ARMED.reach(name)


class Failpoints:
    """What happens at which point.

    Args:
        text: `NAME=ACTION[@N]` joined by `;`: at the N-th pass, by default the first. ACTION is `kill` (SIGKILL),
            `stop` (SIGSTOP), `fail` (an exception) or `sleep:SECONDS`.

    Raises:
        ConfigurationError: that is not how it is written.
    """

    def __init__(self, text: str) -> None:
        self._actions: dict[str, tuple[str, int]] = {}
        self._passes: Counter[str] = Counter()
        for part in text.split(";"):
            name, _, rest = part.partition("=")
            action, _, number = rest.partition("@")
            if name not in NAMES or not _is_action(action) or not (number or "1").isdecimal():
                raise ConfigurationError(f"{VARIABLE}: {part!r} is not NAME=kill|stop|fail|sleep:SECONDS[@N]")
            self._actions[name] = action, int(number or 1)

    def reach(self, name: str) -> None:
        """Count a pass of this point, and act if it is the one."""
        action, number = self._actions.get(name, ("", 0))
        self._passes[name] += 1
        if self._passes[name] != number:
            return
        kind, _, seconds = action.partition(":")
        if kind == "sleep":
            time.sleep(float(seconds))
        elif kind == "fail":
            raise BugError(f"{VARIABLE}: {name}")
        else:
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def _is_action(action: str) -> bool:
    kind, _, seconds = action.partition(":")
    return action in ("kill", "stop", "fail") or (kind == "sleep" and seconds.replace(".", "", 1).isdecimal())


def _armed() -> Failpoints | None:
    text = os.environ.get(VARIABLE)
    return Failpoints(text) if text and _is_test_build() else None


def _is_test_build() -> bool:
    try:
        origin = json.loads(distribution("pagekeeper").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return False
    return bool(origin.get("dir_info", {}).get("editable"))


# Read once: a process is started with its failpoints, and in all others a failpoint costs one comparison.
_ARMED = _armed()
