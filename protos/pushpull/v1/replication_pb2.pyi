from pushpull.v1 import parameters_pb2 as _parameters_pb2
from pushpull.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ValueChangeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VALUE_CHANGE_KIND_UNSPECIFIED: _ClassVar[ValueChangeKind]
    VALUE_CHANGE_KIND_PUT: _ClassVar[ValueChangeKind]
    VALUE_CHANGE_KIND_PUT_KEPT: _ClassVar[ValueChangeKind]
    VALUE_CHANGE_KIND_PUT_REDUCED: _ClassVar[ValueChangeKind]
    VALUE_CHANGE_KIND_KEPT: _ClassVar[ValueChangeKind]
    VALUE_CHANGE_KIND_DROPPED: _ClassVar[ValueChangeKind]
    VALUE_CHANGE_KIND_ASSIGNED: _ClassVar[ValueChangeKind]
VALUE_CHANGE_KIND_UNSPECIFIED: ValueChangeKind
VALUE_CHANGE_KIND_PUT: ValueChangeKind
VALUE_CHANGE_KIND_PUT_KEPT: ValueChangeKind
VALUE_CHANGE_KIND_PUT_REDUCED: ValueChangeKind
VALUE_CHANGE_KIND_KEPT: ValueChangeKind
VALUE_CHANGE_KIND_DROPPED: ValueChangeKind
VALUE_CHANGE_KIND_ASSIGNED: ValueChangeKind

