import pytest

from cache_manager import wire
from cache_manager.memory.interface import CudaIpcHandle, CudaVmmHandle, MemfdHandle, MemoryHandle
from pagekeeper.common.errors import ConfigurationError, InvalidRequestError
from pagekeeper.common.operations import (
    BlockCopy,
    BlockRef,
    Extend,
    Extended,
    Fork,
    Forked,
    Open,
    Opened,
    Refused,
    Release,
    Released,
    Seal,
    Sealed,
    Shortage,
    StepMessage,
)
from pagekeeper.v1 import cache_pb2 as pb
from tests.fakes.local_cache import FINGERPRINT, TINY_LAYOUT


def test_a_message_survives_the_wire() -> None:
    message = StepMessage(
        7,
        6,
        5,
        [
            Open(1, "tenant", [1, 2**32 - 1], 16, 512, reopen=True),
            Open(2**64 - 1, "", [], 0, 0),
            Extend(3, 2**32 - 1),
            Seal(4, [0, 1], [BlockRef(5, 6), BlockRef(2**32 - 1, 2**32 - 1)]),
            Fork(5, 6, [7, 8]),
            Release(9, [1, 2]),
            Release(10),
        ],
    )
    sent = pb.AttachRequest.FromString(wire.message_to_proto(message).SerializeToString())
    assert wire.message_from_proto(sent) == message


def test_results_survive_the_wire() -> None:
    copies = [BlockCopy(3, BlockRef(1, 2), BlockRef(3, 4), 5)]
    results = [
        Opened(16, [BlockRef(1, 1)], copies),
        Extended(2, [BlockRef(2, 3)], copies),
        Sealed([BlockRef(9, 9)]),
        Forked(),
        Released(),
        Shortage(3, 2, 1),
        Refused("why"),
    ]
    sent = pb.AttachResponse.FromString(wire.results_to_proto(4, results).SerializeToString())
    assert sent.results.number == 4
    assert wire.results_from_proto(sent.results) == results


def test_a_hello_survives_the_wire() -> None:
    sent = wire.hello_from_proto(wire.hello_to_proto(b"token", "runner", TINY_LAYOUT, FINGERPRINT))
    assert (sent.session_token, sent.runner_id) == (b"token", "runner")
    assert wire.layout_from_proto(sent.layout) == TINY_LAYOUT
    assert wire.fingerprint_from_proto(sent.fingerprint) == FINGERPRINT


@pytest.mark.parametrize("request_", [pb.AttachRequest(), pb.AttachRequest(hello=pb.AttachHello())])
def test_a_message_without_operations_is_invalid(request_: pb.AttachRequest) -> None:
    with pytest.raises(InvalidRequestError, match=r"^message: "):
        wire.message_from_proto(request_)


def test_a_first_message_other_than_hello_is_invalid() -> None:
    with pytest.raises(InvalidRequestError, match=r"^message: "):
        wire.hello_from_proto(pb.AttachRequest(operations=pb.StepOperations()))


def test_an_empty_operation_is_named_by_its_place() -> None:
    full = pb.Operation(extend=pb.ExtendOperation(sequence=1, num_tokens=1))
    request = pb.AttachRequest(operations=pb.StepOperations(operations=[full, pb.Operation()]))
    with pytest.raises(InvalidRequestError, match=r"operations\[1\]"):
        wire.message_from_proto(request)


def test_an_empty_result_is_invalid() -> None:
    with pytest.raises(InvalidRequestError, match=r"results\[0\]"):
        wire.results_from_proto(pb.StepResults(results=[pb.OperationResult()]))


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 7), ("num_layers", 0), ("dtype", "int4"), ("head_dim", 0), ("num_kv_heads", 0)]
)
def test_a_layout_that_cannot_be_is_named_by_its_field(field: str, value: object) -> None:
    layout = wire.hello_to_proto(b"", "", TINY_LAYOUT, FINGERPRINT).hello.layout
    setattr(layout, field, value)
    with pytest.raises(InvalidRequestError, match=f"hello.layout: {field}"):
        wire.layout_from_proto(layout)


@pytest.mark.parametrize(
    "handle",
    [
        MemfdHandle(2**63),
        CudaIpcHandle(bytes(range(64)), 4096, 2**40, "GPU-1234", b"\0mark\xff"),
        CudaVmmHandle((2**41, 2 << 20), "GPU-1234", b"\0mark\xff"),
    ],
)
def test_how_to_map_the_pool_survives_the_wire(handle: MemoryHandle) -> None:
    sent = wire.memory_to_proto(handle).SerializeToString()
    assert wire.memory_from_proto(pb.MemoryHandle.FromString(sent)) == handle


def test_memory_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="unknown kind"):
        wire.memory_from_proto(pb.MemoryHandle())
