from pushpull.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_APPLIED: _ClassVar[Outcome]
    OUTCOME_INVALID: _ClassVar[Outcome]
    OUTCOME_REPLACED: _ClassVar[Outcome]
    OUTCOME_WITHDRAWN: _ClassVar[Outcome]
    OUTCOME_SKIPPED: _ClassVar[Outcome]
    OUTCOME_REJECTED: _ClassVar[Outcome]
    OUTCOME_DISCARDED: _ClassVar[Outcome]

class PushKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_KIND_UNSPECIFIED: _ClassVar[PushKind]
    PUSH_KIND_GRADIENT: _ClassVar[PushKind]
    PUSH_KIND_ASSIGN: _ClassVar[PushKind]

class ReplyKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLY_KIND_UNSPECIFIED: _ClassVar[ReplyKind]
    REPLY_KIND_RECEIVED: _ClassVar[ReplyKind]
    REPLY_KIND_COMMITTED: _ClassVar[ReplyKind]
    REPLY_KIND_REFUSED: _ClassVar[ReplyKind]
    REPLY_KIND_GIVEN_BACK: _ClassVar[ReplyKind]
    REPLY_KIND_CREDIT: _ClassVar[ReplyKind]
    REPLY_KIND_ERROR: _ClassVar[ReplyKind]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_APPLIED: Outcome
OUTCOME_INVALID: Outcome
OUTCOME_REPLACED: Outcome
OUTCOME_WITHDRAWN: Outcome
OUTCOME_SKIPPED: Outcome
OUTCOME_REJECTED: Outcome
OUTCOME_DISCARDED: Outcome
PUSH_KIND_UNSPECIFIED: PushKind
PUSH_KIND_GRADIENT: PushKind
PUSH_KIND_ASSIGN: PushKind
REPLY_KIND_UNSPECIFIED: ReplyKind
REPLY_KIND_RECEIVED: ReplyKind
REPLY_KIND_COMMITTED: ReplyKind
REPLY_KIND_REFUSED: ReplyKind
REPLY_KIND_GIVEN_BACK: ReplyKind
REPLY_KIND_CREDIT: ReplyKind
REPLY_KIND_ERROR: ReplyKind

