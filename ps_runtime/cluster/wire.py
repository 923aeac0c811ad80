"""Values of `ps_core` to messages of `pushpull.v1` and back.

Rules:
    - Messages come from outside: an unset or unknown enum and an unset oneof are refused by the
      name of the field. `TableSpec.validated` judges a table's spec.
    - Only this file fills in the contract's defaults (KERNEL_KIND_UNSPECIFIED means FAST).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import pairwise
from typing import TypeVar

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
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.keys import (
    AssignmentEpoch,
    Incarnation,
    KeyRange,
    NodeId,
    RangeId,
    Slot,
    TableId,
)
from ps_core.runs import Run
from ps_core.tables import (
    Codec,
    DType,
    Hyperparameters,
    Initializer,
    InitializerKind,
    Kernels,
    OptimizerKind,
    OptimizerSpec,
    Reduction,
    Table,
    TableSpec,
    TensorSpec,
)
from pushpull.v1 import scheduler_pb2, types_pb2

EnumT = TypeVar("EnumT", bound=Enum)

_ROLES = {
    Role.SERVER: types_pb2.NODE_ROLE_SERVER,
    Role.WORKER: types_pb2.NODE_ROLE_WORKER,
    Role.READER: types_pb2.NODE_ROLE_READER,
    Role.OPERATOR: types_pb2.NODE_ROLE_OPERATOR,
}
_STATES = {
    NodeState.ALIVE: types_pb2.NODE_STATE_ALIVE,
    NodeState.SILENT: types_pb2.NODE_STATE_SILENT,
    NodeState.LEFT: types_pb2.NODE_STATE_LEFT,
    NodeState.GONE: types_pb2.NODE_STATE_GONE,
}
_CODECS = {
    Codec.FP32: types_pb2.CODEC_FP32,
    Codec.FP16: types_pb2.CODEC_FP16,
    Codec.BF16: types_pb2.CODEC_BF16,
    Codec.FP64: types_pb2.CODEC_FP64,
}
_DTYPES = {
    DType.FLOAT32: types_pb2.DTYPE_FLOAT32,
    DType.FLOAT16: types_pb2.DTYPE_FLOAT16,
    DType.BFLOAT16: types_pb2.DTYPE_BFLOAT16,
    DType.FLOAT64: types_pb2.DTYPE_FLOAT64,
}
_OPTIMIZERS = {
    OptimizerKind.SGD: types_pb2.OPTIMIZER_KIND_SGD,
    OptimizerKind.ADAM: types_pb2.OPTIMIZER_KIND_ADAM,
    OptimizerKind.ADAMW: types_pb2.OPTIMIZER_KIND_ADAMW,
    OptimizerKind.ADAGRAD: types_pb2.OPTIMIZER_KIND_ADAGRAD,
    OptimizerKind.RMSPROP: types_pb2.OPTIMIZER_KIND_RMSPROP,
    OptimizerKind.AGGREGATE: types_pb2.OPTIMIZER_KIND_AGGREGATE,
    OptimizerKind.ASSIGN: types_pb2.OPTIMIZER_KIND_ASSIGN,
    OptimizerKind.ADD: types_pb2.OPTIMIZER_KIND_ADD,
    OptimizerKind.CUSTOM: types_pb2.OPTIMIZER_KIND_CUSTOM,
}
_KERNELS = {
    Kernels.FAST: types_pb2.KERNEL_KIND_FAST,
    Kernels.EXACT: types_pb2.KERNEL_KIND_EXACT,
}
_REDUCTIONS = {
    Reduction.MEAN: types_pb2.REDUCTION_MEAN,
    Reduction.SUM: types_pb2.REDUCTION_SUM,
}


def _inverse(numbers: Mapping[EnumT, int]) -> dict[int, EnumT]:
    return {int(number): value for value, number in numbers.items()}


_ROLE_OF = _inverse(_ROLES)
_STATE_OF = _inverse(_STATES)
_CODEC_OF = _inverse(_CODECS)
_DTYPE_OF = _inverse(_DTYPES)
_OPTIMIZER_OF = _inverse(_OPTIMIZERS)
_KERNELS_OF = _inverse(_KERNELS) | {int(types_pb2.KERNEL_KIND_UNSPECIFIED): Kernels.FAST}
_REDUCTION_OF = _inverse(_REDUCTIONS) | {int(types_pb2.REDUCTION_UNSPECIFIED): Reduction.MEAN}


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


def codec_from_proto(number: int, field: str = "codec") -> Codec:
    """Raises InvalidTensor for an unset or unknown number, because a codec describes a payload.

    If unset has a meaning (a pull), the caller tests for 0 first.
    """
    codec = _CODEC_OF.get(number)
    if codec is None:
        raise InvalidTensor(_unknown(_CODEC_OF, number, field))
    return codec


def dtype_to_proto(dtype: DType) -> types_pb2.Dtype:
    return _DTYPES[dtype]


def dtype_from_proto(number: int, field: str = "dtype") -> DType:
    """Raises InvalidConfig, naming `field`, for an unset or unknown number."""
    return _known(_DTYPE_OF, number, field)


def session_to_proto(session: Session) -> types_pb2.SessionIdentity:
    return types_pb2.SessionIdentity(
        cluster_id=session.cluster_id,
        timeline=session.timeline,
        node_id=session.node_id,
        incarnation=session.incarnation,
        role=role_to_proto(session.role),
        rank=session.rank,
        session_token=session.token,
        run=session.run,
    )


def session_from_proto(message: types_pb2.SessionIdentity) -> Session:
    """The identity in a request, not authenticated yet; InvalidConfig if it has no role."""
    return Session(
        cluster_id=message.cluster_id,
        timeline=message.timeline,
        node_id=NodeId(message.node_id),
        incarnation=Incarnation(message.incarnation),
        role=role_from_proto(message.role, "session.role"),
        rank=message.rank,
        token=message.session_token,
        run=message.run,
    )


def hyperparameters_to_proto(values: Hyperparameters) -> list[types_pb2.Hyperparameter]:
    return [types_pb2.Hyperparameter(name=name, value=value) for name, value in values]


def hyperparameters_from_proto(messages: Iterable[types_pb2.Hyperparameter]) -> Hyperparameters:
    """The pairs, sorted by name. `OptimizerSpec.merged` checks the names against the optimizer.

    Raises:
        InvalidConfig: a name comes twice or is too long, or there are more than
            limits.MAX_HYPERPARAMETER_COUNT.
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


