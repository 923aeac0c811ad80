"""Values of `ps_core` to messages of `pushpull.v1` and back.

Rules:
    - Messages come from outside: an unset or unknown enum and an unset oneof are refused by the
      name of the field. `TableSpec.validated` judges a table's spec.
    - Only this file fills in the contract's defaults (KERNEL_KIND_UNSPECIFIED means FAST).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import pairwise
from typing import Any, TypeVar

from ps_core import limits
from ps_core.change import ChangeOutcome, Checkpoint, Join, TableChange, TableCut
from ps_core.cluster_view import (
    BackupRequest,
    ClusterView,
    Node,
    NodeState,
    RangeAssignment,
    Role,
    Session,
)
from ps_core.collective_calls import Round, Share
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.keys import AssignmentEpoch, KeyRange, NodeId, RangeId, Slot, TableId
from ps_core.runs import Run
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import Hyperparameters, Kernels, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import (
    Eviction,
    Reduction,
    RowsSpec,
    RowStorage,
    TableSpec,
    TensorSpec,
    TupleCache,
)
from pushpull.v1 import parameters_pb2, scheduler_pb2, types_pb2

EnumT = TypeVar("EnumT", bound=Enum)
CopyT = TypeVar("CopyT")


def _numbers(kind: type[EnumT], contract: Any, prefix: str) -> dict[EnumT, Any]:
    """The contract's number of each member; its name there begins with `prefix`."""
    return {kind[name.removeprefix(prefix)]: number for name, number in contract.items() if number}


def _inverse(numbers: Mapping[EnumT, int]) -> dict[int, EnumT]:
    return {int(number): value for value, number in numbers.items()}


_ROLES: dict[Role, types_pb2.NodeRole] = _numbers(Role, types_pb2.NodeRole, "NODE_ROLE_")
_STATES = _numbers(NodeState, types_pb2.NodeState, "NODE_STATE_")
_CODECS: dict[Codec, types_pb2.Codec] = _numbers(Codec, types_pb2.Codec, "CODEC_")
_DTYPES = _numbers(DType, types_pb2.Dtype, "DTYPE_")
_OPTIMIZERS = _numbers(OptimizerKind, types_pb2.OptimizerKind, "OPTIMIZER_KIND_")
_KERNELS = _numbers(Kernels, types_pb2.KernelKind, "KERNEL_KIND_")
_EVICTIONS = _numbers(Eviction, types_pb2.EvictionKind, "EVICTION_KIND_")
_STORAGES = _numbers(RowStorage, types_pb2.RowStorageKind, "ROW_STORAGE_KIND_")
_REDUCTIONS = _numbers(Reduction, types_pb2.Reduction, "REDUCTION_")
_OUTCOMES = _numbers(ChangeOutcome, types_pb2.ChangeOutcome, "CHANGE_OUTCOME_")

_ROLE_OF = _inverse(_ROLES)
_STATE_OF = _inverse(_STATES)
_CODEC_OF = _inverse(_CODECS)
_DTYPE_OF = _inverse(_DTYPES)
_OPTIMIZER_OF = _inverse(_OPTIMIZERS)
_KERNELS_OF = _inverse(_KERNELS) | {int(types_pb2.KERNEL_KIND_UNSPECIFIED): Kernels.FAST}
_REDUCTION_OF = _inverse(_REDUCTIONS) | {int(types_pb2.REDUCTION_UNSPECIFIED): Reduction.MEAN}
_EVICTION_OF = _inverse(_EVICTIONS) | {int(types_pb2.EVICTION_KIND_UNSPECIFIED): Eviction.LRU}
_STORAGE_OF = _inverse(_STORAGES) | {int(types_pb2.ROW_STORAGE_KIND_UNSPECIFIED): RowStorage.FULL}
_OUTCOME_OF = _inverse(_OUTCOMES)

