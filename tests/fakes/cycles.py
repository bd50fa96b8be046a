"""How often tests that repeat themselves do so: TEST_CYCLES says it for all of them."""

import os


def num_cycles(usually: int) -> int:
    """So many, unless the environment wants others."""
    return int(os.environ.get("TEST_CYCLES", usually))
