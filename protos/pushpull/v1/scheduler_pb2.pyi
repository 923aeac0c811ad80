from pushpull.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataSet(_message.Message):
    __slots__ = ("name", "sample_count", "shard_size", "seed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    name: str
    sample_count: int
    shard_size: int
    seed: int
    def __init__(self, name: _Optional[str] = ..., sample_count: _Optional[int] = ..., shard_size: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class LeaseDataShardsRequest(_message.Message):
    __slots__ = ("session", "data_set", "pass_number", "done_shards", "want_count")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DATA_SET_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DONE_SHARDS_FIELD_NUMBER: _ClassVar[int]
    WANT_COUNT_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    data_set: DataSet
    pass_number: int
    done_shards: _containers.RepeatedScalarFieldContainer[int]
    want_count: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., data_set: _Optional[_Union[DataSet, _Mapping]] = ..., pass_number: _Optional[int] = ..., done_shards: _Optional[_Iterable[int]] = ..., want_count: _Optional[int] = ...) -> None: ...

class LeaseDataShardsResponse(_message.Message):
    __slots__ = ("pass_number", "shards", "view_number")
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    pass_number: int
    shards: _containers.RepeatedScalarFieldContainer[int]
    view_number: int
    def __init__(self, pass_number: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ..., view_number: _Optional[int] = ...) -> None: ...

class DataSetStatus(_message.Message):
    __slots__ = ("data_set", "run", "pass_number", "shard_count", "done_count", "leased_count", "reissued_count")
    DATA_SET_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    DONE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REISSUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    data_set: DataSet
    run: str
    pass_number: int
    shard_count: int
    done_count: int
    leased_count: int
    reissued_count: int
    def __init__(self, data_set: _Optional[_Union[DataSet, _Mapping]] = ..., run: _Optional[str] = ..., pass_number: _Optional[int] = ..., shard_count: _Optional[int] = ..., done_count: _Optional[int] = ..., leased_count: _Optional[int] = ..., reissued_count: _Optional[int] = ...) -> None: ...

class RemoveRunRequest(_message.Message):
    __slots__ = ("session", "run")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    run: str
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., run: _Optional[str] = ...) -> None: ...

class RemoveRunResponse(_message.Message):
    __slots__ = ("table_count", "byte_count")
    TABLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    table_count: int
    byte_count: int
    def __init__(self, table_count: _Optional[int] = ..., byte_count: _Optional[int] = ...) -> None: ...

class EndRunRequest(_message.Message):
    __slots__ = ("session", "run")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    run: str
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., run: _Optional[str] = ...) -> None: ...

class EndRunResponse(_message.Message):
    __slots__ = ("ended_count",)
    ENDED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ended_count: int
    def __init__(self, ended_count: _Optional[int] = ...) -> None: ...

class GetJoinChallengeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetJoinChallengeResponse(_message.Message):
    __slots__ = ("challenge",)
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    def __init__(self, challenge: _Optional[bytes] = ...) -> None: ...

