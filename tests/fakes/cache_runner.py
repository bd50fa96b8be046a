"""A runner of nothing but blocks, to be killed: `python -m tests.fakes.cache_runner RUNTIME_DIR BASE BLOCKS SEALED`.

Opens one sequence of BLOCKS full blocks, fills each with its own number plus one, seals the first SEALED of them, says
"ready" and waits.
"""

import sys
import time
from pathlib import Path

from cache_manager.client import CacheClient
from pagekeeper.common.ids import SequenceId
from pagekeeper.common.operations import Opened, Seal
from pagekeeper.common.sockets import RuntimeDir
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT, pool_bytes
from tests.fakes.policy_session import opening, tokens


def main(runtime_dir: str, base: int, num_blocks: int, num_sealed: int) -> None:
    cache = CacheClient.connect(RuntimeDir(Path(runtime_dir)), "to-be-killed", TINY_LAYOUT, FINGERPRINT, 20.0)
    token_ids = tokens(num_blocks, base)
    cache.send(1, 0, [opening(1, token_ids)])
    (opened,) = cache.receive(20.0)
    assert isinstance(opened, Opened)
    for index, block in enumerate(opened.blocks):
        start = block.id * TINY_LAYOUT.block_bytes
        pool_bytes(cache)[start : start + TINY_LAYOUT.block_bytes] = bytes([index + 1]) * TINY_LAYOUT.block_bytes
    if num_sealed:
        sealed = token_ids[: num_sealed * TINY_LAYOUT.block_size]
        cache.send(2, 1, [Seal(SequenceId(1), sealed, opened.blocks[:num_sealed])])
        cache.receive(20.0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))