def optimizer_to_proto(spec: OptimizerSpec) -> types_pb2.OptimizerSpec:
    return types_pb2.OptimizerSpec(
        kind=_OPTIMIZERS[spec.kind],
        hyperparameters=hyperparameters_to_proto(spec.hyperparameters),
        nesterov=spec.nesterov,
        amsgrad=spec.amsgrad,
        centered=spec.centered,
        maximize=spec.maximize,
        kernels=_KERNELS[spec.kernels],
        custom_update=spec.custom_update,
    )


def optimizer_from_proto(message: types_pb2.OptimizerSpec) -> OptimizerSpec:
    """Raises InvalidConfig, naming a field that is unset or unknown."""
    return OptimizerSpec(
        kind=_known(_OPTIMIZER_OF, message.kind, "optimizer.kind"),
        hyperparameters=hyperparameters_from_proto(message.hyperparameters),
        nesterov=message.nesterov,
        amsgrad=message.amsgrad,
        centered=message.centered,
        maximize=message.maximize,
        kernels=_known(_KERNELS_OF, message.kernels, "optimizer.kernels"),
        custom_update=message.custom_update,
    )


def _initializer_to_proto(initializer: Initializer) -> types_pb2.Initializer:
    if initializer.kind is InitializerKind.ZEROS:
        return types_pb2.Initializer(zeros=types_pb2.ZerosInitializer())
    if initializer.kind is InitializerKind.CONSTANT:
        constant = types_pb2.ConstantInitializer(value=initializer.constant)
        return types_pb2.Initializer(constant=constant)
    if initializer.kind is InitializerKind.INLINE:
        return types_pb2.Initializer(inline=types_pb2.InlineInitializer(values=initializer.inline))
    return types_pb2.Initializer(from_rank_zero=types_pb2.FromRankZeroInitializer())


