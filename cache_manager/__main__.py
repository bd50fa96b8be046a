"""`python -m cache_manager`: serve runners and operators until told to stop."""

from cache_manager.config import ManagerSettings
from cache_manager.server import serve
from pagekeeper.common.logging import configure_logging
from pagekeeper.common.process import run_in_event_loop, run_process
from pagekeeper.common.settings import load_settings


def main() -> int:
    """Serve; returns the exit code."""
    settings = load_settings(ManagerSettings)
    configure_logging("cache-manager", settings.log_level)
    run_in_event_loop(serve(settings))
    return 0


if __name__ == "__main__":
    run_process("cache-manager", main)
