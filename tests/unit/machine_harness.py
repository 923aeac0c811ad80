"""A range machine with room for everything, and short words for what happens to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ps_core.cluster_view import Node
from ps_core.consistency import Consistency, Mode
from ps_core.errors import PushpullError, UpdateFailed
from ps_core.keys import AssignmentEpoch, Incarnation, RangeId, TableId
from ps_core.ledger import Outcome, ReplyKind
from ps_core.tables.elements import DType, Initializer, InitializerKind
from ps_core.tables.optimizers import Hyperparameters, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_server.ranges.events import (
    Accumulate,
    AnswerPull,
    Apply,
    AssignValues,
    Effect,
    Place,
    PullEvent,
    PushEvent,
    Reduce,
    RefusePull,
    ReplyTo,
    ScaleEvent,
    SealEvent,
    SealTerms,
    Sender,
    StepId,
    WithdrawEvent,
)
from ps_server.ranges.range_machine import RangeMachine
from ps_server.ranges.range_state import RangeState

PLACE = Place(TableId(1), RangeId(0), AssignmentEpoch(1))


class FreeStaging:
    """Room for everything; refuses the steps in `closed`; counts what is staged and summed."""

    def __init__(self) -> None:
        self.staged_bytes = self.summed_bytes = 0
        self.closed: set[StepId] = set()

    def admit(self, step: StepId, byte_count: int, effects: list[Effect]) -> bool:  # noqa: ARG002 - the seam's shape
        """See `range_state.StagingMemory`."""
        if step in self.closed:
            return False
        self.staged_bytes += byte_count
        return True

    def release(self, step: StepId, byte_count: int) -> None:  # noqa: ARG002 - the seam's shape
        """See `range_state.StagingMemory`."""
        self.staged_bytes -= byte_count

    def add_sum(self, byte_count: int) -> None:
        """See `range_state.StagingMemory`."""
        self.summed_bytes += byte_count

    def end_sum(self, byte_count: int) -> None:
        """See `range_state.StagingMemory`."""
        self.summed_bytes -= byte_count


def make_table(
    mode: Mode | Consistency = Mode.BSP,
    *,
    blocks: int = 4,
    kind: OptimizerKind = OptimizerKind.SGD,
    from_rank_zero: bool = False,
) -> Table:
    """A table of small blocks."""
    start = InitializerKind.FROM_RANK_ZERO if from_rank_zero else InitializerKind.ZEROS
    spec = TableSpec(
        "model",
        DType.FLOAT32,
        64 * blocks,
        OptimizerSpec(kind),
        block_elements=64,
        consistency=Consistency(mode) if isinstance(mode, Mode) else mode,
        initializer=Initializer(start),
    )
    return Table(TableId(1), 0, spec.validated())


@dataclass
class Bench:
    """A machine, its workers by rank, and all that it said."""

    table: Table
    workers: int = 2
    now_s: float = 100.0
    staging: FreeStaging = field(default_factory=FreeStaging)
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        blocks = tuple(range(self.table.block_count))
        self.machine = RangeMachine(
            RangeState(self.table, RangeId(0), blocks, self.workers, self.staging)
        )

    def _note(self, effects: list[Effect]) -> list[Effect]:
        """What is to be reduced is, at once: each push is worth its sequence."""
        self.effects += effects
        said = list(effects)
        for effect in effects:
            if isinstance(effect, Reduce):
                squares = self._squares(effect.record.clock)
                said += self._note(self.machine.reduced(effect.record, squares))
        return said

    def _squares(self, clock: int) -> tuple[float, ...]:
        found = dict.fromkeys(range(self.table.block_count), 0.0)
        for effect in self.effects:
            if isinstance(effect, Accumulate) and effect.clock == clock:
                for block, payload in effect.parts:
                    found[block] += payload[1]  # type: ignore[index]
        return tuple(found.values())

    @staticmethod
    def sender(rank: int) -> Sender:
        """The sender of a rank."""
        return Sender(Incarnation(1000 + rank), rank, rank)

    def push(
        self, rank: int, sequence: int, clock: int, block: int = 0, **more: object
    ) -> list[Effect]:
        """A push; its payload says where it came from."""
        event = PushEvent(
            PLACE,
            self.sender(rank),
            sequence,
            clock,
            block,
            256,
            (rank, sequence),
            **more,  # type: ignore[arg-type]
        )
        return self._note(self.machine.entry(event, self.now_s))

    def seal(
        self,
        rank: int,
        sequence: int,
        clock: int,
        hyperparameters: Hyperparameters = (),
        **more: object,
    ) -> list[Effect]:
        """A seal."""
        terms = SealTerms(clock, hyperparameters, **more)  # type: ignore[arg-type]
        event = SealEvent(PLACE, self.sender(rank), sequence, terms)
        return self._note(self.machine.entry(event, self.now_s))

    def scale(self, rank: int, sequence: int, clock: int, scale: float) -> list[Effect]:
        """What an update is multiplied by."""
        event = ScaleEvent(PLACE, self.sender(rank), sequence, clock, scale)
        return self._note(self.machine.entry(event, self.now_s))

    def gone(self, node: Node) -> list[Effect]:
        """A worker was declared gone, or has left."""
        return self._note(self.machine.ended(node, self.now_s))

    def fail(self, error: UpdateFailed) -> list[Effect]:
        """The table has failed."""
        return self._note(self.machine.fail(error))

    def observe(self, table: Table) -> list[Effect]:
        """The newest view says this of the table."""
        return self._note(self.machine.observe(table, self.now_s))

    def withdraw(self, rank: int, sequence: int) -> list[Effect]:
        """A withdrawal."""
        return self._note(
            self.machine.entry(WithdrawEvent(PLACE, self.sender(rank), sequence), self.now_s)
        )

    def pull(
        self, rank: int | None, clock: int, *, waiter: int = 1, consistent: bool = False
    ) -> list[Effect]:
        """A read by a worker, or by a reader if `rank` is None."""
        incarnation = None if rank is None else self.sender(rank).incarnation
        event = PullEvent(
            PLACE, waiter, incarnation, clock, consistent, self.now_s + 10, rank=rank or 0
        )
        return self._note(self.machine.pull(event, self.now_s))


def outcomes(effects: list[Effect]) -> dict[tuple[int, int], Outcome]:
    """(rank, sequence) -> outcome, of the COMMITTED replies."""
    return {
        (e.sender.rank, e.sequence): e.ending.outcome
        for e in effects
        if isinstance(e, ReplyTo) and e.ending is not None
    }


def kinds(effects: list[Effect]) -> list[ReplyKind]:
    """The kinds of the replies."""
    return [e.kind for e in effects if isinstance(e, ReplyTo)]


def problem(effects: list[Effect]) -> PushpullError:
    """The only error that the effects carry."""
    found = [
        e.error for e in effects if isinstance(e, ReplyTo | RefusePull) and e.error is not None
    ]
    found += [
        e.ending.error
        for e in effects
        if isinstance(e, ReplyTo) and e.ending is not None and e.ending.error is not None
    ]
    (error,) = found
    return error


def applied(effects: list[Effect]) -> list[tuple[int, list[object]]]:
    """(clock, payloads in the order of the sum) of each update."""
    sums: list[object] = []
    found: list[tuple[int, list[object]]] = []
    for effect in effects:
        if isinstance(effect, Accumulate):
            sums += [payload for _, payload in effect.parts]
        elif isinstance(effect, Apply):
            found.append((effect.record.clock, sums))
            sums = []
        elif isinstance(effect, AssignValues):
            found.append((0, [payload for _, payload in effect.parts]))
    return found


def answers(effects: list[Effect]) -> list[int]:
    """The waiters that were answered."""
    return [effect.waiter for effect in effects if isinstance(effect, AnswerPull)]


def told(effects: list[Effect], rank: int) -> dict[int, tuple[float, ...]]:
    """clock -> what the worker was told of the squares of its update."""
    clocks = {
        sequence: effect.record.clock
        for effect in effects
        if isinstance(effect, Reduce)
        for contributor in effect.record.contributors
        for sequence in contributor.sequences
        if contributor.rank == rank
    }
    return {
        clocks[effect.sequence]: effect.ending.squares
        for effect in effects
        if isinstance(effect, ReplyTo)
        and effect.sender.rank == rank
        and effect.ending is not None
        and effect.ending.squares
        and effect.sequence in clocks
    }
