"""The names of all settings of all processes, and of the variables beside them: to tell a misspelt one.

One file and one environment serve every process, and none of them may import the others to learn their settings.
"""

import difflib
import os
from collections.abc import Iterable

PREFIX = "PAGEKEEPER_"

SETTINGS = frozenset(
    {
        "admin_listen",
        "block_size",
        "device",
        "gpu",
        "grace_s",
        "hang_limit_s",
        "kernels",
        "kv_dtype",
        "listen",
        "log_level",
        "manager_wait_s",
        "max_batch_tokens",
        "max_beam_width",
        "max_concurrent",
        "max_context_length",
        "max_logprob_values",
        "max_logprobs",
        "max_n",
        "max_queue",
        "max_request_s",
        "max_sequences",
        "model",
        "model_name",
        "name",
        "pool_memory",
        "pool_size",
        "preallocate",
        "replace",
        "role",
        "runner_wait_s",
        "runtime_dir",
        "settle_s",
        "slow_reader_s",
        "slow_reader_tokens",
        "standby",
        "start_limit_s",
        "threads",
        "watermark",
    }
)
# Read from the environment alone.
_VARIABLES = frozenset({"config_file", "failpoints", "home"})


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, as the end of an error message; empty if none is like it."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_variables() -> dict[str, str]:
    """Variables of the environment with our prefix that nothing reads, each with the end of its message."""
    known = {PREFIX + name.upper() for name in SETTINGS | _VARIABLES}
    ours = {name for name in os.environ if name.upper().startswith(PREFIX)}
    return {name: nearest(name.upper(), known) for name in sorted(ours) if name.upper() not in known}
