"""`python -m model_runner`: load the model, attach to the cache manager, serve gateways until told to stop."""

from model_runner.config import RunnerSettings
from model_runner.server import serve
from pagekeeper.common.logging import configure_logging
from pagekeeper.common.process import run_in_event_loop, run_process
from pagekeeper.common.settings import load_settings


def main() -> int:
    """Serve; returns the exit code."""
    settings = load_settings(RunnerSettings)
    configure_logging("runner", settings.log_level)
    return run_in_event_loop(serve(settings))


if __name__ == "__main__":
    run_process("runner", main)
