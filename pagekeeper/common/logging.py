"""Structured logs on standard error: for people on a terminal, JSON lines otherwise."""

import contextlib
import io
import logging
import os
import sys
from typing import TextIO, cast

import structlog

from pagekeeper.common.names import unknown_variables


class StandardError(io.TextIOBase):
    """Standard error, for logs: a terminal or a pipe that is gone takes no line any more, and ends nobody's work."""

    def write(self, text: str) -> int:
        """Write, if that is possible."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_logging(process: str, level: str = "info") -> None:
    """Set up structlog and the standard library's logging, once, at the start of a process.

    The first lines warn of variables that look like ours and are not.

    Args:
        process: bound to every line as `process`.
        level: "debug", "info", "warning" or "error".
    """
    # gRPC's core writes lines of its own form past every handler; what matters of them reaches us as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format="%(message)s")
    pretty = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.StackInfoRenderer(),
            *([] if pretty else [structlog.processors.format_exc_info]),
            structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", StandardError())),  # it writes and flushes, no more
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    for variable, hint in unknown_variables().items():
        structlog.get_logger().warning(f"{variable} is no setting{hint}", variable=variable)
