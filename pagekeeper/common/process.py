"""How every process ends: one line for a person on standard error, and an exit code for a supervisor."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import structlog

from pagekeeper.common.errors import ConfigurationError, PagekeeperError
from pagekeeper.common.logging import StandardError

EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2

_LAST_CALLS_S = 1.0

_T = TypeVar("_T")


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


def run_in_event_loop(body: Coroutine[Any, Any, _T]) -> _T:
    """`asyncio.run`, which after an orderly end lets the tasks of calls end that a stopped gRPC server has cancelled.

    The server does not wait for them. If the end of the event loop cancels them again, each writes a traceback.
    """

    async def run_to_the_last_call() -> _T:
        result = await body
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            _, late = await asyncio.wait(rest, timeout=_LAST_CALLS_S)
            if late:
                structlog.get_logger().warning("tasks did not end", tasks=[task.get_name() for task in late])
        return result

    return asyncio.run(run_to_the_last_call())