_SESSION = ("cluster_id", "timeline", "node_id", "incarnation", "rank", "run")
_NODE = ("node_id", "incarnation", "rank", "address", "silence_ms", "run")
_OPTIMIZER = (
    "nesterov", "amsgrad", "centered", "maximize", "custom_update", "inner_steps", "fragment_count",
)  # fmt: skip
_SPEC = ("name", "element_count", "block_elements", "allow_non_finite", "gate_bytes")
_ROWS = ("partition_count", "seed", "max_row_count", "evict_after")
_CHANGE = ("number", "after_clock", "checkpoint", "is_decided")
_VIEW = (
    "view_number", "cluster_id", "worker_count", "server_count", "finished", "restored_from",
    "next_table_id",
)  # fmt: skip
"""Fields that a value and its message have under one name, as they are."""


def _copy(
    made: Callable[..., CopyT], source: object, fields: Iterable[str], /, **others: Any
) -> CopyT:
    """A value or a message with these fields of `source`, and `others`."""
    return made(**{name: getattr(source, name) for name in fields}, **others)


def _known(values: Mapping[int, EnumT], number: int, field: str) -> EnumT:
    value = values.get(number)
    if value is None:
        raise InvalidConfig(_unknown(values, number, field))
    return value


def _unknown(values: Mapping[int, Enum], number: int, field: str) -> str:
    came = "unset" if number == 0 else f"{number}, which is unknown"
    names = ", ".join(str(value.value) for value in dict.fromkeys(values.values()))
    return f"{field} is {came}; expected one of {names}"


def role_to_proto(role: Role) -> types_pb2.NodeRole:
    return _ROLES[role]


def role_from_proto(number: int, field: str = "role") -> Role:
    """Raises InvalidConfig, naming `field`, for an unset or unknown number."""
    return _known(_ROLE_OF, number, field)


def codec_to_proto(codec: Codec) -> types_pb2.Codec:
    return _CODECS[codec]


def codec_from_proto(number: int) -> Codec:
    """Raises InvalidTensor for an unset or unknown number, because a codec describes a payload. If
    unset has a meaning (a pull), the caller tests for 0 first.
    """
    codec = _CODEC_OF.get(number)
    if codec is None:
        raise InvalidTensor(_unknown(_CODEC_OF, number, "codec"))
    return codec


def session_to_proto(session: Session) -> types_pb2.SessionIdentity:
    others = {"role": _ROLES[session.role], "session_token": session.token}
    return _copy(types_pb2.SessionIdentity, session, _SESSION, **others)


def session_from_proto(message: types_pb2.SessionIdentity) -> Session:
    """The identity in a request, not authenticated yet; InvalidConfig if it has no role."""
    role = role_from_proto(message.role, "session.role")
    return _copy(Session, message, _SESSION, role=role, token=message.session_token)


def hyperparameters_to_proto(values: Hyperparameters) -> list[types_pb2.Hyperparameter]:
    return [types_pb2.Hyperparameter(name=name, value=value) for name, value in values]


def hyperparameters_from_proto(messages: Iterable[types_pb2.Hyperparameter]) -> Hyperparameters:
    """The pairs, sorted by name; InvalidConfig if a name comes twice or is too long, or there are
    too many. `OptimizerSpec.merged` checks the names against the optimizer.
    """
    pairs = tuple(sorted([(message.name, message.value) for message in messages]))
    if not pairs:  # as in most steps
        return ()
    if len(pairs) > limits.MAX_HYPERPARAMETER_COUNT:
        raise InvalidConfig(
            f"hyperparameters has {len(pairs)} entries; expected at most "
            f"{limits.MAX_HYPERPARAMETER_COUNT}"
        )
    longest = max((len(name.encode()) for name, _ in pairs), default=0)
    if longest > limits.MAX_HYPERPARAMETER_NAME_BYTES:
        raise InvalidConfig(
            f"a hyperparameter's name has {longest} bytes; expected at most "
            f"{limits.MAX_HYPERPARAMETER_NAME_BYTES}"
        )
    for (name, _), (following, _) in pairwise(pairs):
        if name == following:
            raise InvalidConfig(f"hyperparameter '{name}' comes twice; expected each name once")
    return pairs


