"""What the kernel says of the processes of a server."""

import contextlib
from pathlib import Path


def children(parent: int) -> dict[str, int]:
    """Pids of the processes that `pagekeeper up` has now.

    Args:
        parent: pid of `up`.

    Returns:
        By the modules that they run: cache_manager, model_runner and gateway; the standby is model_runner_standby. One
        that is dead or only just starting is left out.

    Raises:
        OSError: there is no such parent.
    """
    found = {}
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if command[1:2] == ["-m"]:
                found[command[2] + ("_standby" if "--standby" in command else "")] = int(pid)
    return found


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP holds the process; one that cannot be looked at, since it has ended, is not."""
    try:
        # The name before it, in parentheses, may itself hold any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