class RegisterNodeRequest(_message.Message):
    __slots__ = ("registration_id", "role", "address", "requested_rank", "protocol_version", "features", "kernel_fingerprint", "cluster_id", "custom_updates", "waiting_ms", "update_log", "join_proof", "memory", "launch_id", "world_size", "run", "identity")
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_RANK_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_LOG_FIELD_NUMBER: _ClassVar[int]
    JOIN_PROOF_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    registration_id: bytes
    role: _types_pb2.NodeRole
    address: str
    requested_rank: int
    protocol_version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    kernel_fingerprint: str
    cluster_id: str
    custom_updates: _containers.RepeatedCompositeFieldContainer[CustomUpdate]
    waiting_ms: int
    update_log: UpdateLogClaim
    join_proof: bytes
    memory: ServerMemory
    launch_id: bytes
    world_size: int
    run: str
    identity: str
    def __init__(self, registration_id: _Optional[bytes] = ..., role: _Optional[_Union[_types_pb2.NodeRole, str]] = ..., address: _Optional[str] = ..., requested_rank: _Optional[int] = ..., protocol_version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., kernel_fingerprint: _Optional[str] = ..., cluster_id: _Optional[str] = ..., custom_updates: _Optional[_Iterable[_Union[CustomUpdate, _Mapping]]] = ..., waiting_ms: _Optional[int] = ..., update_log: _Optional[_Union[UpdateLogClaim, _Mapping]] = ..., join_proof: _Optional[bytes] = ..., memory: _Optional[_Union[ServerMemory, _Mapping]] = ..., launch_id: _Optional[bytes] = ..., world_size: _Optional[int] = ..., run: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class ServerMemory(_message.Message):
    __slots__ = ("byte_count", "pool")
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    byte_count: int
    pool: str
    def __init__(self, byte_count: _Optional[int] = ..., pool: _Optional[str] = ...) -> None: ...

class UpdateLogClaim(_message.Message):
    __slots__ = ("log_id", "timeline", "range_ids", "former_log_ids", "assignment_epochs", "is_unused")
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    RANGE_IDS_FIELD_NUMBER: _ClassVar[int]
    FORMER_LOG_IDS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    IS_UNUSED_FIELD_NUMBER: _ClassVar[int]
    log_id: bytes
    timeline: bytes
    range_ids: _containers.RepeatedScalarFieldContainer[int]
    former_log_ids: _containers.RepeatedScalarFieldContainer[bytes]
    assignment_epochs: _containers.RepeatedScalarFieldContainer[int]
    is_unused: bool
    def __init__(self, log_id: _Optional[bytes] = ..., timeline: _Optional[bytes] = ..., range_ids: _Optional[_Iterable[int]] = ..., former_log_ids: _Optional[_Iterable[bytes]] = ..., assignment_epochs: _Optional[_Iterable[int]] = ..., is_unused: _Optional[bool] = ...) -> None: ...

class CustomUpdate(_message.Message):
    __slots__ = ("name", "hyperparameters", "fingerprint", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    hyperparameters: _containers.RepeatedCompositeFieldContainer[_types_pb2.Hyperparameter]
    fingerprint: str
    problem: str
    def __init__(self, name: _Optional[str] = ..., hyperparameters: _Optional[_Iterable[_Union[_types_pb2.Hyperparameter, _Mapping]]] = ..., fingerprint: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class RegisterNodeResponse(_message.Message):
    __slots__ = ("session", "worker_count", "heartbeat_interval_ms", "lease_ms", "token_key", "features", "replica_count", "min_in_sync", "range_count", "left_url", "checkpoint_url")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_KEY_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_COUNT_FIELD_NUMBER: _ClassVar[int]
    MIN_IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    RANGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEFT_URL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_URL_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    worker_count: int
    heartbeat_interval_ms: int
    lease_ms: int
    token_key: bytes
    features: _containers.RepeatedScalarFieldContainer[str]
    replica_count: int
    min_in_sync: int
    range_count: int
    left_url: str
    checkpoint_url: str
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., worker_count: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., token_key: _Optional[bytes] = ..., features: _Optional[_Iterable[str]] = ..., replica_count: _Optional[int] = ..., min_in_sync: _Optional[int] = ..., range_count: _Optional[int] = ..., left_url: _Optional[str] = ..., checkpoint_url: _Optional[str] = ...) -> None: ...

class TableProgress(_message.Message):
    __slots__ = ("table_id", "clock")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    clock: int
    def __init__(self, table_id: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class ReadWait(_message.Message):
    __slots__ = ("table_id", "node_id", "waited_ms")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    node_id: int
    waited_ms: int
    def __init__(self, table_id: _Optional[int] = ..., node_id: _Optional[int] = ..., waited_ms: _Optional[int] = ...) -> None: ...

class LossTotals(_message.Message):
    __slots__ = ("count", "total", "square_total", "non_finite_count")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    SQUARE_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    total: float
    square_total: float
    non_finite_count: int
    def __init__(self, count: _Optional[int] = ..., total: _Optional[float] = ..., square_total: _Optional[float] = ..., non_finite_count: _Optional[int] = ...) -> None: ...

class NodeProgress(_message.Message):
    __slots__ = ("tables", "pushed_bytes", "pulled_bytes", "step_count", "loss", "staleness", "waiting_for", "planned_step_count", "lane", "read_waits", "losses", "loop")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PUSHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    PLANNED_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    READ_WAITS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    LOOP_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableProgress]
    pushed_bytes: int
    pulled_bytes: int
    step_count: int
    loss: float
    staleness: int
    waiting_for: str
    planned_step_count: int
    lane: str
    read_waits: _containers.RepeatedCompositeFieldContainer[ReadWait]
    losses: LossTotals
    loop: LoopProgress
    def __init__(self, tables: _Optional[_Iterable[_Union[TableProgress, _Mapping]]] = ..., pushed_bytes: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., step_count: _Optional[int] = ..., loss: _Optional[float] = ..., staleness: _Optional[int] = ..., waiting_for: _Optional[str] = ..., planned_step_count: _Optional[int] = ..., lane: _Optional[str] = ..., read_waits: _Optional[_Iterable[_Union[ReadWait, _Mapping]]] = ..., losses: _Optional[_Union[LossTotals, _Mapping]] = ..., loop: _Optional[_Union[LoopProgress, _Mapping]] = ...) -> None: ...

class LoopTable(_message.Message):
    __slots__ = ("table_id", "clock", "place")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    clock: int
    place: int
    def __init__(self, table_id: _Optional[int] = ..., clock: _Optional[int] = ..., place: _Optional[int] = ...) -> None: ...

class LoopProgress(_message.Message):
    __slots__ = ("tables", "has_place", "in_turn")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    HAS_PLACE_FIELD_NUMBER: _ClassVar[int]
    IN_TURN_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[LoopTable]
    has_place: bool
    in_turn: bool
    def __init__(self, tables: _Optional[_Iterable[_Union[LoopTable, _Mapping]]] = ..., has_place: _Optional[bool] = ..., in_turn: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("session", "progress", "view_number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    progress: NodeProgress
    view_number: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., progress: _Optional[_Union[NodeProgress, _Mapping]] = ..., view_number: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("view_number",)
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    view_number: int
    def __init__(self, view_number: _Optional[int] = ...) -> None: ...

class DeregisterNodeRequest(_message.Message):
    __slots__ = ("session", "reason", "launch_id", "only_if_kept", "loss_is_wanted", "unfinished")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_ID_FIELD_NUMBER: _ClassVar[int]
    ONLY_IF_KEPT_FIELD_NUMBER: _ClassVar[int]
    LOSS_IS_WANTED_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    reason: str
    launch_id: bytes
    only_if_kept: bool
    loss_is_wanted: bool
    unfinished: bool
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., reason: _Optional[str] = ..., launch_id: _Optional[bytes] = ..., only_if_kept: _Optional[bool] = ..., loss_is_wanted: _Optional[bool] = ..., unfinished: _Optional[bool] = ...) -> None: ...

class DeregisterNodeResponse(_message.Message):
    __slots__ = ("ended_count",)
    ENDED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ended_count: int
    def __init__(self, ended_count: _Optional[int] = ...) -> None: ...

class WatchClusterRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ...) -> None: ...

class WatchClusterResponse(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: _types_pb2.ClusterView
    def __init__(self, view: _Optional[_Union[_types_pb2.ClusterView, _Mapping]] = ...) -> None: ...

class CreateTableRequest(_message.Message):
    __slots__ = ("session", "spec")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    spec: _types_pb2.TableSpec
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., spec: _Optional[_Union[_types_pb2.TableSpec, _Mapping]] = ...) -> None: ...

class CreateTableResponse(_message.Message):
    __slots__ = ("table", "view_number")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    table: _types_pb2.Table
    view_number: int
    def __init__(self, table: _Optional[_Union[_types_pb2.Table, _Mapping]] = ..., view_number: _Optional[int] = ...) -> None: ...

class SetConsistencyRequest(_message.Message):
    __slots__ = ("session", "table_name", "consistency", "after_clock")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    AFTER_CLOCK_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    table_name: str
    consistency: _types_pb2.Consistency
    after_clock: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., table_name: _Optional[str] = ..., consistency: _Optional[_Union[_types_pb2.Consistency, _Mapping]] = ..., after_clock: _Optional[int] = ...) -> None: ...

class SetConsistencyResponse(_message.Message):
    __slots__ = ("change", "view_number")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    change: _types_pb2.ScheduledChange
    view_number: int
    def __init__(self, change: _Optional[_Union[_types_pb2.ScheduledChange, _Mapping]] = ..., view_number: _Optional[int] = ...) -> None: ...

class PromiseChangeRequest(_message.Message):
    __slots__ = ("session", "table_id", "number", "clock", "outcome")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    table_id: int
    number: int
    clock: int
    outcome: _types_pb2.ChangeOutcome
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., table_id: _Optional[int] = ..., number: _Optional[int] = ..., clock: _Optional[int] = ..., outcome: _Optional[_Union[_types_pb2.ChangeOutcome, str]] = ...) -> None: ...

class PromiseChangeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BackupRequest(_message.Message):
    __slots__ = ("range_id", "assignment_epoch", "backup_node_ids", "is_missing", "hand_over_to_node_id")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKUP_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_MISSING_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_TO_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    assignment_epoch: int
    backup_node_ids: _containers.RepeatedScalarFieldContainer[int]
    is_missing: bool
    hand_over_to_node_id: int
    def __init__(self, range_id: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., backup_node_ids: _Optional[_Iterable[int]] = ..., is_missing: _Optional[bool] = ..., hand_over_to_node_id: _Optional[int] = ...) -> None: ...

class SetBackupsRequest(_message.Message):
    __slots__ = ("session", "requests")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    requests: _containers.RepeatedCompositeFieldContainer[BackupRequest]
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[BackupRequest, _Mapping]]] = ...) -> None: ...

class SetBackupsResponse(_message.Message):
    __slots__ = ("refused_range_ids", "view_number")
    REFUSED_RANGE_IDS_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    refused_range_ids: _containers.RepeatedScalarFieldContainer[int]
    view_number: int
    def __init__(self, refused_range_ids: _Optional[_Iterable[int]] = ..., view_number: _Optional[int] = ...) -> None: ...

class GetClusterStatusRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "progress", "last_heard_ms", "view_number")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_MS_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    node: _types_pb2.Node
    progress: NodeProgress
    last_heard_ms: int
    view_number: int
    def __init__(self, node: _Optional[_Union[_types_pb2.Node, _Mapping]] = ..., progress: _Optional[_Union[NodeProgress, _Mapping]] = ..., last_heard_ms: _Optional[int] = ..., view_number: _Optional[int] = ...) -> None: ...

