"""What operators ask and see: plain data on the one side, admin.proto on the other."""

from collections.abc import Iterable

from cache_manager.block import Block, BlockState
from cache_manager.events import BlocksRemoved, BlockStored, CacheCleared, CacheEvent
from cache_manager.sequences import Sequence
from cache_manager.stats import CacheStats, SessionDetails, SessionStats
from pagekeeper.common.errors import FieldViolation, InvalidRequestError
from pagekeeper.common.ids import Epoch, SequenceId
from pagekeeper.v1 import admin_pb2 as pb

_SHORTEST_INTERVAL_S, _LONGEST_INTERVAL_S = 0.1, 3600.0
_STATES = {
    pb.BLOCK_STATE_FREE: BlockState.FREE,
    pb.BLOCK_STATE_LEASED: BlockState.LEASED,
    pb.BLOCK_STATE_SEALED: BlockState.SEALED,
    pb.BLOCK_STATE_QUARANTINED: BlockState.QUARANTINED,
}
_STATE_NUMBERS = {state: number for number, state in _STATES.items()}


def interval_from_proto(request: pb.WatchStatsRequest) -> float:
    """Seconds between two messages.

    Raises:
        InvalidRequestError: too short, too long, or no number.
    """
    interval = request.interval_seconds if request.HasField("interval_seconds") else 1.0
    if not _SHORTEST_INTERVAL_S <= interval <= _LONGEST_INTERVAL_S:
        bounds = f"must be from {_SHORTEST_INTERVAL_S:g} to {_LONGEST_INTERVAL_S:g}"
        raise InvalidRequestError(FieldViolation("interval_seconds", bounds))
    return interval


def states_from_proto(request: pb.ListBlocksRequest) -> set[BlockState]:
    """The states to list.

    Raises:
        InvalidRequestError: one of them is none.
    """
    unknown = [number for number in request.states if number not in _STATES]
    if unknown:
        raise InvalidRequestError(FieldViolation("states", f"{unknown[0]} is no state of a block"))
    return {_STATES[number] for number in request.states} or set(BlockState)


def stats_to_proto(stats: CacheStats, backend: str, server: pb.ServerStats) -> pb.GetStatsResponse:
    """All numbers of one moment; `backend` and `server` are what the policy does not know."""
    pool, usage, counters = stats.pool, stats.usage, stats.counters
    return pb.GetStatsResponse(
        pool=pb.PoolStats(
            total_blocks=pool.total_blocks,
            free_blocks=pool.free_blocks,
            cached_blocks=pool.cached_blocks,
            leased_blocks=pool.leased_blocks,
            sealed_blocks=pool.sealed_blocks,
            quarantined_blocks=pool.quarantined_blocks,
            block_size=pool.block_size,
            block_bytes=pool.block_bytes,
            backend=backend,
        ),
        usage=pb.UsageStats(
            sequences=usage.sequences,
            logical_tokens=usage.logical_tokens,
            resident_tokens=usage.resident_tokens,
            utilization=usage.utilization,
            logical_blocks=usage.logical_blocks,
            physical_blocks=usage.physical_blocks,
            sharing_saved=usage.sharing_saved,
        ),
        prefix=pb.PrefixStats(
            lookups=counters.lookups,
            reopens=counters.reopens,
            queried_tokens=counters.queried_tokens,
            hit_tokens=counters.hit_tokens,
            evictions=counters.evictions,
        ),
        ops=pb.OperationStats(
            forks=counters.forks,
            copy_on_write=counters.copy_on_write,
            seals=counters.seals,
            folds=counters.folds,
            shortages=counters.shortages,
        ),
        sessions=[_session_to_proto(session) for session in stats.sessions],
        server=server,
    )


def sessions_to_proto(sessions: Iterable[SessionDetails]) -> pb.ListSessionsResponse:
    """Every session with what it has."""
    return pb.ListSessionsResponse(
        sessions=[
            pb.SessionInfo(
                session=_session_to_proto(each.session),
                sequences=each.sequences,
                waiting_opens=each.waiting_opens,
                held_blocks=each.held_blocks,
                number=each.number,
                step=each.step,
                completed_step=each.completed_step,
            )
            for each in sessions
        ]
    )


def sequences_to_proto(
    rows: Iterable[tuple[Epoch, SequenceId, Sequence]], *, with_block_tables: bool
) -> pb.ListSequencesResponse:
    """A slice of sequences."""
    return pb.ListSequencesResponse(
        sequences=[
            pb.SequenceInfo(
                epoch=epoch,
                sequence=name,
                tenant=sequence.tenant,
                num_tokens=sequence.length,
                num_blocks=len(sequence.blocks),
                num_sealed_blocks=sequence.num_sealed,
                block_table=[block.id for block in sequence.blocks] if with_block_tables else [],
            )
            for epoch, name, sequence in rows
        ]
    )


def blocks_to_proto(blocks: Iterable[Block]) -> pb.ListBlocksResponse:
    """A slice of blocks."""
    return pb.ListBlocksResponse(
        blocks=[
            pb.BlockInfo(
                id=block.id,
                generation=block.generation,
                state=_STATE_NUMBERS[block.state],
                references=block.references,
                holds=block.holds,
                depth=block.depth,
                block_hash=block.hash or b"",
            )
            for block in blocks
        ]
    )


def events_to_proto(start_id: str, last_number: int, events: Iterable[CacheEvent]) -> pb.WatchEventsResponse:
    """Some events in their order; `last_number` is that of the last one, here or before."""
    return pb.WatchEventsResponse(
        start_id=start_id, last_number=last_number, events=[_event_to_proto(event) for event in events]
    )


def _event_to_proto(event: CacheEvent) -> pb.CacheEvent:
    match event:
        case BlockStored():
            stored = pb.BlockStored(
                block_hash=event.block_hash,
                parent_hash=event.parent_hash or b"",
                token_ids=event.token_ids,
                block_size=len(event.token_ids),
                tenant=event.tenant,
            )
            return pb.CacheEvent(number=event.number, stored=stored)
        case BlocksRemoved():
            return pb.CacheEvent(number=event.number, removed=pb.BlocksRemoved(block_hashes=event.block_hashes))
        case CacheCleared():
            return pb.CacheEvent(number=event.number, cleared=pb.CacheCleared())


def _session_to_proto(session: SessionStats) -> pb.SessionStats:
    return pb.SessionStats(
        epoch=session.epoch,
        runner_id=session.runner_id,
        pid=session.pid,
        state=session.state,
        attached_at=session.attached_at,
    )
