"""A reader of one stream of a primary: whole records, beats and snapshots from its messages."""

from __future__ import annotations

from ps_core.errors import InvalidConfig
from ps_server.replication.messages import Beat, LogRecord, RangeCopy
from ps_server.values.mutations import Elements
from ps_server.wire.replication_wire import (
    SMALL_BYTES,
    Request,
    beat_from_proto,
    log_record_from_proto,
    request_from,
)
from ps_server.wire.snapshot_wire import SnapshotReader
from pushpull.v1 import replication_pb2

Came = replication_pb2.ReplicateHeader | LogRecord | Beat | RangeCopy
"""Messages of a primary; the first says who it is, and whom it means."""


class ReplicationReader:
    """The messages of one stream, in their order.

    Args:
        small_bytes: a message up to it is parsed whole.
        is_open: whether the header was read elsewhere.
    """

    __slots__ = ("_blocks", "_is_open", "_small_bytes", "_snapshot")

    def __init__(self, small_bytes: int = SMALL_BYTES, *, is_open: bool = False) -> None:
        self._small_bytes = small_bytes
        self._is_open = is_open
        self._blocks: list[Elements] = []
        self._snapshot: SnapshotReader | None = None

    def read(self, raw: bytes | memoryview) -> Came | None:
        """Take the next message; None while its batch or snapshot is not whole. Payloads are views
        of the messages that they came in, and keep them alive.
        """
        request = request_from(raw, self._small_bytes)
        if self._is_open == (request.kind == "header"):
            raise InvalidConfig(
                f"a stream between servers has {request.kind}; expected the header in its first "
                "message and only there"
            )
        match request.kind:
            case "header":
                self._is_open = True
                header: replication_pb2.ReplicateHeader = request.message
                return header
            case "batch":
                return self._record(request)
            case "beat":
                return beat_from_proto(request.message)
            case "snapshot":
                self._snapshot = SnapshotReader(request.message)
                return None
        return self._go_on(request)

    def _record(self, request: Request) -> LogRecord | None:
        message: replication_pb2.ReplicatedBatch = request.message
        if message.more_follow:
            self._blocks += request.blocks
            return None
        if not message.HasField("head"):
            raise InvalidConfig("a record has no head; expected one in its last message")
        blocks = request.blocks
        if self._blocks:
            blocks = (*self._blocks, *blocks)
            self._blocks.clear()
        return log_record_from_proto(message.head, blocks)

    def _go_on(self, request: Request) -> RangeCopy | None:
        if self._snapshot is None:
            raise InvalidConfig(f"{request.kind} comes without a snapshot that it is of")
        copy = self._snapshot.read(*request)
        if copy is not None:
            self._snapshot = None
        return copy