def _optimizer_to_proto(spec: OptimizerSpec) -> types_pb2.OptimizerSpec:
    return _copy(
        types_pb2.OptimizerSpec,
        spec,
        _OPTIMIZER,
        kind=_OPTIMIZERS[spec.kind],
        hyperparameters=hyperparameters_to_proto(spec.hyperparameters),
        kernels=_KERNELS[spec.kernels],
    )


def _optimizer_from_proto(message: types_pb2.OptimizerSpec) -> OptimizerSpec:
    return _copy(
        OptimizerSpec,
        message,
        _OPTIMIZER,
        kind=_known(_OPTIMIZER_OF, message.kind, "optimizer.kind"),
        hyperparameters=hyperparameters_from_proto(message.hyperparameters),
        kernels=_known(_KERNELS_OF, message.kernels, "optimizer.kernels"),
    )


def _initializer_to_proto(initializer: Initializer) -> types_pb2.Initializer:
    if initializer.kind is InitializerKind.ZEROS:
        return types_pb2.Initializer(zeros=types_pb2.ZerosInitializer())
    if initializer.kind is InitializerKind.CONSTANT:
        constant = types_pb2.ConstantInitializer(value=initializer.constant)
        return types_pb2.Initializer(constant=constant)
    if initializer.kind is InitializerKind.INLINE:
        return types_pb2.Initializer(inline=types_pb2.InlineInitializer(values=initializer.inline))
    if initializer.kind is InitializerKind.UNIFORM:
        uniform = types_pb2.UniformInitializer(scale=initializer.scale)
        return types_pb2.Initializer(uniform=uniform)
    if initializer.kind is InitializerKind.NORMAL:
        return types_pb2.Initializer(normal=types_pb2.NormalInitializer(scale=initializer.scale))
    return types_pb2.Initializer(from_rank_zero=types_pb2.FromRankZeroInitializer())


def _initializer_from_proto(message: types_pb2.Initializer) -> Initializer:
    kind = message.WhichOneof("kind")
    if kind is None:
        names = ", ".join(kind.value for kind in InitializerKind)
        raise InvalidConfig(f"initializer.kind is unset; expected one of {names}")
    return Initializer(
        kind=InitializerKind(kind),
        constant=message.constant.value,
        inline=message.inline.values,
        scale=message.uniform.scale or message.normal.scale,
    )


_LONG_LAYOUT_COUNT = 500
_LAYOUTS = TupleCache[types_pb2.TableSpec]()
"""Long layouts as messages."""


def spec_to_proto(spec: TableSpec) -> types_pb2.TableSpec:
    message = _copy(
        types_pb2.TableSpec,
        spec,
        _SPEC,
        dtype=_DTYPES[spec.dtype],
        optimizer=_optimizer_to_proto(spec.optimizer),
        consistency=consistency_to_proto(spec.consistency),
        initializer=_initializer_to_proto(spec.initializer),
        reduction=_REDUCTIONS[spec.reduction],
        rows=None if spec.rows is None else _rows_to_proto(spec.rows),
    )
    message.MergeFrom(_layout_to_proto(spec.tensors))
    return message


def _rows_to_proto(rows: RowsSpec) -> types_pb2.RowsSpec:
    return _copy(
        types_pb2.RowsSpec,
        rows,
        (*_ROWS, "admit_after"),
        eviction=_EVICTIONS[rows.eviction],
        storage=_STORAGES[rows.storage],
    )


def _layout_to_proto(tensors: tuple[TensorSpec, ...]) -> types_pb2.TableSpec:
    """A spec with these tensors alone. A long one is made once, because every view has it again. It
    must not be changed.
    """
    cached = _LAYOUTS.find(tensors)
    if cached is not None:
        return cached
    specs = [_copy(types_pb2.TensorSpec, each, TensorSpec.__slots__) for each in tensors]
    layout = types_pb2.TableSpec(tensors=specs)
    return layout if len(tensors) < _LONG_LAYOUT_COUNT else _LAYOUTS.put(tensors, layout)


