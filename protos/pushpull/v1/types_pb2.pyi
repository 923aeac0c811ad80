from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_ROLE_UNSPECIFIED: _ClassVar[NodeRole]
    NODE_ROLE_SERVER: _ClassVar[NodeRole]
    NODE_ROLE_WORKER: _ClassVar[NodeRole]
    NODE_ROLE_READER: _ClassVar[NodeRole]
    NODE_ROLE_OPERATOR: _ClassVar[NodeRole]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_FP32: _ClassVar[Codec]
    CODEC_FP16: _ClassVar[Codec]
    CODEC_BF16: _ClassVar[Codec]
    CODEC_FP64: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_SIGN: _ClassVar[Codec]
    CODEC_SPARSE: _ClassVar[Codec]
    CODEC_LOW_RANK: _ClassVar[Codec]

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT64: _ClassVar[Dtype]

class OptimizerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPTIMIZER_KIND_UNSPECIFIED: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_SGD: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_ADAM: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_ADAMW: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_ADAGRAD: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_RMSPROP: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_AGGREGATE: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_ASSIGN: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_ADD: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_CUSTOM: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_ROWWISE_ADAGRAD: _ClassVar[OptimizerKind]
    OPTIMIZER_KIND_FTRL: _ClassVar[OptimizerKind]

class KernelKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KERNEL_KIND_UNSPECIFIED: _ClassVar[KernelKind]
    KERNEL_KIND_FAST: _ClassVar[KernelKind]
    KERNEL_KIND_EXACT: _ClassVar[KernelKind]

class Reduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCTION_UNSPECIFIED: _ClassVar[Reduction]
    REDUCTION_MEAN: _ClassVar[Reduction]
    REDUCTION_SUM: _ClassVar[Reduction]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_TENSOR: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_KEYS: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_CONFIG: _ClassVar[ErrorCode]
    ERROR_CODE_TABLE_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_CODE_TABLE_EXISTS: _ClassVar[ErrorCode]
    ERROR_CODE_STALE_ASSIGNMENT: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_OWNER: _ClassVar[ErrorCode]
    ERROR_CODE_FENCED: _ClassVar[ErrorCode]
    ERROR_CODE_RECOVERING: _ClassVar[ErrorCode]
    ERROR_CODE_DRAINING: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_WAIT_EXPIRED: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_PERMITTED: _ClassVar[ErrorCode]
    ERROR_CODE_ALREADY_PAST: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_UPDATE_FAILED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_CHECKPOINT: _ClassVar[ErrorCode]
    ERROR_CODE_EDIT_REFUSED: _ClassVar[ErrorCode]
    ERROR_CODE_VALUES_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_TABLE_FULL: _ClassVar[ErrorCode]

class RowStorageKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STORAGE_KIND_UNSPECIFIED: _ClassVar[RowStorageKind]
    ROW_STORAGE_KIND_FULL: _ClassVar[RowStorageKind]
    ROW_STORAGE_KIND_FLOAT16: _ClassVar[RowStorageKind]
    ROW_STORAGE_KIND_BFLOAT16: _ClassVar[RowStorageKind]
    ROW_STORAGE_KIND_INT8: _ClassVar[RowStorageKind]

class EvictionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVICTION_KIND_UNSPECIFIED: _ClassVar[EvictionKind]
    EVICTION_KIND_LRU: _ClassVar[EvictionKind]
    EVICTION_KIND_LFU: _ClassVar[EvictionKind]

class ChangeOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANGE_OUTCOME_UNSPECIFIED: _ClassVar[ChangeOutcome]
    CHANGE_OUTCOME_TAKEN: _ClassVar[ChangeOutcome]
    CHANGE_OUTCOME_GIVEN_UP: _ClassVar[ChangeOutcome]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_ALIVE: _ClassVar[NodeState]
    NODE_STATE_SILENT: _ClassVar[NodeState]
    NODE_STATE_LEFT: _ClassVar[NodeState]
    NODE_STATE_GONE: _ClassVar[NodeState]