def _initializer_from_proto(message: types_pb2.Initializer) -> Initializer:
    kind = message.WhichOneof("kind")
    if kind is None:
        names = ", ".join(kind.value for kind in InitializerKind)
        raise InvalidConfig(f"initializer.kind is unset; expected one of {names}")
    return Initializer(
        kind=InitializerKind(kind), constant=message.constant.value, inline=message.inline.values
    )


_LONG_LAYOUT_COUNT = 500
_MAX_LAYOUT_COUNT = 64
_LAYOUTS: dict[int, tuple[tuple[TensorSpec, ...], types_pb2.TableSpec]] = {}
"""Long layouts as messages, by the id of their tuple."""


def spec_to_proto(spec: TableSpec) -> types_pb2.TableSpec:
    message = types_pb2.TableSpec(
        name=spec.name,
        dtype=dtype_to_proto(spec.dtype),
        element_count=spec.element_count,
        block_elements=spec.block_elements,
        optimizer=optimizer_to_proto(spec.optimizer),
        consistency=consistency_to_proto(spec.consistency),
        initializer=_initializer_to_proto(spec.initializer),
        reduction=_REDUCTIONS[spec.reduction],
        allow_non_finite=spec.allow_non_finite,
        gate_bytes=spec.gate_bytes,
    )
    message.MergeFrom(_layout_to_proto(spec.tensors))
    return message


def _layout_to_proto(tensors: tuple[TensorSpec, ...]) -> types_pb2.TableSpec:
    """A spec with these tensors alone. A long one is made once, because every view has it again. It
    must not be changed.
    """
    _, cached = _LAYOUTS.get(id(tensors), ((), None))
    if cached is not None:
        return cached
    layout = types_pb2.TableSpec(
        tensors=[
            types_pb2.TensorSpec(name=tensor.name, shape=tensor.shape, offset=tensor.offset)
            for tensor in tensors
        ]
    )
    if len(tensors) >= _LONG_LAYOUT_COUNT:
        while len(_LAYOUTS) >= _MAX_LAYOUT_COUNT:
            del _LAYOUTS[next(iter(_LAYOUTS))]
        _LAYOUTS[id(tensors)] = tensors, layout  # the reference keeps the id theirs
    return layout


def spec_from_proto(message: types_pb2.TableSpec) -> TableSpec:
    """The spec as it came; `TableSpec.validated` judges it and fills in defaults.

    Raises:
        InvalidConfig: a field is unset or unknown; the message names it.
    """
    return TableSpec(
        name=message.name,
        dtype=dtype_from_proto(message.dtype),
        element_count=message.element_count,
        optimizer=optimizer_from_proto(message.optimizer),
        block_elements=message.block_elements,
        tensors=tuple(
            TensorSpec(tensor.name, tuple(tensor.shape), tensor.offset)
            for tensor in message.tensors
        ),
        consistency=consistency_from_proto(message.consistency),
        initializer=_initializer_from_proto(message.initializer),
        reduction=_known(_REDUCTION_OF, message.reduction, "reduction"),
        allow_non_finite=message.allow_non_finite,
        gate_bytes=message.gate_bytes,
    )


def table_to_proto(table: Table) -> types_pb2.Table:
    return types_pb2.Table(
        table_id=table.table_id,
        first_ordinal=table.first_ordinal,
        spec=spec_to_proto(table.spec),
        change=None if table.change is None else change_to_proto(table.change),
        proposed=None if table.proposed is None else change_to_proto(table.proposed),
        joins=[join_to_proto(join) for join in table.joins],
        cut=None if table.cut is None else cut_to_proto(table.cut),
        restored_clock=table.restored_clock,
        run=table.run,
    )