def spec_from_proto(message: types_pb2.TableSpec) -> TableSpec:
    """The spec as it came, or InvalidConfig for a field that is unset or unknown;
    `TableSpec.validated` judges it and fills in defaults.
    """
    return _copy(
        TableSpec,
        message,
        _SPEC,
        dtype=_known(_DTYPE_OF, message.dtype, "dtype"),
        optimizer=_optimizer_from_proto(message.optimizer),
        tensors=tuple(
            TensorSpec(tensor.name, tuple(tensor.shape), tensor.offset)
            for tensor in message.tensors
        ),
        consistency=consistency_from_proto(message.consistency),
        initializer=_initializer_from_proto(message.initializer),
        reduction=_known(_REDUCTION_OF, message.reduction, "reduction"),
        rows=_rows_from_proto(message),
    )


def _rows_from_proto(message: types_pb2.TableSpec) -> RowsSpec | None:
    if not message.HasField("rows"):
        return None
    rows = message.rows
    return _copy(
        RowsSpec,
        rows,
        _ROWS,
        eviction=_known(_EVICTION_OF, rows.eviction, "eviction"),
        admit_after=rows.admit_after or 1,
        storage=_known(_STORAGE_OF, rows.storage, "storage"),
    )


def table_to_proto(table: Table) -> types_pb2.Table:
    return types_pb2.Table(
        table_id=table.table_id,
        first_ordinal=table.first_ordinal,
        spec=spec_to_proto(table.spec),
        change=None if table.change is None else change_to_proto(table.change),
        proposed=None if table.proposed is None else change_to_proto(table.proposed),
        joins=map(_join_to_proto, table.joins),
        cut=None if table.cut is None else _copy(types_pb2.TableCut, table.cut, TableCut.__slots__),
        restored_clock=table.restored_clock,
        run=table.run,
    )


def table_from_proto(message: types_pb2.Table) -> Table:
    """Raises InvalidConfig if a field of the spec is unset or unknown."""
    cut = message.cut if message.HasField("cut") else None
    return Table(
        table_id=TableId(message.table_id),
        first_ordinal=message.first_ordinal,
        spec=spec_from_proto(message.spec),
        change=change_from_proto(message.change) if message.HasField("change") else None,
        proposed=change_from_proto(message.proposed) if message.HasField("proposed") else None,
        joins=tuple(map(_join_from_proto, message.joins)),
        cut=None if cut is None else TableCut(cut.checkpoint, cut.after_clock),
        restored_clock=message.restored_clock if message.HasField("restored_clock") else None,
        run=message.run,
    )


def node_to_proto(node: Node) -> types_pb2.Node:
    return _copy(types_pb2.Node, node, _NODE, role=_ROLES[node.role], state=_STATES[node.state])


def node_from_proto(message: types_pb2.Node) -> Node:
    """Raises InvalidConfig if the role or the state is unset or unknown."""
    role = role_from_proto(message.role, "node.role")
    state = _known(_STATE_OF, message.state, "node.state")
    return _copy(Node, message, _NODE, role=role, state=state)


def range_to_proto(assignment: RangeAssignment) -> types_pb2.RangeAssignment:
    """The replicas of a range; node 0 stands for no primary."""
    return types_pb2.RangeAssignment(
        range_id=assignment.range_id,
        begin_slot=assignment.slots.begin,
        end_slot=assignment.slots.end,
        assignment_epoch=assignment.assignment_epoch,
        primary_node_id=assignment.primary or 0,
        backup_node_ids=assignment.backups,
        catching_up_node_ids=assignment.catching_up,
        initial_holder_node_ids=assignment.initial_holders,
        lost=assignment.is_lost,
        term=assignment.term,
        placed_epoch=assignment.placed_epoch,
        hand_over_to_node_id=assignment.hand_over_to or 0,
    )


