"""Why an answer has ended; None everywhere means that it has not."""

import enum

from pagekeeper.v1 import types_pb2


class FinishReason(enum.Enum):
    """The values are those of the wire."""

    STOP = types_pb2.FINISH_REASON_STOP
    LENGTH = types_pb2.FINISH_REASON_LENGTH