def table_from_proto(message: types_pb2.Table) -> Table:
    """Raises InvalidConfig if a field of the spec is unset or unknown."""
    return Table(
        table_id=TableId(message.table_id),
        first_ordinal=message.first_ordinal,
        spec=spec_from_proto(message.spec),
        change=change_from_proto(message.change) if message.HasField("change") else None,
        proposed=change_from_proto(message.proposed) if message.HasField("proposed") else None,
        joins=tuple(join_from_proto(join) for join in message.joins),
        cut=cut_from_proto(message.cut) if message.HasField("cut") else None,
        restored_clock=message.restored_clock if message.HasField("restored_clock") else None,
        run=message.run,
    )


def node_to_proto(node: Node) -> types_pb2.Node:
    return types_pb2.Node(
        node_id=node.node_id,
        incarnation=node.incarnation,
        role=role_to_proto(node.role),
        rank=node.rank,
        address=node.address,
        state=_STATES[node.state],
        silence_ms=node.silence_ms,
        run=node.run,
    )


def node_from_proto(message: types_pb2.Node) -> Node:
    """Raises InvalidConfig if the role or the state is unset or unknown."""
    return Node(
        node_id=NodeId(message.node_id),
        incarnation=Incarnation(message.incarnation),
        role=role_from_proto(message.role, "node.role"),
        rank=message.rank,
        address=message.address,
        state=_known(_STATE_OF, message.state, "node.state"),
        silence_ms=message.silence_ms,
        run=message.run,
    )


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
    )


def range_from_proto(message: types_pb2.RangeAssignment) -> RangeAssignment:
    """The replicas of a range; node 0 stands for no primary."""
    return RangeAssignment(
        range_id=RangeId(message.range_id),
        slots=KeyRange(Slot(message.begin_slot), Slot(message.end_slot)),
        assignment_epoch=AssignmentEpoch(message.assignment_epoch),
        primary=NodeId(message.primary_node_id) if message.primary_node_id else None,
        backups=tuple(map(NodeId, message.backup_node_ids)),
        catching_up=tuple(map(NodeId, message.catching_up_node_ids)),
        initial_holders=tuple(map(NodeId, message.initial_holder_node_ids)),
        is_lost=message.lost,
        term=AssignmentEpoch(message.term),
    )


def backup_request_to_proto(backup_request: BackupRequest) -> scheduler_pb2.BackupRequest:
    return scheduler_pb2.BackupRequest(
        range_id=backup_request.range_id,
        assignment_epoch=backup_request.assignment_epoch,
        backup_node_ids=sorted(backup_request.backups),
        is_missing=backup_request.is_missing,
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
    )


def run_to_proto(run: Run) -> types_pb2.Run:
    return types_pb2.Run(
        name=run.name, worker_count=run.worker_count, ended=run.has_ended, removed=run.is_removed
    )


def run_from_proto(message: types_pb2.Run) -> Run:
    return Run(message.name, message.worker_count, message.ended, message.removed)


def view_to_proto(view: ClusterView) -> types_pb2.ClusterView:
    return types_pb2.ClusterView(
        view_number=view.view_number,
        cluster_id=view.cluster_id,
        worker_count=view.worker_count,
        server_count=view.server_count,
        nodes=[node_to_proto(node) for node in view.nodes],
        ranges=[range_to_proto(assignment) for assignment in view.ranges],
        tables=[table_to_proto(table) for table in view.tables],
        finished=view.finished,
        checkpoint=None if view.checkpoint is None else checkpoint_to_proto(view.checkpoint),
        restored_from=view.restored_from,
        runs=[run_to_proto(run) for run in view.runs],
        next_table_id=view.next_table_id,
    )


def view_from_proto(message: types_pb2.ClusterView) -> ClusterView:
    """Raises InvalidConfig if a field is unset or unknown."""
    has_checkpoint = message.HasField("checkpoint")
    return ClusterView(
        view_number=message.view_number,
        cluster_id=message.cluster_id,
        worker_count=message.worker_count,
        server_count=message.server_count,
        nodes=tuple(node_from_proto(node) for node in message.nodes),
        ranges=tuple(range_from_proto(assignment) for assignment in message.ranges),
        tables=tuple(table_from_proto(table) for table in message.tables),
        finished=message.finished,
        checkpoint=checkpoint_from_proto(message.checkpoint) if has_checkpoint else None,
        restored_from=message.restored_from,
        runs=tuple(run_from_proto(run) for run in message.runs),
        next_table_id=message.next_table_id,
    )