def range_from_proto(message: types_pb2.RangeAssignment) -> RangeAssignment:
    """The replicas of a range; node 0 stands for no primary."""
    return RangeAssignment(
        range_id=RangeId(message.range_id),
        slots=KeyRange(Slot(message.begin_slot), Slot(message.end_slot)),
        assignment_epoch=AssignmentEpoch(message.assignment_epoch),
        primary=_node_or_none(message.primary_node_id),
        backups=tuple(map(NodeId, message.backup_node_ids)),
        catching_up=tuple(map(NodeId, message.catching_up_node_ids)),
        initial_holders=tuple(map(NodeId, message.initial_holder_node_ids)),
        is_lost=message.lost,
        term=AssignmentEpoch(message.term),
        placed_epoch=AssignmentEpoch(message.placed_epoch),
        hand_over_to=_node_or_none(message.hand_over_to_node_id),
    )


def _node_or_none(node_id: int) -> NodeId | None:
    return NodeId(node_id) if node_id else None


def backup_request_to_proto(backup_request: BackupRequest) -> scheduler_pb2.BackupRequest:
    return scheduler_pb2.BackupRequest(
        range_id=backup_request.range_id,
        assignment_epoch=backup_request.assignment_epoch,
        backup_node_ids=sorted(backup_request.backups),
        is_missing=backup_request.is_missing,
        hand_over_to_node_id=backup_request.hand_over_to or 0,
    )


def backup_request_from_proto(message: scheduler_pb2.BackupRequest) -> BackupRequest:
    """Raises InvalidConfig if a backup is named twice; the scheduler judges the rest."""
    backups = frozenset(map(NodeId, message.backup_node_ids))
    if len(backups) < len(message.backup_node_ids):
        raise InvalidConfig(
            f"backup_node_ids of range {message.range_id} is {list(message.backup_node_ids)}; "
            "expected each node once"
        )
    return BackupRequest(
        RangeId(message.range_id),
        AssignmentEpoch(message.assignment_epoch),
        backups,
        message.is_missing,
        _node_or_none(message.hand_over_to_node_id),
    )


def run_to_proto(run: Run) -> types_pb2.Run:
    return types_pb2.Run(
        name=run.name, worker_count=run.worker_count, ended=run.has_ended, removed=run.is_removed
    )


def view_to_proto(view: ClusterView) -> types_pb2.ClusterView:
    running = view.checkpoint
    return _copy(
        types_pb2.ClusterView,
        view,
        _VIEW,
        nodes=map(node_to_proto, view.nodes),
        ranges=map(range_to_proto, view.ranges),
        tables=map(table_to_proto, view.tables),
        checkpoint=running and _copy(types_pb2.Checkpoint, running, Checkpoint.__slots__),
        runs=map(run_to_proto, view.runs),
    )


def view_from_proto(message: types_pb2.ClusterView) -> ClusterView:
    """Raises InvalidConfig if a field is unset or unknown."""
    running = message.checkpoint if message.HasField("checkpoint") else None
    return _copy(
        ClusterView,
        message,
        _VIEW,
        nodes=tuple(map(node_from_proto, message.nodes)),
        ranges=tuple(map(range_from_proto, message.ranges)),
        tables=tuple(map(table_from_proto, message.tables)),
        checkpoint=None if running is None else _copy(Checkpoint, running, Checkpoint.__slots__),
        runs=tuple(Run(run.name, run.worker_count, run.ended, run.removed) for run in message.runs),
    )


_STALE = {
    StalePolicy.REJECT: ("bound",),
    StalePolicy.DAMP: ("alpha",),
    StalePolicy.DIVIDE: (),
    StalePolicy.COMPENSATE: ("strength", "adaptive"),
}
"""Fields of each policy's message."""


def consistency_to_proto(consistency: Consistency) -> types_pb2.Consistency:
    if consistency.mode is Mode.BSP:
        bsp = _copy(types_pb2.BulkSynchronous, consistency, ("backup_workers", "grace_ms"))
        return types_pb2.Consistency(bsp=bsp)
    if consistency.mode is Mode.SSP:
        ssp = _copy(types_pb2.BoundedStaleness, consistency, ("staleness", "least", "most"))
        return types_pb2.Consistency(ssp=ssp)
    message = types_pb2.Consistency(asp=types_pb2.Asynchronous())
    if consistency.policy is not StalePolicy.ACCEPT:
        stale = getattr(message.asp, consistency.policy.value)
        stale.SetInParent()
        for name in _STALE[consistency.policy]:
            setattr(stale, name, getattr(consistency, name))
    return message