class GetClusterStatusResponse(_message.Message):
    __slots__ = ("view", "nodes", "replica_count", "min_in_sync", "checkpoints", "kept_values", "data_sets")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_COUNT_FIELD_NUMBER: _ClassVar[int]
    MIN_IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_VALUES_FIELD_NUMBER: _ClassVar[int]
    DATA_SETS_FIELD_NUMBER: _ClassVar[int]
    view: _types_pb2.ClusterView
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    replica_count: int
    min_in_sync: int
    checkpoints: CheckpointHistory
    kept_values: _containers.RepeatedCompositeFieldContainer[KeptValues]
    data_sets: _containers.RepeatedCompositeFieldContainer[DataSetStatus]
    def __init__(self, view: _Optional[_Union[_types_pb2.ClusterView, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., replica_count: _Optional[int] = ..., min_in_sync: _Optional[int] = ..., checkpoints: _Optional[_Union[CheckpointHistory, _Mapping]] = ..., kept_values: _Optional[_Iterable[_Union[KeptValues, _Mapping]]] = ..., data_sets: _Optional[_Iterable[_Union[DataSetStatus, _Mapping]]] = ...) -> None: ...

class KeptValues(_message.Message):
    __slots__ = ("address", "cluster_id", "file", "last_heard_ms")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_MS_FIELD_NUMBER: _ClassVar[int]
    address: str
    cluster_id: str
    file: str
    last_heard_ms: int
    def __init__(self, address: _Optional[str] = ..., cluster_id: _Optional[str] = ..., file: _Optional[str] = ..., last_heard_ms: _Optional[int] = ...) -> None: ...

class ReportKeptValuesRequest(_message.Message):
    __slots__ = ("session", "kept_values")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEPT_VALUES_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    kept_values: KeptValues
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., kept_values: _Optional[_Union[KeptValues, _Mapping]] = ...) -> None: ...

class ReportKeptValuesResponse(_message.Message):
    __slots__ = ("again_ms",)
    AGAIN_MS_FIELD_NUMBER: _ClassVar[int]
    again_ms: int
    def __init__(self, again_ms: _Optional[int] = ...) -> None: ...

class CheckpointHistory(_message.Message):
    __slots__ = ("url", "complete_count", "failed_count", "complete_url", "complete_ms", "failed_number", "failed_reason", "failed_ms", "unknown_before")
    URL_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILED_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_URL_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_MS_FIELD_NUMBER: _ClassVar[int]
    FAILED_NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILED_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILED_MS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_BEFORE_FIELD_NUMBER: _ClassVar[int]
    url: str
    complete_count: int
    failed_count: int
    complete_url: str
    complete_ms: int
    failed_number: int
    failed_reason: str
    failed_ms: int
    unknown_before: bool
    def __init__(self, url: _Optional[str] = ..., complete_count: _Optional[int] = ..., failed_count: _Optional[int] = ..., complete_url: _Optional[str] = ..., complete_ms: _Optional[int] = ..., failed_number: _Optional[int] = ..., failed_reason: _Optional[str] = ..., failed_ms: _Optional[int] = ..., unknown_before: _Optional[bool] = ...) -> None: ...

class CreateCheckpointRequest(_message.Message):
    __slots__ = ("session", "reason", "covered_by", "view_number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COVERED_BY_FIELD_NUMBER: _ClassVar[int]
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    reason: str
    covered_by: int
    view_number: int
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., reason: _Optional[str] = ..., covered_by: _Optional[int] = ..., view_number: _Optional[int] = ...) -> None: ...

class CreateCheckpointResponse(_message.Message):
    __slots__ = ("number", "url", "byte_count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    url: str
    byte_count: int
    def __init__(self, number: _Optional[int] = ..., url: _Optional[str] = ..., byte_count: _Optional[int] = ...) -> None: ...

class JoinCheckpointRequest(_message.Message):
    __slots__ = ("session", "number", "tables", "has_state", "stays", "has_begun")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    number: int
    tables: _containers.RepeatedCompositeFieldContainer[TableProgress]
    has_state: bool
    stays: bool
    has_begun: bool
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., number: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableProgress, _Mapping]]] = ..., has_state: _Optional[bool] = ..., stays: _Optional[bool] = ..., has_begun: _Optional[bool] = ...) -> None: ...

