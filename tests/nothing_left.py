"""What a server has when nobody asks it anything: no block in use, and every invariant whole."""

import time

from pagekeeper.cli.server import Server
from pagekeeper.client import AdminClient

_LIMIT_S = 20.0


def check_nothing_is_left(server: Server) -> None:
    """The pool's invariants hold, and soon every block is free again."""
    with AdminClient(server.admin) as admin:
        deadline = time.monotonic() + _LIMIT_S
        while (pool := admin.stats()["pool"])["free_blocks"] != pool["total_blocks"] - 1:
            assert time.monotonic() < deadline, f"blocks are still in use: {pool}"
            time.sleep(0.05)
        assert admin.audit() == []