def consistency_from_proto(message: types_pb2.Consistency) -> Consistency:
    """The setting as it came, for `Consistency.validated`; InvalidConfig without a mode."""
    mode = message.WhichOneof("mode")
    if mode is None:
        names = ", ".join(mode.value for mode in Mode)
        raise InvalidConfig(f"consistency.mode is unset; expected one of {names}")
    policy = message.asp.WhichOneof("stale") if mode == "asp" else None
    return Consistency(
        Mode(mode),
        backup_workers=message.bsp.backup_workers,
        grace_ms=message.bsp.grace_ms,
        staleness=message.ssp.staleness,
        policy=StalePolicy.ACCEPT if policy is None else StalePolicy(policy),
        bound=message.asp.reject.bound,
        alpha=message.asp.damp.alpha,
        strength=message.asp.compensate.strength,
        adaptive=message.asp.compensate.adaptive,
        least=message.ssp.least,
        most=message.ssp.most,
    )


def change_to_proto(change: TableChange) -> types_pb2.ScheduledChange:
    return _copy(
        types_pb2.ScheduledChange,
        change,
        _CHANGE,
        consistency=consistency_to_proto(change.consistency),
        join=None if change.join is None else _join_to_proto(change.join),
    )


def change_from_proto(message: types_pb2.ScheduledChange) -> TableChange:
    """Raises InvalidConfig if the consistency is unset."""
    consistency = consistency_from_proto(message.consistency)
    join = _join_from_proto(message.join) if message.HasField("join") else None
    return _copy(TableChange, message, _CHANGE, consistency=consistency, join=join)


def change_outcome_to_proto(outcome: ChangeOutcome | None) -> types_pb2.ChangeOutcome:
    """None: the change is not decided."""
    return types_pb2.CHANGE_OUTCOME_UNSPECIFIED if outcome is None else _OUTCOMES[outcome]


def change_outcome_from_proto(number: types_pb2.ChangeOutcome) -> ChangeOutcome | None:
    """None: the change is not decided."""
    return _OUTCOME_OF.get(number)


def _join_to_proto(join: Join) -> types_pb2.WorkerJoin:
    return _copy(types_pb2.WorkerJoin, join, Join.__slots__)


def _join_from_proto(message: types_pb2.WorkerJoin) -> Join:
    return _copy(Join, message, Join.__slots__)


def share_to_proto(share: Share) -> parameters_pb2.CollectiveShare:
    return _copy(parameters_pb2.CollectiveShare, share, Share.__slots__)


def share_from_proto(message: parameters_pb2.CollectiveShare) -> Share:
    call_bytes, payload_bytes = len(message.call.encode()), len(message.payload)
    if not 0 < call_bytes <= limits.MAX_COLLECTIVE_CALL_BYTES:
        raise InvalidConfig(
            f"share.call has {call_bytes} bytes; expected 1 to {limits.MAX_COLLECTIVE_CALL_BYTES}"
        )
    if payload_bytes > limits.MAX_COLLECTIVE_BYTES:
        raise InvalidTensor(
            f"share.payload has {payload_bytes} bytes; expected at most "
            f"{limits.MAX_COLLECTIVE_BYTES}"
        )
    return _copy(Share, message, Share.__slots__)


def round_to_proto(ended: Round) -> parameters_pb2.CollectiveRound:
    return parameters_pb2.CollectiveRound(
        number=ended.number, shares=map(share_to_proto, ended.shares), problem=ended.problem
    )


def round_from_proto(message: parameters_pb2.CollectiveRound) -> Round:
    """A round that has ended; InvalidConfig or InvalidTensor if it is none."""
    if not message.number or not message.shares:
        raise InvalidConfig("a round has no number or no shares; expected both")
    shares = tuple(map(share_from_proto, message.shares))
    return Round(message.number, shares, message.problem)