NODE_ROLE_UNSPECIFIED: NodeRole
NODE_ROLE_SERVER: NodeRole
NODE_ROLE_WORKER: NodeRole
NODE_ROLE_READER: NodeRole
NODE_ROLE_OPERATOR: NodeRole
CODEC_UNSPECIFIED: Codec
CODEC_FP32: Codec
CODEC_FP16: Codec
CODEC_BF16: Codec
CODEC_FP64: Codec
CODEC_INT8: Codec
CODEC_SIGN: Codec
CODEC_SPARSE: Codec
CODEC_LOW_RANK: Codec
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_FLOAT16: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT64: Dtype
OPTIMIZER_KIND_UNSPECIFIED: OptimizerKind
OPTIMIZER_KIND_SGD: OptimizerKind
OPTIMIZER_KIND_ADAM: OptimizerKind
OPTIMIZER_KIND_ADAMW: OptimizerKind
OPTIMIZER_KIND_ADAGRAD: OptimizerKind
OPTIMIZER_KIND_RMSPROP: OptimizerKind
OPTIMIZER_KIND_AGGREGATE: OptimizerKind
OPTIMIZER_KIND_ASSIGN: OptimizerKind
OPTIMIZER_KIND_ADD: OptimizerKind
OPTIMIZER_KIND_CUSTOM: OptimizerKind
OPTIMIZER_KIND_ROWWISE_ADAGRAD: OptimizerKind
OPTIMIZER_KIND_FTRL: OptimizerKind
KERNEL_KIND_UNSPECIFIED: KernelKind
KERNEL_KIND_FAST: KernelKind
KERNEL_KIND_EXACT: KernelKind
REDUCTION_UNSPECIFIED: Reduction
REDUCTION_MEAN: Reduction
REDUCTION_SUM: Reduction
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_TENSOR: ErrorCode
ERROR_CODE_INVALID_KEYS: ErrorCode
ERROR_CODE_INVALID_CONFIG: ErrorCode
ERROR_CODE_TABLE_NOT_FOUND: ErrorCode
ERROR_CODE_TABLE_EXISTS: ErrorCode
ERROR_CODE_STALE_ASSIGNMENT: ErrorCode
ERROR_CODE_NOT_OWNER: ErrorCode
ERROR_CODE_FENCED: ErrorCode
ERROR_CODE_RECOVERING: ErrorCode
ERROR_CODE_DRAINING: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_WAIT_EXPIRED: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_NOT_PERMITTED: ErrorCode
ERROR_CODE_ALREADY_PAST: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_UPDATE_FAILED: ErrorCode
ERROR_CODE_INVALID_CHECKPOINT: ErrorCode
ERROR_CODE_EDIT_REFUSED: ErrorCode
ERROR_CODE_VALUES_LOST: ErrorCode
ERROR_CODE_TABLE_FULL: ErrorCode
ROW_STORAGE_KIND_UNSPECIFIED: RowStorageKind
ROW_STORAGE_KIND_FULL: RowStorageKind
ROW_STORAGE_KIND_FLOAT16: RowStorageKind
ROW_STORAGE_KIND_BFLOAT16: RowStorageKind
ROW_STORAGE_KIND_INT8: RowStorageKind
EVICTION_KIND_UNSPECIFIED: EvictionKind
EVICTION_KIND_LRU: EvictionKind
EVICTION_KIND_LFU: EvictionKind
CHANGE_OUTCOME_UNSPECIFIED: ChangeOutcome
CHANGE_OUTCOME_TAKEN: ChangeOutcome
CHANGE_OUTCOME_GIVEN_UP: ChangeOutcome
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_ALIVE: NodeState
NODE_STATE_SILENT: NodeState
NODE_STATE_LEFT: NodeState
NODE_STATE_GONE: NodeState

class Error(_message.Message):
    __slots__ = ("code", "message", "retry_after_ms", "clock", "is_foreign")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    IS_FOREIGN_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    retry_after_ms: int
    clock: int
    is_foreign: bool
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., clock: _Optional[int] = ..., is_foreign: _Optional[bool] = ...) -> None: ...

class SessionIdentity(_message.Message):
    __slots__ = ("cluster_id", "timeline", "node_id", "incarnation", "role", "rank", "session_token", "run")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    timeline: bytes
    node_id: int
    incarnation: int
    role: NodeRole
    rank: int
    session_token: bytes
    run: str
    def __init__(self, cluster_id: _Optional[str] = ..., timeline: _Optional[bytes] = ..., node_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[NodeRole, str]] = ..., rank: _Optional[int] = ..., session_token: _Optional[bytes] = ..., run: _Optional[str] = ...) -> None: ...

