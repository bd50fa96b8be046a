"""Ids of different things have different types."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in the pool. 0 is the null block, which is never granted."""

BlockHash = NewType("BlockHash", bytes)
"""SHA-256 of a block's content and of everything before it, 32 bytes."""

SequenceId = NewType("SequenceId", int)
"""Made by a runner, never used twice in one session."""

Epoch = NewType("Epoch", int)
"""One for each session, rising over the life of a cache manager."""