def consistency_to_proto(consistency: Consistency) -> types_pb2.Consistency:
    if consistency.mode is Mode.BSP:
        bsp = types_pb2.BulkSynchronous(
            backup_workers=consistency.backup_workers, grace_ms=consistency.grace_ms
        )
        return types_pb2.Consistency(bsp=bsp)
    if consistency.mode is Mode.SSP:
        ssp = types_pb2.BoundedStaleness(
            staleness=consistency.staleness, least=consistency.least, most=consistency.most
        )
        return types_pb2.Consistency(ssp=ssp)
    asp = types_pb2.Asynchronous()
    if consistency.policy is StalePolicy.REJECT:
        asp.reject.bound = consistency.bound
        asp.reject.SetInParent()
    elif consistency.policy is StalePolicy.DAMP:
        asp.damp.alpha = consistency.alpha
    elif consistency.policy is StalePolicy.DIVIDE:
        asp.divide.SetInParent()
    elif consistency.policy is StalePolicy.COMPENSATE:
        asp.compensate.strength = consistency.strength
        asp.compensate.adaptive = consistency.adaptive
    return types_pb2.Consistency(asp=asp)


def consistency_from_proto(message: types_pb2.Consistency) -> Consistency:
    """The setting as it came; `Consistency.validated` judges it.

    Raises:
        InvalidConfig: no mode is set.
    """
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
    return types_pb2.ScheduledChange(
        number=change.number,
        after_clock=change.after_clock,
        consistency=consistency_to_proto(change.consistency),
        join=None if change.join is None else join_to_proto(change.join),
        checkpoint=change.checkpoint,
        is_decided=change.is_decided,
    )


def change_from_proto(message: types_pb2.ScheduledChange) -> TableChange:
    """Raises InvalidConfig if the consistency is unset."""
    consistency = consistency_from_proto(message.consistency)
    join = join_from_proto(message.join) if message.HasField("join") else None
    return TableChange(
        message.number,
        message.after_clock,
        consistency,
        join,
        message.checkpoint,
        message.is_decided,
    )


_OUTCOMES = {
    types_pb2.CHANGE_OUTCOME_TAKEN: ChangeOutcome.TAKEN,
    types_pb2.CHANGE_OUTCOME_GIVEN_UP: ChangeOutcome.GIVEN_UP,
}


def change_outcome_to_proto(outcome: ChangeOutcome | None) -> types_pb2.ChangeOutcome:
    """None: the change is not decided."""
    found = (number for number, known in _OUTCOMES.items() if known is outcome)
    return next(found, types_pb2.CHANGE_OUTCOME_UNSPECIFIED)


def change_outcome_from_proto(number: types_pb2.ChangeOutcome) -> ChangeOutcome | None:
    """None: the change is not decided."""
    return _OUTCOMES.get(number)


def join_to_proto(join: Join) -> types_pb2.WorkerJoin:
    return types_pb2.WorkerJoin(
        rank=join.rank, incarnation=join.incarnation, after_clock=join.after_clock
    )


def join_from_proto(message: types_pb2.WorkerJoin) -> Join:
    return Join(message.rank, Incarnation(message.incarnation), message.after_clock)


def cut_to_proto(cut: TableCut) -> types_pb2.TableCut:
    return types_pb2.TableCut(checkpoint=cut.checkpoint, after_clock=cut.after_clock)


def cut_from_proto(message: types_pb2.TableCut) -> TableCut:
    return TableCut(message.checkpoint, message.after_clock)


def checkpoint_to_proto(checkpoint: Checkpoint) -> types_pb2.Checkpoint:
    return types_pb2.Checkpoint(
        number=checkpoint.number,
        url=checkpoint.url,
        is_cut=checkpoint.is_cut,
        base=checkpoint.base,
    )


def checkpoint_from_proto(message: types_pb2.Checkpoint) -> Checkpoint:
    return Checkpoint(message.number, message.url, message.is_cut, message.base)
