"""Whether the decodes of a step begin with blocks in common that are worth reading once for all of them."""

import numpy as np
import numpy.typing as npt

MIN_DECODES = 4
MIN_SHARED_TOKENS = 64
MIN_SAVED_TOKENS = 4096
"""Reads of a token's K and V in one layer that must be saved.

What is paid for them, a layer: one more launch, 2 to 3 us, in which a device that reads 4 TB/s reads 8 to 12 MB, and
for each decode a partial result that is written and read, 8 bytes for each element of a query, as much as 8 to 16
tokens with 4 to 8 query heads a KV head in 16 bits. 4,096 tokens are 16 MB where there are 8 KV heads of 128.
By arithmetic; to be measured on a device.
"""


def count_shared_blocks(
    block_tables: npt.NDArray[np.int64], context_ends: npt.NDArray[np.int64], block_size: int
) -> int:
    """How many leading blocks to read once for all decodes; 0 if it does not pay.

    Args:
        block_tables: [decodes, width].
        context_ends: [decodes]: tokens of each, the new one included. Its block is not shared, nor any after it.
        block_size: tokens a block.
    """
    num_decodes = len(context_ends)
    if num_decodes < MIN_DECODES:
        return 0
    most = int(context_ends.min() - 1) // block_size
    # Most batches share nothing, and one column shows it.
    if most * block_size < MIN_SHARED_TOKENS or (block_tables[:, 0] != block_tables[0, 0]).any():
        return 0
    differs = (block_tables[1:, :most] != block_tables[0, :most]).any(axis=0)
    shared = int(differs.argmax()) if differs.any() else most
    tokens = shared * block_size
    return shared if tokens >= MIN_SHARED_TOKENS and (num_decodes - 1) * tokens >= MIN_SAVED_TOKENS else 0
