"""cache.proto on the one side, plain data on the other. Both ends of the stream translate here and nowhere else."""

from collections.abc import Iterable

from cache_manager.memory.interface import CudaIpcHandle, CudaVmmHandle, MemfdHandle, MemoryHandle
from cache_manager.prefix_cache import Fingerprint
from kernels.kv_layout import KvLayout
from pagekeeper.common.errors import ConfigurationError, FieldViolation, InvalidRequestError
from pagekeeper.common.ids import BlockId, SequenceId
from pagekeeper.common.operations import (
    BlockCopy,
    BlockRef,
    Extend,
    Extended,
    Fork,
    Forked,
    Open,
    Opened,
    Operation,
    Refused,
    Release,
    Released,
    Result,
    Seal,
    Sealed,
    Shortage,
    StepMessage,
)
from pagekeeper.v1 import cache_pb2 as pb


def hello_to_proto(token: bytes, runner_id: str, layout: KvLayout, fingerprint: Fingerprint) -> pb.AttachRequest:
    """The first message of a stream."""
    return pb.AttachRequest(
        hello=pb.AttachHello(
            session_token=token,
            runner_id=runner_id,
            layout=pb.KvLayout(
                num_layers=layout.num_layers,
                num_kv_heads=layout.num_kv_heads,
                block_size=layout.block_size,
                head_dim=layout.head_dim,
                dtype=layout.dtype,
            ),
            fingerprint=pb.Fingerprint(
                model_config=fingerprint.model_config,
                weights=fingerprint.weights,
                compute_dtype=fingerprint.compute_dtype,
            ),
        )
    )


def hello_from_proto(request: pb.AttachRequest) -> pb.AttachHello:
    """The hello of a stream's first message.

    Raises:
        InvalidRequestError: it is something else.
    """
    if request.WhichOneof("message") != "hello":
        raise _invalid("message", "the first message of a stream is hello")
    return request.hello


def layout_from_proto(layout: pb.KvLayout) -> KvLayout:
    """The layout a runner asks for.

    Raises:
        InvalidRequestError: it is none; the message names the field.
    """
    try:
        return KvLayout(layout.num_layers, layout.num_kv_heads, layout.block_size, layout.head_dim, layout.dtype)
    except ValueError as error:
        raise _invalid("hello.layout", str(error)) from error


def fingerprint_from_proto(fingerprint: pb.Fingerprint) -> Fingerprint:
    """What the runner's blocks depend on besides their tokens."""
    return Fingerprint(fingerprint.model_config, fingerprint.weights, fingerprint.compute_dtype)


def memory_to_proto(handle: MemoryHandle) -> pb.MemoryHandle:
    """How a runner maps the pool, as it travels."""
    match handle:
        case MemfdHandle():
            return pb.MemoryHandle(memfd=pb.MemfdHandle(size=handle.size))
        case CudaIpcHandle():
            return pb.MemoryHandle(
                cuda_ipc=pb.CudaIpcHandle(
                    handle=handle.handle,
                    offset=handle.offset,
                    size=handle.size,
                    device_uuid=handle.device_uuid,
                    pattern=handle.pattern,
                )
            )
        case CudaVmmHandle():
            return pb.MemoryHandle(
                cuda_vmm=pb.CudaVmmHandle(
                    chunk_sizes=handle.chunk_sizes, device_uuid=handle.device_uuid, pattern=handle.pattern
                )
            )


def memory_from_proto(handle: pb.MemoryHandle) -> MemoryHandle:
    """How to map the pool.

    Raises:
        ConfigurationError: the manager's memory is of a kind that this version does not know.
    """
    match handle.WhichOneof("backend"):
        case "memfd":
            return MemfdHandle(handle.memfd.size)
        case "cuda_ipc":
            ipc = handle.cuda_ipc
            return CudaIpcHandle(ipc.handle, ipc.offset, ipc.size, ipc.device_uuid, ipc.pattern)
        case "cuda_vmm":
            vmm = handle.cuda_vmm
            return CudaVmmHandle(tuple(vmm.chunk_sizes), vmm.device_uuid, vmm.pattern)
        case None:
            raise ConfigurationError("the cache manager's memory is of an unknown kind; run the same version of both")


def message_to_proto(message: StepMessage) -> pb.AttachRequest:
    """A message of a session, as the runner sends it."""
    return pb.AttachRequest(
        operations=pb.StepOperations(
            number=message.number,
            step=message.step,
            completed_step=message.completed_step,
            operations=[_operation_to_proto(operation) for operation in message.operations],
        )
    )


def message_from_proto(request: pb.AttachRequest) -> StepMessage:
    """A message of a session, as the manager receives it.

    Raises:
        InvalidRequestError: it holds no operations, or one that is empty.
    """
    if request.WhichOneof("message") != "operations":
        raise _invalid("message", "after hello a stream carries operations")
    sent = request.operations
    operations = [_operation_from_proto(index, operation) for index, operation in enumerate(sent.operations)]
    return StepMessage(sent.number, sent.step, sent.completed_step, operations)


def results_to_proto(number: int, results: list[Result]) -> pb.AttachResponse:
    """The answer to message `number`."""
    return pb.AttachResponse(
        results=pb.StepResults(number=number, results=[_result_to_proto(result) for result in results])
    )


def results_from_proto(results: pb.StepResults) -> list[Result]:
    """The answer to a message.

    Raises:
        InvalidRequestError: one of the results is empty.
    """
    return [_result_from_proto(index, result) for index, result in enumerate(results.results)]