class OpenSessionRequest(_message.Message):
    __slots__ = ("session", "view_number", "deadline_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    view_number: int
    deadline_ms: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., view_number: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("node_id", "incarnation", "max_message_bytes", "features", "same_host", "stream_port", "cluster_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    STREAM_PORT_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    incarnation: int
    max_message_bytes: int
    features: _containers.RepeatedScalarFieldContainer[str]
    same_host: SameHostOffer
    stream_port: int
    cluster_id: str
    def __init__(self, node_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., same_host: _Optional[_Union[SameHostOffer, _Mapping]] = ..., stream_port: _Optional[int] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class SameHostOffer(_message.Message):
    __slots__ = ("socket_name", "nonce")
    SOCKET_NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    socket_name: str
    nonce: bytes
    def __init__(self, socket_name: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class LaneRequest(_message.Message):
    __slots__ = ("hello", "segment", "dropped")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    hello: LaneHello
    segment: SharedSegment
    dropped: SegmentDropped
    def __init__(self, hello: _Optional[_Union[LaneHello, _Mapping]] = ..., segment: _Optional[_Union[SharedSegment, _Mapping]] = ..., dropped: _Optional[_Union[SegmentDropped, _Mapping]] = ...) -> None: ...

class LaneHello(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class SegmentDropped(_message.Message):
    __slots__ = ("segment_id",)
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    def __init__(self, segment_id: _Optional[int] = ...) -> None: ...

class SharedSegment(_message.Message):
    __slots__ = ("segment_id", "byte_count")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    byte_count: int
    def __init__(self, segment_id: _Optional[int] = ..., byte_count: _Optional[int] = ...) -> None: ...

class LaneResponse(_message.Message):
    __slots__ = ("welcome", "mapped", "segment", "error", "dropped")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    welcome: LaneWelcome
    mapped: SegmentMapped
    segment: SharedSegment
    error: _types_pb2.Error
    dropped: SegmentDropped
    def __init__(self, welcome: _Optional[_Union[LaneWelcome, _Mapping]] = ..., mapped: _Optional[_Union[SegmentMapped, _Mapping]] = ..., segment: _Optional[_Union[SharedSegment, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., dropped: _Optional[_Union[SegmentDropped, _Mapping]] = ...) -> None: ...

class LaneWelcome(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SegmentMapped(_message.Message):
    __slots__ = ("segment_id",)
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    def __init__(self, segment_id: _Optional[int] = ...) -> None: ...

class SharedPayload(_message.Message):
    __slots__ = ("segment_id", "offset_bytes", "byte_count")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    offset_bytes: int
    byte_count: int
    def __init__(self, segment_id: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., byte_count: _Optional[int] = ...) -> None: ...

class StreamHeader(_message.Message):
    __slots__ = ("session", "receiver_node_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    receiver_node_id: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., receiver_node_id: _Optional[int] = ...) -> None: ...

class BlockPush(_message.Message):
    __slots__ = ("range_id", "assignment_epoch", "table_id", "block", "clock", "sequence", "confirmed_sequence", "codec", "kind", "replaces", "presence", "pulled_peer_version", "eager", "seal", "payload", "padding", "shared_payload", "more_follow", "was_received")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    PULLED_PEER_VERSION_FIELD_NUMBER: _ClassVar[int]
    EAGER_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    SHARED_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    WAS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    assignment_epoch: int
    table_id: int
    block: int
    clock: int
    sequence: int
    confirmed_sequence: int
    codec: _types_pb2.Codec
    kind: PushKind
    replaces: int
    presence: bytes
    pulled_peer_version: int
    eager: EagerStep
    seal: Seal
    payload: bytes
    padding: bytes
    shared_payload: SharedPayload
    more_follow: bool
    was_received: bool
    def __init__(self, range_id: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., table_id: _Optional[int] = ..., block: _Optional[int] = ..., clock: _Optional[int] = ..., sequence: _Optional[int] = ..., confirmed_sequence: _Optional[int] = ..., codec: _Optional[_Union[_types_pb2.Codec, str]] = ..., kind: _Optional[_Union[PushKind, str]] = ..., replaces: _Optional[int] = ..., presence: _Optional[bytes] = ..., pulled_peer_version: _Optional[int] = ..., eager: _Optional[_Union[EagerStep, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., payload: _Optional[bytes] = ..., padding: _Optional[bytes] = ..., shared_payload: _Optional[_Union[SharedPayload, _Mapping]] = ..., more_follow: _Optional[bool] = ..., was_received: _Optional[bool] = ...) -> None: ...

class BlockBatch(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockPush]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockPush, _Mapping]]] = ...) -> None: ...

class EagerStep(_message.Message):
    __slots__ = ("hyperparameters",)
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    hyperparameters: _containers.RepeatedCompositeFieldContainer[_types_pb2.Hyperparameter]
    def __init__(self, hyperparameters: _Optional[_Iterable[_Union[_types_pb2.Hyperparameter, _Mapping]]] = ...) -> None: ...

class RangeSeal(_message.Message):
    __slots__ = ("range_id", "assignment_epoch", "sequence", "confirmed_sequence")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    assignment_epoch: int
    sequence: int
    confirmed_sequence: int
    def __init__(self, range_id: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., confirmed_sequence: _Optional[int] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("table_id", "clock", "ranges", "hyperparameters", "contribution_scale", "skip", "last", "clip_scale", "edit", "array")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_SCALE_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CLIP_SCALE_FIELD_NUMBER: _ClassVar[int]
    EDIT_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    clock: int
    ranges: _containers.RepeatedCompositeFieldContainer[RangeSeal]
    hyperparameters: _containers.RepeatedCompositeFieldContainer[_types_pb2.Hyperparameter]
    contribution_scale: float
    skip: bool
    last: bool
    clip_scale: float
    edit: bytes
    array: str
    def __init__(self, table_id: _Optional[int] = ..., clock: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[RangeSeal, _Mapping]]] = ..., hyperparameters: _Optional[_Iterable[_Union[_types_pb2.Hyperparameter, _Mapping]]] = ..., contribution_scale: _Optional[float] = ..., skip: _Optional[bool] = ..., last: _Optional[bool] = ..., clip_scale: _Optional[float] = ..., edit: _Optional[bytes] = ..., array: _Optional[str] = ...) -> None: ...

class UpdateScale(_message.Message):
    __slots__ = ("table_id", "clock", "ranges", "scale")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    clock: int
    ranges: _containers.RepeatedCompositeFieldContainer[RangeSeal]
    scale: float
    def __init__(self, table_id: _Optional[int] = ..., clock: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[RangeSeal, _Mapping]]] = ..., scale: _Optional[float] = ...) -> None: ...

class Withdrawal(_message.Message):
    __slots__ = ("table_id", "range_id", "assignment_epoch", "sequence")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    range_id: int
    assignment_epoch: int
    sequence: int
    def __init__(self, table_id: _Optional[int] = ..., range_id: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "block", "seal", "withdrawal", "batch", "update_scale")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWAL_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SCALE_FIELD_NUMBER: _ClassVar[int]
    header: StreamHeader
    block: BlockPush
    seal: Seal
    withdrawal: Withdrawal
    batch: BlockBatch
    update_scale: UpdateScale
    def __init__(self, header: _Optional[_Union[StreamHeader, _Mapping]] = ..., block: _Optional[_Union[BlockPush, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., withdrawal: _Optional[_Union[Withdrawal, _Mapping]] = ..., batch: _Optional[_Union[BlockBatch, _Mapping]] = ..., update_scale: _Optional[_Union[UpdateScale, _Mapping]] = ...) -> None: ...

class EntryReply(_message.Message):
    __slots__ = ("kind", "table_id", "range_id", "sequence", "outcome", "error", "staleness", "squares")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    kind: ReplyKind
    table_id: int
    range_id: int
    sequence: int
    outcome: Outcome
    error: _types_pb2.Error
    staleness: int
    squares: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, kind: _Optional[_Union[ReplyKind, str]] = ..., table_id: _Optional[int] = ..., range_id: _Optional[int] = ..., sequence: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., staleness: _Optional[int] = ..., squares: _Optional[_Iterable[float]] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[EntryReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[EntryReply, _Mapping]]] = ...) -> None: ...

class RangePull(_message.Message):
    __slots__ = ("range_id", "assignment_epoch", "blocks", "ids", "skipped_row_counts", "held_versions", "held_edit_count")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HELD_EDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    assignment_epoch: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[bytes]
    skipped_row_counts: _containers.RepeatedScalarFieldContainer[int]
    held_versions: _containers.RepeatedScalarFieldContainer[int]
    held_edit_count: int
    def __init__(self, range_id: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[bytes]] = ..., skipped_row_counts: _Optional[_Iterable[int]] = ..., held_versions: _Optional[_Iterable[int]] = ..., held_edit_count: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("session", "table_id", "ranges", "clock", "deadline_ms", "codec", "consistent", "shared", "read_number", "cut", "array")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CONSISTENT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    READ_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    table_id: int
    ranges: _containers.RepeatedCompositeFieldContainer[RangePull]
    clock: int
    deadline_ms: int
    codec: _types_pb2.Codec
    consistent: bool
    shared: bool
    read_number: int
    cut: int
    array: str
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., table_id: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[RangePull, _Mapping]]] = ..., clock: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., codec: _Optional[_Union[_types_pb2.Codec, str]] = ..., consistent: _Optional[bool] = ..., shared: _Optional[bool] = ..., read_number: _Optional[int] = ..., cut: _Optional[int] = ..., array: _Optional[str] = ...) -> None: ...

class BeginCutRequest(_message.Message):
    __slots__ = ("session", "table_id", "cut", "deadline_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    table_id: int
    cut: int
    deadline_ms: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., table_id: _Optional[int] = ..., cut: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class SettleChangeRequest(_message.Message):
    __slots__ = ("session", "table_id", "number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    table_id: int
    number: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., table_id: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class SettleChangeResponse(_message.Message):
    __slots__ = ("outcome", "after_clock")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    AFTER_CLOCK_FIELD_NUMBER: _ClassVar[int]
    outcome: _types_pb2.ChangeOutcome
    after_clock: int
    def __init__(self, outcome: _Optional[_Union[_types_pb2.ChangeOutcome, str]] = ..., after_clock: _Optional[int] = ...) -> None: ...

class EndCutRequest(_message.Message):
    __slots__ = ("session", "table_id", "cut")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    table_id: int
    cut: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., table_id: _Optional[int] = ..., cut: _Optional[int] = ...) -> None: ...

class EndCutResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginCutResponse(_message.Message):
    __slots__ = ("clock",)
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    clock: int
    def __init__(self, clock: _Optional[int] = ...) -> None: ...

class BlockValue(_message.Message):
    __slots__ = ("block", "version", "peer_version", "clock", "codec", "presence", "edit_count", "payload")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    EDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    block: int
    version: int
    peer_version: int
    clock: int
    codec: _types_pb2.Codec
    presence: bytes
    edit_count: int
    payload: bytes
    def __init__(self, block: _Optional[int] = ..., version: _Optional[int] = ..., peer_version: _Optional[int] = ..., clock: _Optional[int] = ..., codec: _Optional[_Union[_types_pb2.Codec, str]] = ..., presence: _Optional[bytes] = ..., edit_count: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class SharedValue(_message.Message):
    __slots__ = ("block", "version", "peer_version", "clock", "codec", "segment_id", "offset_bytes", "byte_count", "stamp_offset_bytes", "stamp", "edit_count")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAMP_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    EDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    block: int
    version: int
    peer_version: int
    clock: int
    codec: _types_pb2.Codec
    segment_id: int
    offset_bytes: int
    byte_count: int
    stamp_offset_bytes: int
    stamp: int
    edit_count: int
    def __init__(self, block: _Optional[int] = ..., version: _Optional[int] = ..., peer_version: _Optional[int] = ..., clock: _Optional[int] = ..., codec: _Optional[_Union[_types_pb2.Codec, str]] = ..., segment_id: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., byte_count: _Optional[int] = ..., stamp_offset_bytes: _Optional[int] = ..., stamp: _Optional[int] = ..., edit_count: _Optional[int] = ...) -> None: ...

class SharedValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[SharedValue]
    def __init__(self, values: _Optional[_Iterable[_Union[SharedValue, _Mapping]]] = ...) -> None: ...

class UnchangedBlocks(_message.Message):
    __slots__ = ("clock", "blocks")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    clock: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, clock: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class RangeError(_message.Message):
    __slots__ = ("range_id", "error")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    error: _types_pb2.Error
    def __init__(self, range_id: _Optional[int] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("block", "error", "shared", "unchanged")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    block: BlockValue
    error: RangeError
    shared: SharedValues
    unchanged: UnchangedBlocks
    def __init__(self, block: _Optional[_Union[BlockValue, _Mapping]] = ..., error: _Optional[_Union[RangeError, _Mapping]] = ..., shared: _Optional[_Union[SharedValues, _Mapping]] = ..., unchanged: _Optional[_Union[UnchangedBlocks, _Mapping]] = ...) -> None: ...

class PushPullRequest(_message.Message):
    __slots__ = ("header", "block", "seal", "pull", "batch", "withdrawal", "update_scale", "then_pull")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWAL_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SCALE_FIELD_NUMBER: _ClassVar[int]
    THEN_PULL_FIELD_NUMBER: _ClassVar[int]
    header: StreamHeader
    block: BlockPush
    seal: Seal
    pull: PullRequest
    batch: BlockBatch
    withdrawal: Withdrawal
    update_scale: UpdateScale
    then_pull: PullRequest
    def __init__(self, header: _Optional[_Union[StreamHeader, _Mapping]] = ..., block: _Optional[_Union[BlockPush, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., pull: _Optional[_Union[PullRequest, _Mapping]] = ..., batch: _Optional[_Union[BlockBatch, _Mapping]] = ..., withdrawal: _Optional[_Union[Withdrawal, _Mapping]] = ..., update_scale: _Optional[_Union[UpdateScale, _Mapping]] = ..., then_pull: _Optional[_Union[PullRequest, _Mapping]] = ...) -> None: ...

class PullEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushPullResponse(_message.Message):
    __slots__ = ("replies", "pull", "end", "read_number", "with_replies", "is_last")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    READ_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WITH_REPLIES_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    replies: PushResponse
    pull: PullResponse
    end: PullEnd
    read_number: int
    with_replies: PushResponse
    is_last: bool
    def __init__(self, replies: _Optional[_Union[PushResponse, _Mapping]] = ..., pull: _Optional[_Union[PullResponse, _Mapping]] = ..., end: _Optional[_Union[PullEnd, _Mapping]] = ..., read_number: _Optional[int] = ..., with_replies: _Optional[_Union[PushResponse, _Mapping]] = ..., is_last: _Optional[bool] = ...) -> None: ...

class GetRangeStatsRequest(_message.Message):
    __slots__ = ("table_id", "session")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    session: _types_pb2.SessionIdentity
    def __init__(self, table_id: _Optional[int] = ..., session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("rank", "incarnation", "clock", "low_water_sequence", "last_heard_ms", "left")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LOW_WATER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_MS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    clock: int
    low_water_sequence: int
    last_heard_ms: int
    left: bool
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., low_water_sequence: _Optional[int] = ..., last_heard_ms: _Optional[int] = ..., left: _Optional[bool] = ...) -> None: ...

class RangeStats(_message.Message):
    __slots__ = ("range_id", "table_id", "assignment_epoch", "clock", "block_count", "state_bytes", "update_count", "waits", "workers", "initialized", "failure", "rows")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPDATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    table_id: int
    assignment_epoch: int
    clock: int
    block_count: int
    state_bytes: int
    update_count: int
    waits: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStats]
    initialized: bool
    failure: str
    rows: RowStats
    def __init__(self, range_id: _Optional[int] = ..., table_id: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., clock: _Optional[int] = ..., block_count: _Optional[int] = ..., state_bytes: _Optional[int] = ..., update_count: _Optional[int] = ..., waits: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[_Union[WorkerStats, _Mapping]]] = ..., initialized: _Optional[bool] = ..., failure: _Optional[str] = ..., rows: _Optional[_Union[RowStats, _Mapping]] = ...) -> None: ...

class RowStats(_message.Message):
    __slots__ = ("row_count", "candidate_count", "pulled_count", "found_count", "pushed_count", "pulled", "pushed", "disk_row_count")
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PULLED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FOUND_COUNT_FIELD_NUMBER: _ClassVar[int]
    PUSHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    DISK_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    candidate_count: int
    pulled_count: int
    found_count: int
    pushed_count: int
    pulled: _containers.RepeatedCompositeFieldContainer[HotRow]
    pushed: _containers.RepeatedCompositeFieldContainer[HotRow]
    disk_row_count: int
    def __init__(self, row_count: _Optional[int] = ..., candidate_count: _Optional[int] = ..., pulled_count: _Optional[int] = ..., found_count: _Optional[int] = ..., pushed_count: _Optional[int] = ..., pulled: _Optional[_Iterable[_Union[HotRow, _Mapping]]] = ..., pushed: _Optional[_Iterable[_Union[HotRow, _Mapping]]] = ..., disk_row_count: _Optional[int] = ...) -> None: ...

class HotRow(_message.Message):
    __slots__ = ("id", "share")
    ID_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    id: int
    share: float
    def __init__(self, id: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...

class GetRangeStatsResponse(_message.Message):
    __slots__ = ("ranges", "gate_bytes")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    GATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[RangeStats]
    gate_bytes: int
    def __init__(self, ranges: _Optional[_Iterable[_Union[RangeStats, _Mapping]]] = ..., gate_bytes: _Optional[int] = ...) -> None: ...

class CollectiveShare(_message.Message):
    __slots__ = ("rank", "incarnation", "call", "clock", "payload")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    call: str
    clock: int
    payload: bytes
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., call: _Optional[str] = ..., clock: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class CollectiveRound(_message.Message):
    __slots__ = ("number", "shares", "problem")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    shares: _containers.RepeatedCompositeFieldContainer[CollectiveShare]
    problem: str
    def __init__(self, number: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[CollectiveShare, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class EnterCollectiveRequest(_message.Message):
    __slots__ = ("session", "view_number", "assignment_epoch", "ended_round", "last_round", "share", "deadline_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDED_ROUND_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    view_number: int
    assignment_epoch: int
    ended_round: int
    last_round: CollectiveRound
    share: CollectiveShare
    deadline_ms: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., view_number: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., ended_round: _Optional[int] = ..., last_round: _Optional[_Union[CollectiveRound, _Mapping]] = ..., share: _Optional[_Union[CollectiveShare, _Mapping]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class EnterCollectiveResponse(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: CollectiveRound
    def __init__(self, round: _Optional[_Union[CollectiveRound, _Mapping]] = ...) -> None: ...
