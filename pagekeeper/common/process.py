"""How every process ends: one line for a person on standard error, and an exit code for a supervisor."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import structlog

from pagekeeper.common.errors import ConfigurationError, PagekeeperError
from pagekeeper.common.logging import StandardError

EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2


def run_process(name: str, body: Callable[[], int]) -> NoReturn:
    """Run `body` and end the process with its exit code: 1 on failure, 2 where the configuration must change.

    The process ends without the interpreter's own tear-down, which would wait for threads that a failure may have
    left behind.
    """
    try:
        code = body()
    except ConfigurationError as error:
        print(f"{name}: {error}", file=StandardError(), flush=True)
        code = EXIT_CONFIGURATION
    except PagekeeperError as error:
        print(f"{name}: {error}", file=StandardError(), flush=True)
        code = EXIT_FAILURE
    except Exception:  # noqa: BLE001 - the last place to see it; the log keeps the traceback
        structlog.get_logger().exception("process failed", process=name)
        code = EXIT_FAILURE
    with contextlib.suppress(OSError):  # whoever reads may be gone
        sys.stdout.flush()
    os._exit(code)
