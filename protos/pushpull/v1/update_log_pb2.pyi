from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class UpdateLogHeader(_message.Message):
    __slots__ = ("format_version", "log_id", "segment", "cluster_id", "timeline", "node_id", "incarnation", "range_count", "kernel_fingerprint", "boot_id", "is_synced", "groups_are_consecutive")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IS_SYNCED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_ARE_CONSECUTIVE_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    log_id: bytes
    segment: int
    cluster_id: str
    timeline: bytes
    node_id: int
    incarnation: int
    range_count: int
    kernel_fingerprint: str
    boot_id: str
    is_synced: bool
    groups_are_consecutive: bool
    def __init__(self, format_version: _Optional[int] = ..., log_id: _Optional[bytes] = ..., segment: _Optional[int] = ..., cluster_id: _Optional[str] = ..., timeline: _Optional[bytes] = ..., node_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., range_count: _Optional[int] = ..., kernel_fingerprint: _Optional[str] = ..., boot_id: _Optional[str] = ..., is_synced: _Optional[bool] = ..., groups_are_consecutive: _Optional[bool] = ...) -> None: ...

class UpdateLogRange(_message.Message):
    __slots__ = ("range_id", "term", "assignment_epoch", "number")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    term: int
    assignment_epoch: int
    number: int
    def __init__(self, range_id: _Optional[int] = ..., term: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...