class ReplicateRequest(_message.Message):
    __slots__ = ("header", "batch", "beat", "snapshot", "snapshot_table", "snapshot_ledger", "snapshot_block", "snapshot_sum", "snapshot_change", "elements", "snapshot_end")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_TABLE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LEDGER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SUM_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_CHANGE_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    header: ReplicateHeader
    batch: ReplicatedBatch
    beat: Beat
    snapshot: RangeSnapshot
    snapshot_table: SnapshotTable
    snapshot_ledger: SnapshotLedger
    snapshot_block: SnapshotBlock
    snapshot_sum: SnapshotSum
    snapshot_change: SnapshotChange
    elements: BlockElements
    snapshot_end: SnapshotEnd
    def __init__(self, header: _Optional[_Union[ReplicateHeader, _Mapping]] = ..., batch: _Optional[_Union[ReplicatedBatch, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., snapshot: _Optional[_Union[RangeSnapshot, _Mapping]] = ..., snapshot_table: _Optional[_Union[SnapshotTable, _Mapping]] = ..., snapshot_ledger: _Optional[_Union[SnapshotLedger, _Mapping]] = ..., snapshot_block: _Optional[_Union[SnapshotBlock, _Mapping]] = ..., snapshot_sum: _Optional[_Union[SnapshotSum, _Mapping]] = ..., snapshot_change: _Optional[_Union[SnapshotChange, _Mapping]] = ..., elements: _Optional[_Union[BlockElements, _Mapping]] = ..., snapshot_end: _Optional[_Union[SnapshotEnd, _Mapping]] = ...) -> None: ...

class ReplicateResponse(_message.Message):
    __slots__ = ("acks", "grants", "stream_port", "node_id", "incarnation")
    ACKS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    STREAM_PORT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedCompositeFieldContainer[Ack]
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    stream_port: int
    node_id: int
    incarnation: int
    def __init__(self, acks: _Optional[_Iterable[_Union[Ack, _Mapping]]] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., stream_port: _Optional[int] = ..., node_id: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ReplicateHeader(_message.Message):
    __slots__ = ("session", "receiver_node_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    receiver_node_id: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., receiver_node_id: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("range_id", "number", "assignment_epoch")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    number: int
    assignment_epoch: int
    def __init__(self, range_id: _Optional[int] = ..., number: _Optional[int] = ..., assignment_epoch: _Optional[int] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("sent_s", "range_ids", "assignment_epochs")
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    RANGE_IDS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    sent_s: float
    range_ids: _containers.RepeatedScalarFieldContainer[int]
    assignment_epochs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sent_s: _Optional[float] = ..., range_ids: _Optional[_Iterable[int]] = ..., assignment_epochs: _Optional[_Iterable[int]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("sent_s", "range_ids")
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    RANGE_IDS_FIELD_NUMBER: _ClassVar[int]
    sent_s: float
    range_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sent_s: _Optional[float] = ..., range_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReplicatedBatch(_message.Message):
    __slots__ = ("head", "blocks", "more_follow")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MORE_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    head: BatchHead
    blocks: _containers.RepeatedCompositeFieldContainer[BlockElements]
    more_follow: bool
    def __init__(self, head: _Optional[_Union[BatchHead, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockElements, _Mapping]]] = ..., more_follow: _Optional[bool] = ...) -> None: ...

class BatchHead(_message.Message):
    __slots__ = ("range_id", "term", "assignment_epoch", "number", "table_id", "facts", "workers", "endings", "records", "counted", "changes")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ENDINGS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    term: int
    assignment_epoch: int
    number: int
    table_id: int
    facts: PartFacts
    workers: WorkersFacts
    endings: EndedEntries
    records: _containers.RepeatedCompositeFieldContainer[DecisionRecord]
    counted: _containers.RepeatedScalarFieldContainer[int]
    changes: _containers.RepeatedCompositeFieldContainer[ValueChange]
    def __init__(self, range_id: _Optional[int] = ..., term: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., number: _Optional[int] = ..., table_id: _Optional[int] = ..., facts: _Optional[_Union[PartFacts, _Mapping]] = ..., workers: _Optional[_Union[WorkersFacts, _Mapping]] = ..., endings: _Optional[_Union[EndedEntries, _Mapping]] = ..., records: _Optional[_Iterable[_Union[DecisionRecord, _Mapping]]] = ..., counted: _Optional[_Iterable[int]] = ..., changes: _Optional[_Iterable[_Union[ValueChange, _Mapping]]] = ...) -> None: ...

class BlockElements(_message.Message):
    __slots__ = ("block", "presence", "padding", "payload")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    block: int
    presence: bytes
    padding: bytes
    payload: bytes
    def __init__(self, block: _Optional[int] = ..., presence: _Optional[bytes] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PartFacts(_message.Message):
    __slots__ = ("clock", "formed_clock", "changed_clock", "newest_join_clock", "update_count", "record_count", "initialized", "unscaled", "squares", "said", "settings", "change_number", "promised", "hold_point", "failure", "minds_reads", "past_reached_clock", "past_stepped_clock", "taken", "taken_clock", "is_for_join")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    FORMED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    CHANGED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    NEWEST_JOIN_CLOCK_FIELD_NUMBER: _ClassVar[int]
    UPDATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECORD_COUNT_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    UNSCALED_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    HOLD_POINT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MINDS_READS_FIELD_NUMBER: _ClassVar[int]
    PAST_REACHED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    PAST_STEPPED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_CLOCK_FIELD_NUMBER: _ClassVar[int]
    IS_FOR_JOIN_FIELD_NUMBER: _ClassVar[int]
    clock: int
    formed_clock: int
    changed_clock: int
    newest_join_clock: int
    update_count: int
    record_count: int
    initialized: bool
    unscaled: int
    squares: _containers.RepeatedCompositeFieldContainer[ClockSquares]
    said: SaidScale
    settings: _containers.RepeatedCompositeFieldContainer[SettingFrom]
    change_number: int
    promised: int
    hold_point: int
    failure: _types_pb2.Error
    minds_reads: bool
    past_reached_clock: int
    past_stepped_clock: int
    taken: int
    taken_clock: int
    is_for_join: bool
    def __init__(self, clock: _Optional[int] = ..., formed_clock: _Optional[int] = ..., changed_clock: _Optional[int] = ..., newest_join_clock: _Optional[int] = ..., update_count: _Optional[int] = ..., record_count: _Optional[int] = ..., initialized: _Optional[bool] = ..., unscaled: _Optional[int] = ..., squares: _Optional[_Iterable[_Union[ClockSquares, _Mapping]]] = ..., said: _Optional[_Union[SaidScale, _Mapping]] = ..., settings: _Optional[_Iterable[_Union[SettingFrom, _Mapping]]] = ..., change_number: _Optional[int] = ..., promised: _Optional[int] = ..., hold_point: _Optional[int] = ..., failure: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., minds_reads: _Optional[bool] = ..., past_reached_clock: _Optional[int] = ..., past_stepped_clock: _Optional[int] = ..., taken: _Optional[int] = ..., taken_clock: _Optional[int] = ..., is_for_join: _Optional[bool] = ...) -> None: ...

class ClockSquares(_message.Message):
    __slots__ = ("clock", "squares")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    clock: int
    squares: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, clock: _Optional[int] = ..., squares: _Optional[_Iterable[float]] = ...) -> None: ...

class SaidScale(_message.Message):
    __slots__ = ("clock", "scale", "rank")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    clock: int
    scale: float
    rank: int
    def __init__(self, clock: _Optional[int] = ..., scale: _Optional[float] = ..., rank: _Optional[int] = ...) -> None: ...

class SettingFrom(_message.Message):
    __slots__ = ("after_clock", "consistency")
    AFTER_CLOCK_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    after_clock: int
    consistency: _types_pb2.Consistency
    def __init__(self, after_clock: _Optional[int] = ..., consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ...) -> None: ...

class WorkersFacts(_message.Message):
    __slots__ = ("incarnations", "ranks", "sealed_clocks", "done_clocks", "joined_clocks", "confirmed_sequences", "left", "left_clocks", "final_seals", "final_seal_clocks", "successors", "predecessors")
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SEALED_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    DONE_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    JOINED_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LEFT_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINAL_SEALS_FIELD_NUMBER: _ClassVar[int]
    FINAL_SEAL_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSORS_FIELD_NUMBER: _ClassVar[int]
    PREDECESSORS_FIELD_NUMBER: _ClassVar[int]
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    sealed_clocks: _containers.RepeatedScalarFieldContainer[int]
    done_clocks: _containers.RepeatedScalarFieldContainer[int]
    joined_clocks: _containers.RepeatedScalarFieldContainer[int]
    confirmed_sequences: _containers.RepeatedScalarFieldContainer[int]
    left: _containers.RepeatedScalarFieldContainer[int]
    left_clocks: _containers.RepeatedScalarFieldContainer[int]
    final_seals: _containers.RepeatedScalarFieldContainer[int]
    final_seal_clocks: _containers.RepeatedScalarFieldContainer[int]
    successors: _containers.RepeatedScalarFieldContainer[int]
    predecessors: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnations: _Optional[_Iterable[int]] = ..., ranks: _Optional[_Iterable[int]] = ..., sealed_clocks: _Optional[_Iterable[int]] = ..., done_clocks: _Optional[_Iterable[int]] = ..., joined_clocks: _Optional[_Iterable[int]] = ..., confirmed_sequences: _Optional[_Iterable[int]] = ..., left: _Optional[_Iterable[int]] = ..., left_clocks: _Optional[_Iterable[int]] = ..., final_seals: _Optional[_Iterable[int]] = ..., final_seal_clocks: _Optional[_Iterable[int]] = ..., successors: _Optional[_Iterable[int]] = ..., predecessors: _Optional[_Iterable[int]] = ...) -> None: ...

class EndedEntries(_message.Message):
    __slots__ = ("incarnations", "sequences", "outcomes", "stalenesses", "details")
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    STALENESSES_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    outcomes: _containers.RepeatedScalarFieldContainer[_parameters_pb2.Outcome]
    stalenesses: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedCompositeFieldContainer[EndingDetail]
    def __init__(self, incarnations: _Optional[_Iterable[int]] = ..., sequences: _Optional[_Iterable[int]] = ..., outcomes: _Optional[_Iterable[_Union[_parameters_pb2.Outcome, str]]] = ..., stalenesses: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[_Union[EndingDetail, _Mapping]]] = ...) -> None: ...

class EndingDetail(_message.Message):
    __slots__ = ("index", "error", "squares")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    index: int
    error: _types_pb2.Error
    squares: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, index: _Optional[int] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., squares: _Optional[_Iterable[float]] = ...) -> None: ...

class DecisionRecord(_message.Message):
    __slots__ = ("number", "clock", "is_assign", "contributors", "hyperparameters", "blocks", "gone_count", "update_scale", "summed_by", "array", "edit")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    IS_ASSIGN_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GONE_COUNT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SCALE_FIELD_NUMBER: _ClassVar[int]
    SUMMED_BY_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    EDIT_FIELD_NUMBER: _ClassVar[int]
    number: int
    clock: int
    is_assign: bool
    contributors: _containers.RepeatedCompositeFieldContainer[RecordContributor]
    hyperparameters: _containers.RepeatedCompositeFieldContainer[_types_pb2.Hyperparameter]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    gone_count: int
    update_scale: float
    summed_by: _containers.RepeatedCompositeFieldContainer[RecordContributor]
    array: str
    edit: bytes
    def __init__(self, number: _Optional[int] = ..., clock: _Optional[int] = ..., is_assign: _Optional[bool] = ..., contributors: _Optional[_Iterable[_Union[RecordContributor, _Mapping]]] = ..., hyperparameters: _Optional[_Iterable[_Union[_types_pb2.Hyperparameter, _Mapping]]] = ..., blocks: _Optional[_Iterable[int]] = ..., gone_count: _Optional[int] = ..., update_scale: _Optional[float] = ..., summed_by: _Optional[_Iterable[_Union[RecordContributor, _Mapping]]] = ..., array: _Optional[str] = ..., edit: _Optional[bytes] = ...) -> None: ...

class RecordContributor(_message.Message):
    __slots__ = ("rank", "incarnation", "sequences", "skip")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    skip: bool
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., sequences: _Optional[_Iterable[int]] = ..., skip: _Optional[bool] = ...) -> None: ...

class ValueChange(_message.Message):
    __slots__ = ("kind", "record", "block_count", "mean_count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEAN_COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: ValueChangeKind
    record: int
    block_count: int
    mean_count: int
    def __init__(self, kind: _Optional[_Union[ValueChangeKind, str]] = ..., record: _Optional[int] = ..., block_count: _Optional[int] = ..., mean_count: _Optional[int] = ...) -> None: ...

class RangeSnapshot(_message.Message):
    __slots__ = ("range_id", "assignment_epoch", "term", "number")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    assignment_epoch: int
    term: int
    number: int
    def __init__(self, range_id: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., term: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class SnapshotTable(_message.Message):
    __slots__ = ("table_id", "facts", "workers", "records", "blocks", "versions")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    facts: PartFacts
    workers: WorkersFacts
    records: _containers.RepeatedCompositeFieldContainer[DecisionRecord]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table_id: _Optional[int] = ..., facts: _Optional[_Union[PartFacts, _Mapping]] = ..., workers: _Optional[_Union[WorkersFacts, _Mapping]] = ..., records: _Optional[_Iterable[_Union[DecisionRecord, _Mapping]]] = ..., blocks: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotLedger(_message.Message):
    __slots__ = ("table_id", "incarnation", "low_water", "confirmed_sequence", "endings", "own_blocks", "own_updates")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOW_WATER_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ENDINGS_FIELD_NUMBER: _ClassVar[int]
    OWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWN_UPDATES_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    incarnation: int
    low_water: int
    confirmed_sequence: int
    endings: EndedEntries
    own_blocks: _containers.RepeatedScalarFieldContainer[int]
    own_updates: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., low_water: _Optional[int] = ..., confirmed_sequence: _Optional[int] = ..., endings: _Optional[_Union[EndedEntries, _Mapping]] = ..., own_blocks: _Optional[_Iterable[int]] = ..., own_updates: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotBlock(_message.Message):
    __slots__ = ("table_id", "block", "version", "steps", "slots")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    block: int
    version: int
    steps: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, table_id: _Optional[int] = ..., block: _Optional[int] = ..., version: _Optional[int] = ..., steps: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[str]] = ...) -> None: ...

class SnapshotSum(_message.Message):
    __slots__ = ("table_id", "clock", "waits", "block_count")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    clock: int
    waits: bool
    block_count: int
    def __init__(self, table_id: _Optional[int] = ..., clock: _Optional[int] = ..., waits: _Optional[bool] = ..., block_count: _Optional[int] = ...) -> None: ...

class SnapshotChange(_message.Message):
    __slots__ = ("table_id", "record", "change")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    record: DecisionRecord
    change: ValueChange
    def __init__(self, table_id: _Optional[int] = ..., record: _Optional[_Union[DecisionRecord, _Mapping]] = ..., change: _Optional[_Union[ValueChange, _Mapping]] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ("range_id",)
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    def __init__(self, range_id: _Optional[int] = ...) -> None: ...