def _invalid(path: str, description: str) -> InvalidRequestError:
    return InvalidRequestError(FieldViolation(path, description))


def _operation_to_proto(operation: Operation) -> pb.Operation:
    match operation:
        case Open():
            return pb.Operation(
                open=pb.OpenOperation(
                    sequence=operation.sequence,
                    tenant=operation.tenant,
                    token_ids=operation.token_ids,
                    max_cached_tokens=operation.max_cached_tokens,
                    max_new_tokens=operation.max_new_tokens,
                    reopen=operation.reopen,
                )
            )
        case Extend():
            return pb.Operation(extend=pb.ExtendOperation(sequence=operation.sequence, num_tokens=operation.num_tokens))
        case Seal():
            return pb.Operation(
                seal=pb.SealOperation(
                    sequence=operation.sequence,
                    token_ids=operation.token_ids,
                    blocks=_refs_to_proto(operation.blocks),
                )
            )
        case Fork():
            return pb.Operation(
                fork=pb.ForkOperation(
                    parent=operation.parent, num_tokens=operation.num_tokens, children=operation.children
                )
            )
        case Release():
            return pb.Operation(
                release=pb.ReleaseOperation(sequence=operation.sequence, tail_token_ids=operation.tail_token_ids)
            )


def _operation_from_proto(index: int, operation: pb.Operation) -> Operation:
    match operation.WhichOneof("operation"):
        case "open":
            opened = operation.open
            return Open(
                SequenceId(opened.sequence),
                opened.tenant,
                list(opened.token_ids),
                opened.max_cached_tokens,
                opened.max_new_tokens,
                opened.reopen,
            )
        case "extend":
            return Extend(SequenceId(operation.extend.sequence), operation.extend.num_tokens)
        case "seal":
            seal = operation.seal
            return Seal(SequenceId(seal.sequence), list(seal.token_ids), _refs_from_proto(seal.blocks))
        case "fork":
            fork = operation.fork
            return Fork(SequenceId(fork.parent), fork.num_tokens, [SequenceId(child) for child in fork.children])
        case "release":
            return Release(SequenceId(operation.release.sequence), list(operation.release.tail_token_ids))
        case None:
            raise _invalid(f"operations.operations[{index}]", "an operation is empty")


def _result_to_proto(result: Result) -> pb.OperationResult:
    match result:
        case Opened():
            return pb.OperationResult(
                open=pb.OpenResult(
                    num_cached_tokens=result.num_cached_tokens,
                    blocks=_refs_to_proto(result.blocks),
                    copies=_copies_to_proto(result.copies),
                )
            )
        case Extended():
            return pb.OperationResult(
                extend=pb.ExtendResult(
                    kept_blocks=result.kept_blocks,
                    blocks=_refs_to_proto(result.blocks),
                    copies=_copies_to_proto(result.copies),
                )
            )
        case Sealed():
            return pb.OperationResult(seal=pb.SealResult(blocks=_refs_to_proto(result.blocks)))
        case Forked():
            return pb.OperationResult(fork=pb.ForkResult())
        case Released():
            return pb.OperationResult(release=pb.ReleaseResult())
        case Shortage():
            return pb.OperationResult(
                shortage=pb.Shortage(
                    needed_blocks=result.needed_blocks,
                    free_blocks=result.free_blocks,
                    releasing_blocks=result.releasing_blocks,
                )
            )
        case Refused():
            return pb.OperationResult(refused=pb.Refused(reason=result.reason))


def _result_from_proto(index: int, result: pb.OperationResult) -> Result:
    match result.WhichOneof("result"):
        case "open":
            opened = result.open
            return Opened(opened.num_cached_tokens, _refs_from_proto(opened.blocks), _copies_from_proto(opened.copies))
        case "extend":
            extend = result.extend
            return Extended(extend.kept_blocks, _refs_from_proto(extend.blocks), _copies_from_proto(extend.copies))
        case "seal":
            return Sealed(_refs_from_proto(result.seal.blocks))
        case "fork":
            return Forked()
        case "release":
            return Released()
        case "shortage":
            short = result.shortage
            return Shortage(short.needed_blocks, short.free_blocks, short.releasing_blocks)
        case "refused":
            return Refused(result.refused.reason)
        case None:
            raise _invalid(f"results.results[{index}]", "a result is empty")


def _refs_to_proto(refs: list[BlockRef]) -> list[pb.BlockRef]:
    return [pb.BlockRef(id=ref.id, generation=ref.generation) for ref in refs]


def _refs_from_proto(refs: Iterable[pb.BlockRef]) -> list[BlockRef]:
    return [BlockRef(BlockId(ref.id), ref.generation) for ref in refs]


def _copies_to_proto(copies: list[BlockCopy]) -> list[pb.BlockCopy]:
    return [
        pb.BlockCopy(
            index=copy.index,
            source=pb.BlockRef(id=copy.source.id, generation=copy.source.generation),
            destination=pb.BlockRef(id=copy.destination.id, generation=copy.destination.generation),
            num_tokens=copy.num_tokens,
        )
        for copy in copies
    ]


def _copies_from_proto(copies: Iterable[pb.BlockCopy]) -> list[BlockCopy]:
    return [
        BlockCopy(
            copy.index,
            BlockRef(BlockId(copy.source.id), copy.source.generation),
            BlockRef(BlockId(copy.destination.id), copy.destination.generation),
            copy.num_tokens,
        )
        for copy in copies
    ]
