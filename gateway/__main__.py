"""`python -m gateway`: serve clients until told to stop."""

import asyncio
import os
import signal

# gRPC's own log would add to the one line that says what is wrong; whoever wants it sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from gateway.config import GatewaySettings
from gateway.server import Gateway
from pagekeeper.common.logging import configure_logging
from pagekeeper.common.process import run_in_event_loop, run_process
from pagekeeper.common.settings import load_settings


async def serve(settings: GatewaySettings) -> None:
    """Run until SIGTERM or SIGINT, then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Gateway(settings).serve(stop)


def main() -> int:
    """Serve; returns the exit code."""
    settings = load_settings(GatewaySettings)
    configure_logging("gateway", settings.log_level)
    run_in_event_loop(serve(settings))
    return 0


if __name__ == "__main__":
    run_process("gateway", main)