class JoinCheckpointResponse(_message.Message):
    __slots__ = ("must_step", "is_awaited")
    MUST_STEP_FIELD_NUMBER: _ClassVar[int]
    IS_AWAITED_FIELD_NUMBER: _ClassVar[int]
    must_step: bool
    is_awaited: bool
    def __init__(self, must_step: _Optional[bool] = ..., is_awaited: _Optional[bool] = ...) -> None: ...

class WrittenTable(_message.Message):
    __slots__ = ("table_id", "block_count", "clock", "is_torn")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    IS_TORN_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    block_count: int
    clock: int
    is_torn: bool
    def __init__(self, table_id: _Optional[int] = ..., block_count: _Optional[int] = ..., clock: _Optional[int] = ..., is_torn: _Optional[bool] = ...) -> None: ...

class ReportCheckpointPartRequest(_message.Message):
    __slots__ = ("session", "number", "file", "byte_count", "header_sha256", "tables", "problem", "referred_block_count", "referred_byte_count", "bases", "has_parameters")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEADER_SHA256_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REFERRED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFERRED_BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    HAS_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    number: int
    file: str
    byte_count: int
    header_sha256: bytes
    tables: _containers.RepeatedCompositeFieldContainer[WrittenTable]
    problem: str
    referred_block_count: int
    referred_byte_count: int
    bases: _containers.RepeatedScalarFieldContainer[str]
    has_parameters: bool
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., number: _Optional[int] = ..., file: _Optional[str] = ..., byte_count: _Optional[int] = ..., header_sha256: _Optional[bytes] = ..., tables: _Optional[_Iterable[_Union[WrittenTable, _Mapping]]] = ..., problem: _Optional[str] = ..., referred_block_count: _Optional[int] = ..., referred_byte_count: _Optional[int] = ..., bases: _Optional[_Iterable[str]] = ..., has_parameters: _Optional[bool] = ...) -> None: ...

class ReportCheckpointPartResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreCheckpointRequest(_message.Message):
    __slots__ = ("session", "url", "empty")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.SessionIdentity
    url: str
    empty: bool
    def __init__(self, session: _Optional[_Union[_types_pb2.SessionIdentity, _Mapping]] = ..., url: _Optional[str] = ..., empty: _Optional[bool] = ...) -> None: ...

class RestoreCheckpointResponse(_message.Message):
    __slots__ = ("url", "clock")
    URL_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    url: str
    clock: int
    def __init__(self, url: _Optional[str] = ..., clock: _Optional[int] = ...) -> None: ...
