"""`python -m cache_manager`: exit code 0 when told to stop, 2 for a wrong configuration, 1 for a fault of ours."""

import asyncio
import sys

import structlog

from cache_manager.config import ManagerSettings
from cache_manager.server import serve
from pagekeeper.common.errors import ConfigurationError
from pagekeeper.common.logging import configure_logging
from pagekeeper.common.settings import load_settings


def main() -> int:
    """Run the process; returns its exit code."""
    try:
        settings = load_settings(ManagerSettings)
        configure_logging("cache-manager", settings.log_level)
        asyncio.run(serve(settings))
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Exception:  # noqa: BLE001 (the last resort of the process: logged, and the exit code says so)
        structlog.get_logger().exception("unexpected error")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