class Hyperparameter(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("kind", "hyperparameters", "nesterov", "amsgrad", "centered", "maximize", "kernels", "custom_update", "inner_steps", "fragment_count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NESTEROV_FIELD_NUMBER: _ClassVar[int]
    AMSGRAD_FIELD_NUMBER: _ClassVar[int]
    CENTERED_FIELD_NUMBER: _ClassVar[int]
    MAXIMIZE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_UPDATE_FIELD_NUMBER: _ClassVar[int]
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: OptimizerKind
    hyperparameters: _containers.RepeatedCompositeFieldContainer[Hyperparameter]
    nesterov: bool
    amsgrad: bool
    centered: bool
    maximize: bool
    kernels: KernelKind
    custom_update: str
    inner_steps: int
    fragment_count: int
    def __init__(self, kind: _Optional[_Union[OptimizerKind, str]] = ..., hyperparameters: _Optional[_Iterable[_Union[Hyperparameter, _Mapping]]] = ..., nesterov: _Optional[bool] = ..., amsgrad: _Optional[bool] = ..., centered: _Optional[bool] = ..., maximize: _Optional[bool] = ..., kernels: _Optional[_Union[KernelKind, str]] = ..., custom_update: _Optional[str] = ..., inner_steps: _Optional[int] = ..., fragment_count: _Optional[int] = ...) -> None: ...

class BulkSynchronous(_message.Message):
    __slots__ = ("backup_workers", "grace_ms")
    BACKUP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    backup_workers: int
    grace_ms: int
    def __init__(self, backup_workers: _Optional[int] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class BoundedStaleness(_message.Message):
    __slots__ = ("staleness", "least", "most")
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    staleness: int
    least: int
    most: int
    def __init__(self, staleness: _Optional[int] = ..., least: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class RejectStale(_message.Message):
    __slots__ = ("bound",)
    BOUND_FIELD_NUMBER: _ClassVar[int]
    bound: int
    def __init__(self, bound: _Optional[int] = ...) -> None: ...

class DampStale(_message.Message):
    __slots__ = ("alpha",)
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    alpha: float
    def __init__(self, alpha: _Optional[float] = ...) -> None: ...

class DivideStale(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompensateDelay(_message.Message):
    __slots__ = ("strength", "adaptive")
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    strength: float
    adaptive: bool
    def __init__(self, strength: _Optional[float] = ..., adaptive: _Optional[bool] = ...) -> None: ...

class Asynchronous(_message.Message):
    __slots__ = ("reject", "damp", "divide", "compensate")
    REJECT_FIELD_NUMBER: _ClassVar[int]
    DAMP_FIELD_NUMBER: _ClassVar[int]
    DIVIDE_FIELD_NUMBER: _ClassVar[int]
    COMPENSATE_FIELD_NUMBER: _ClassVar[int]
    reject: RejectStale
    damp: DampStale
    divide: DivideStale
    compensate: CompensateDelay
    def __init__(self, reject: _Optional[_Union[RejectStale, _Mapping]] = ..., damp: _Optional[_Union[DampStale, _Mapping]] = ..., divide: _Optional[_Union[DivideStale, _Mapping]] = ..., compensate: _Optional[_Union[CompensateDelay, _Mapping]] = ...) -> None: ...

class Consistency(_message.Message):
    __slots__ = ("bsp", "asp", "ssp")
    BSP_FIELD_NUMBER: _ClassVar[int]
    ASP_FIELD_NUMBER: _ClassVar[int]
    SSP_FIELD_NUMBER: _ClassVar[int]
    bsp: BulkSynchronous
    asp: Asynchronous
    ssp: BoundedStaleness
    def __init__(self, bsp: _Optional[_Union[BulkSynchronous, _Mapping]] = ..., asp: _Optional[_Union[Asynchronous, _Mapping]] = ..., ssp: _Optional[_Union[BoundedStaleness, _Mapping]] = ...) -> None: ...

class ZerosInitializer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConstantInitializer(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class InlineInitializer(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...

class FromRankZeroInitializer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Initializer(_message.Message):
    __slots__ = ("zeros", "constant", "inline", "from_rank_zero", "uniform", "normal")
    ZEROS_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    FROM_RANK_ZERO_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    NORMAL_FIELD_NUMBER: _ClassVar[int]
    zeros: ZerosInitializer
    constant: ConstantInitializer
    inline: InlineInitializer
    from_rank_zero: FromRankZeroInitializer
    uniform: UniformInitializer
    normal: NormalInitializer
    def __init__(self, zeros: _Optional[_Union[ZerosInitializer, _Mapping]] = ..., constant: _Optional[_Union[ConstantInitializer, _Mapping]] = ..., inline: _Optional[_Union[InlineInitializer, _Mapping]] = ..., from_rank_zero: _Optional[_Union[FromRankZeroInitializer, _Mapping]] = ..., uniform: _Optional[_Union[UniformInitializer, _Mapping]] = ..., normal: _Optional[_Union[NormalInitializer, _Mapping]] = ...) -> None: ...

class UniformInitializer(_message.Message):
    __slots__ = ("scale",)
    SCALE_FIELD_NUMBER: _ClassVar[int]
    scale: float
    def __init__(self, scale: _Optional[float] = ...) -> None: ...

class NormalInitializer(_message.Message):
    __slots__ = ("scale",)
    SCALE_FIELD_NUMBER: _ClassVar[int]
    scale: float
    def __init__(self, scale: _Optional[float] = ...) -> None: ...

class RowsSpec(_message.Message):
    __slots__ = ("partition_count", "seed", "max_row_count", "eviction", "evict_after", "admit_after", "storage")
    PARTITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    EVICT_AFTER_FIELD_NUMBER: _ClassVar[int]
    ADMIT_AFTER_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    partition_count: int
    seed: int
    max_row_count: int
    eviction: EvictionKind
    evict_after: int
    admit_after: int
    storage: RowStorageKind
    def __init__(self, partition_count: _Optional[int] = ..., seed: _Optional[int] = ..., max_row_count: _Optional[int] = ..., eviction: _Optional[_Union[EvictionKind, str]] = ..., evict_after: _Optional[int] = ..., admit_after: _Optional[int] = ..., storage: _Optional[_Union[RowStorageKind, str]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "dtype", "element_count", "block_elements", "tensors", "optimizer", "consistency", "initializer", "reduction", "allow_non_finite", "gate_bytes", "rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    GATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: Dtype
    element_count: int
    block_elements: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    optimizer: OptimizerSpec
    consistency: Consistency
    initializer: Initializer
    reduction: Reduction
    allow_non_finite: bool
    gate_bytes: int
    rows: RowsSpec
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., element_count: _Optional[int] = ..., block_elements: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., initializer: _Optional[_Union[Initializer, _Mapping]] = ..., reduction: _Optional[_Union[Reduction, str]] = ..., allow_non_finite: _Optional[bool] = ..., gate_bytes: _Optional[int] = ..., rows: _Optional[_Union[RowsSpec, _Mapping]] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("table_id", "first_ordinal", "spec", "change", "proposed", "joins", "cut", "restored_clock", "run")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    RESTORED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    first_ordinal: int
    spec: TableSpec
    change: ScheduledChange
    proposed: ScheduledChange
    joins: _containers.RepeatedCompositeFieldContainer[WorkerJoin]
    cut: TableCut
    restored_clock: int
    run: str
    def __init__(self, table_id: _Optional[int] = ..., first_ordinal: _Optional[int] = ..., spec: _Optional[_Union[TableSpec, _Mapping]] = ..., change: _Optional[_Union[ScheduledChange, _Mapping]] = ..., proposed: _Optional[_Union[ScheduledChange, _Mapping]] = ..., joins: _Optional[_Iterable[_Union[WorkerJoin, _Mapping]]] = ..., cut: _Optional[_Union[TableCut, _Mapping]] = ..., restored_clock: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class TableCut(_message.Message):
    __slots__ = ("checkpoint", "after_clock")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    AFTER_CLOCK_FIELD_NUMBER: _ClassVar[int]
    checkpoint: int
    after_clock: int
    def __init__(self, checkpoint: _Optional[int] = ..., after_clock: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("number", "url", "is_cut", "base")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    number: int
    url: str
    is_cut: bool
    base: int
    def __init__(self, number: _Optional[int] = ..., url: _Optional[str] = ..., is_cut: _Optional[bool] = ..., base: _Optional[int] = ...) -> None: ...

class WorkerJoin(_message.Message):
    __slots__ = ("rank", "incarnation", "after_clock")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_CLOCK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    after_clock: int
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., after_clock: _Optional[int] = ...) -> None: ...

class ScheduledChange(_message.Message):
    __slots__ = ("number", "after_clock", "consistency", "join", "checkpoint", "is_decided")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AFTER_CLOCK_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    IS_DECIDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    after_clock: int
    consistency: Consistency
    join: WorkerJoin
    checkpoint: int
    is_decided: bool
    def __init__(self, number: _Optional[int] = ..., after_clock: _Optional[int] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., join: _Optional[_Union[WorkerJoin, _Mapping]] = ..., checkpoint: _Optional[int] = ..., is_decided: _Optional[bool] = ...) -> None: ...

class RangeAssignment(_message.Message):
    __slots__ = ("range_id", "begin_slot", "end_slot", "assignment_epoch", "primary_node_id", "backup_node_ids", "catching_up_node_ids", "initial_holder_node_ids", "lost", "term", "placed_epoch", "hand_over_to_node_id")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SLOT_FIELD_NUMBER: _ClassVar[int]
    END_SLOT_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BACKUP_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    CATCHING_UP_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_HOLDER_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PLACED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_TO_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    begin_slot: int
    end_slot: int
    assignment_epoch: int
    primary_node_id: int
    backup_node_ids: _containers.RepeatedScalarFieldContainer[int]
    catching_up_node_ids: _containers.RepeatedScalarFieldContainer[int]
    initial_holder_node_ids: _containers.RepeatedScalarFieldContainer[int]
    lost: bool
    term: int
    placed_epoch: int
    hand_over_to_node_id: int
    def __init__(self, range_id: _Optional[int] = ..., begin_slot: _Optional[int] = ..., end_slot: _Optional[int] = ..., assignment_epoch: _Optional[int] = ..., primary_node_id: _Optional[int] = ..., backup_node_ids: _Optional[_Iterable[int]] = ..., catching_up_node_ids: _Optional[_Iterable[int]] = ..., initial_holder_node_ids: _Optional[_Iterable[int]] = ..., lost: _Optional[bool] = ..., term: _Optional[int] = ..., placed_epoch: _Optional[int] = ..., hand_over_to_node_id: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "incarnation", "role", "rank", "address", "state", "silence_ms", "run")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SILENCE_MS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    incarnation: int
    role: NodeRole
    rank: int
    address: str
    state: NodeState
    silence_ms: int
    run: str
    def __init__(self, node_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[NodeRole, str]] = ..., rank: _Optional[int] = ..., address: _Optional[str] = ..., state: _Optional[_Union[NodeState, str]] = ..., silence_ms: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("name", "worker_count", "ended", "removed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    name: str
    worker_count: int
    ended: bool
    removed: bool
    def __init__(self, name: _Optional[str] = ..., worker_count: _Optional[int] = ..., ended: _Optional[bool] = ..., removed: _Optional[bool] = ...) -> None: ...

class ClusterView(_message.Message):
    __slots__ = ("view_number", "cluster_id", "worker_count", "server_count", "nodes", "ranges", "tables", "finished", "checkpoint", "restored_from", "runs", "next_table_id")
    VIEW_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    SERVER_COUNT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    view_number: int
    cluster_id: str
    worker_count: int
    server_count: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    ranges: _containers.RepeatedCompositeFieldContainer[RangeAssignment]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    finished: bool
    checkpoint: Checkpoint
    restored_from: str
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    next_table_id: int
    def __init__(self, view_number: _Optional[int] = ..., cluster_id: _Optional[str] = ..., worker_count: _Optional[int] = ..., server_count: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[RangeAssignment, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., finished: _Optional[bool] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., restored_from: _Optional[str] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., next_table_id: _Optional[int] = ...) -> None: ...
