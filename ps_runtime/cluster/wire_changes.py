"""Consistency settings and scheduled changes to messages of `pushpull.v1` and back, as
`ps_runtime.cluster.wire` does the rest.
"""

from __future__ import annotations

from ps_core.change import Change, ChangeOutcome, Checkpoint, Join, TableCut
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig
from ps_core.keys import Incarnation
from pushpull.v1 import types_pb2


def consistency_to_proto(consistency: Consistency) -> types_pb2.Consistency:
    """How far the workers of a table may run apart."""
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
    """The setting, as it came: `Consistency.validated` judges it.

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


def change_to_proto(change: Change) -> types_pb2.ScheduledChange:
    """A change of a table's consistency."""
    return types_pb2.ScheduledChange(
        number=change.number,
        after_clock=change.after_clock,
        consistency=consistency_to_proto(change.consistency),
        join=None if change.join is None else join_to_proto(change.join),
        checkpoint=change.checkpoint,
        is_decided=change.is_decided,
    )


def change_from_proto(message: types_pb2.ScheduledChange) -> Change:
    """A change of a table's consistency.

    Raises:
        InvalidConfig: its consistency is unset.
    """
    consistency = consistency_from_proto(message.consistency)
    join = join_from_proto(message.join) if message.HasField("join") else None
    return Change(
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
    """What became of a proposal; None: it is not settled."""
    found = (number for number, known in _OUTCOMES.items() if known is outcome)
    return next(found, types_pb2.CHANGE_OUTCOME_UNSPECIFIED)


def change_outcome_from_proto(number: types_pb2.ChangeOutcome) -> ChangeOutcome | None:
    """What became of a proposal; None: it is not settled."""
    return _OUTCOMES.get(number)


def join_to_proto(join: Join) -> types_pb2.WorkerJoin:
    """Who takes the place of a worker that is gone."""
    return types_pb2.WorkerJoin(
        rank=join.rank, incarnation=join.incarnation, after_clock=join.after_clock
    )


def join_from_proto(message: types_pb2.WorkerJoin) -> Join:
    """Who takes the place of a worker that is gone."""
    return Join(message.rank, Incarnation(message.incarnation), message.after_clock)


def cut_to_proto(cut: TableCut) -> types_pb2.TableCut:
    """Where a table is written down."""
    return types_pb2.TableCut(checkpoint=cut.checkpoint, after_clock=cut.after_clock)


def cut_from_proto(message: types_pb2.TableCut) -> TableCut:
    """Where a table is written down."""
    return TableCut(message.checkpoint, message.after_clock)


def checkpoint_to_proto(checkpoint: Checkpoint) -> types_pb2.Checkpoint:
    """A checkpoint that is being made."""
    return types_pb2.Checkpoint(
        number=checkpoint.number,
        url=checkpoint.url,
        is_cut=checkpoint.is_cut,
        base=checkpoint.base,
    )


def checkpoint_from_proto(message: types_pb2.Checkpoint) -> Checkpoint:
    """A checkpoint that is being made."""
    return Checkpoint(message.number, message.url, message.is_cut, message.base)
