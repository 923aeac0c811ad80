"""Which setting holds at which clock, and beyond which clock all must wait (SEMANTICS S6, S10).

    settled   --proposed-->   prepared: nothing beyond `hold_point` takes effect here
    prepared  --committed-->  settled, with another setting from some clock on
    prepared  --withdrawn-->  settled, as it was
    prepared  --given up-->   settled, as it was: the scheduler is not heard

Who decides is the table's first range. When the scheduler says that all have prepared, that range
takes the change, unless it has given it up by then; the others take it when a view has it, or when
the first range's primary says so. What that one has said once it says for ever.

The clock of a change is the highest that any range had reached when it prepared. So every range
treats a clock alike, and none has to undo anything.

A cut is the same for a reader that wants one state of the whole table where updates are not formed
clock by clock: every range holds what is beyond the clock that it has reached; the reader then
names the highest, each range goes on up to it, answers, and lets go.

A cut for a checkpoint is proposed and committed as a change is, and held then as a reader's is.
What is asynchronous from there on holds nothing for one: it is read as it is. Whoever does not hear
the scheduler holds nothing for one either: where the cut's clock has passed, the checkpoint fails.

    open      --begun-->      held at what was reached
    held      --named-->      held at the reader's clock
    held      --answered, given up, or out of time-->  open

Invariants:
    SC-1  The setting of a clock does not change once something of that clock has taken effect.
    SC-2  What was given up is never taken, and what was taken never given up.

What it deliberately does not do: hold anything (`update_gate` does), or talk to the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ps_core import limits
from ps_core.change import ChangeOutcome, ChangeResult, TableChange, TableCut
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import Overloaded, check
from ps_core.keys import Incarnation
from ps_core.tables import Table

_BEFORE_ALL = -1

_CHECKPOINTS = Incarnation(0)
"""Nobody's: whose the cuts for checkpoints are."""

_COPIES = Incarnation(-1)
"""Nobody's either: who holds what a checkpoint has no room to copy."""

CutId = tuple[Incarnation, int]
"""Whose cut, and its reader's number for it."""


def checkpoint_cut(number: int) -> CutId:
    """The cut that is held for a checkpoint, whose reader is the server itself."""
    return _CHECKPOINTS, number


def copies_cut(number: int) -> CutId:
    """The cut that is held until there is room for copies for a checkpoint."""
    return _COPIES, number


@dataclass(slots=True)
class Cut:
    """Nothing beyond `clock` takes effect until it ends."""

    clock: int
    deadline_s: float


class Prepared(NamedTuple):
    """What a range has prepared: the newest change; beyond which clock it holds, and whether reads
    too; and the newest that it took as the range that decides, and after which clock.
    """

    prepared: int
    hold_point: int | None
    minds_reads: bool
    taken: tuple[int, int]


class Schedule:
    """The settings of one table in one range.

    Attributes:
        hold_point: nothing beyond it may take effect, nor be read for; None while no change is
            being settled.
        number: the newest change that was committed; 0 before the first.
        is_freed: what a cut held may go on, and has not yet.
    """

    def __init__(self, table: Table) -> None:
        self._settings = [(_BEFORE_ALL, table.spec.consistency)]  # (after which clock, setting)
        self._prepared = 0
        self.hold_point: int | None = None
        self.number = 0
        self._holds_reads = True
        self._lets_go = False  # the proposal is a cut, and what lies beyond the clock asynchronous
        self._proposed = 0  # the proposal of the newest view; 0: it has none
        self._taken = (0, 0)  # the newest that this range took, which decides; after which clock
        self._cuts: dict[CutId, Cut] = {}
        self._cut_for = 0 if table.cut is None else table.cut.checkpoint
        self._torn_for = 0  # the newest checkpoint at whose cut it was asynchronous
        self.is_freed = False
        if table.change is not None:
            self._add(table.change)

    def at(self, clock: int) -> Consistency:
        """The setting of the steps of `clock`."""
        if len(self._settings) == 1:  # nearly always, and asked several times a seal
            return self._settings[0][1]
        for after_clock, setting in reversed(self._settings):
            if clock > after_clock:
                return setting
        return self._settings[0][1]  # long past and decided

    def is_bsp(self, clock: int) -> bool:
        """Whether the update of `clock` has every worker's step; else each is one by itself."""
        return self.at(clock).mode is Mode.BSP

    def begins_after(self, clock: int) -> int:
        """The last clock before the setting of `clock` that had another; -1 if none had."""
        return max((after for after, _ in self._settings if after < clock), default=_BEFORE_ALL)

    def bsp_before(self, clock: int) -> int:
        """The last clock below `clock` that is BSP and may not have formed; -1 if there is none."""
        last = _BEFORE_ALL
        for (_, setting), (until, _) in pairwise(self._settings):
            if setting.mode is Mode.BSP and until < clock:
                last = until
        return last

    def holds(self, clock: int) -> bool:
        """Whether steps of `clock` must wait."""
        if self._cuts and any(clock > cut.clock for cut in self._cuts.values()):
            return True
        return self._holds(clock)

    def holds_reads(self, clock: int) -> bool:
        """Whether reads for steps of `clock` must wait; a cut does not mind them."""
        return self._holds_reads and self._holds(clock)

    def _holds(self, clock: int) -> bool:
        return self.hold_point is not None and clock > self.hold_point and not self._lets_go

    @property
    def varies(self) -> bool:
        """Whether clocks that may be asked for have different settings."""
        return len(self._settings) > 1

    @property
    def compensates(self) -> bool:
        """Whether gradients may still come that need what their workers were given."""
        return any(setting.policy is StalePolicy.COMPENSATE for _, setting in self._settings)

    def observe(
        self, table: Table, reached: int, stepped: int, read_clock: int, now_s: float
    ) -> bool:
        """What the newest view says of the table; whether anything may take effect that could not.

        Args:
            table: as in that view.
            reached: the highest clock of which anything has taken effect here.
            stepped: the highest of which a step has.
            read_clock: the highest that was read for.
            now_s: the time.
        """
        held = self.hold_point
        self._observe_cut(table, now_s)
        committed = table.change is not None and table.change.number > self.number
        if table.change is not None and committed:
            check(
                table.change.after_clock >= max(reached, read_clock),
                "SC-1",
                f"a change after clock {table.change.after_clock} came when "
                f"{max(reached, read_clock)} was reached",
            )
            self._add(table.change)
        if table.proposed is None or table.proposed.number != self._prepared:
            self.hold_point = None
        self._proposed = 0 if table.proposed is None else table.proposed.number
        if table.proposed is not None and self._proposed > self._prepared:
            self._prepared = table.proposed.number
            self._holds_reads = not table.proposed.checkpoint
            at_present = max(reached, read_clock) if self._holds_reads else stepped
            self.hold_point = max(table.proposed.after_clock, at_present)
            self._lets_go = self._is_torn_from(self.hold_point)
        return committed or (held is not None and self.hold_point != held)

    # --- while a change is settled

    @property
    def held_for(self) -> int:
        """The change for which later clocks are held; 0: none. A cut is none."""
        return self._prepared if self.hold_point is not None and self._holds_reads else 0

    @property
    def is_open(self) -> bool:
        """Whether the newest view has a proposal that was prepared here, settled since or not."""
        return 0 < self._proposed == self._prepared

    @property
    def taken(self) -> tuple[int, int]:
        """The newest change that this range took as the one that decides, and after which clock."""
        return self._taken

    def settled(self, number: int) -> ChangeResult | None:
        """What became of the newest proposal here, in the range that decides; None: it is open."""
        if number == self._taken[0]:
            return ChangeResult(ChangeOutcome.TAKEN, self._taken[1])
        is_given_up = number == self._prepared and self.hold_point is None
        return ChangeResult(ChangeOutcome.GIVEN_UP) if is_given_up else None

    def take(self, change: TableChange) -> bool:
        """Have the change, which is held for, from its clock on; False if it is not held for."""
        if self.held_for != change.number or self.hold_point is None:
            return False
        check(
            change.after_clock >= self.hold_point,
            "SC-1",
            f"a change after clock {change.after_clock} came when {self.hold_point} was held",
        )
        self._taken = change.number, change.after_clock
        self.hold_point = None
        if change.join is None:
            self._add(change)
        return True

    def give_up(self, number: int) -> bool:
        """Never take that change, nor one before; whether anything may go on for that."""
        if number < self._prepared or number <= self._taken[0]:
            return False
        was_held = self.hold_point is not None
        self._prepared, self.hold_point = number, None
        return was_held

    def give_up_cut(self) -> bool:
        """Hold nothing for a cut that is proposed; whether anything may go on for that."""
        if self.hold_point is None or self._holds_reads:
            return False
        self.hold_point = None
        return not self._lets_go

    def _is_torn_from(self, clock: int) -> bool:
        """Whether the proposal is a cut that no setting from `clock` on can make one state of."""
        if self._holds_reads:
            return False
        ends = [after for after, _ in self._settings[1:]]
        return all(
            setting.mode is Mode.ASP
            for (_, setting), until in zip(self._settings, [*ends, None], strict=True)
            if until is None or until >= clock
        )

    # --- cuts

    def _observe_cut(self, table: Table, now_s: float) -> None:
        """A cut for a checkpoint was settled: hold it until it is read. What is asynchronous is
        read as it is. One that the view has no more was given up: nobody reads it.
        """
        cut = table.cut
        wanted = None if cut is None else checkpoint_cut(cut.checkpoint)
        for cut_id in [c for c in self._cuts if c[0] == _CHECKPOINTS and c != wanted]:
            self.end_cut(cut_id)
        if cut is None or cut.checkpoint <= self._cut_for:
            return
        self._cut_for = cut.checkpoint
        if self.at(cut.after_clock).mode is Mode.ASP:
            self._torn_for = cut.checkpoint
        else:
            held = Cut(cut.after_clock, now_s + limits.CHECKPOINT_CUT_S)
            self._cuts[checkpoint_cut(cut.checkpoint)] = held

    def is_torn_at(self, cut: TableCut) -> bool:
        """Whether the range is read as it is for a checkpoint, which the setting said when the cut
        was settled: settings of before are forgotten as soon as clocks go on.
        """
        return self._torn_for == cut.checkpoint

    def begin_cut(self, cut_id: CutId, reached: int, deadline_s: float) -> int:
        """Hold what is beyond `reached`, the highest clock of which anything has taken effect; the
        clock that is held. Asked again, the same.

        Raises:
            Overloaded: too many are held.
        """
        if len(self._cuts) >= limits.MAX_CUT_COUNT and cut_id not in self._cuts:
            raise Overloaded(
                f"{limits.MAX_CUT_COUNT} cuts of the table are held already", retry_after_ms=500
            )
        cut = self._cuts.setdefault(cut_id, Cut(reached, deadline_s))
        return cut.clock

    def name_cut(self, cut_id: CutId, clock: int) -> bool:
        """The reader asks for the state at `clock`; False if its cut is not held up to there."""
        cut = self._cuts.get(cut_id)
        if cut is None or clock < cut.clock:
            return False
        self.is_freed = self.is_freed or clock > cut.clock
        cut.clock = clock
        return True

    def hold(self, cut_id: CutId, clock: int, deadline_s: float) -> None:
        """Hold what is beyond `clock` until that cut ends, or `deadline_s` has come."""
        self._cuts[cut_id] = Cut(clock, deadline_s)

    @property
    def copied_for(self) -> int:
        """The checkpoint for which it is held until there is room for copies; 0: for none."""
        return max((number for whose, number in self._cuts if whose == _COPIES), default=0)

    def end_cut(self, cut_id: CutId) -> None:
        """The reader has its answer, or will not have one."""
        self.is_freed = self._cuts.pop(cut_id, None) is not None or self.is_freed

    def end_late_cuts(self, now_s: float) -> None:
        """Whoever was too slow gets no answer."""
        for cut_id in [key for key, cut in self._cuts.items() if cut.deadline_s <= now_s]:
            self.end_cut(cut_id)

    @property
    def cut_deadline_s(self) -> float | None:
        """When the first cut will have lasted too long; None if there is none."""
        if not self._cuts:
            return None
        return min((cut.deadline_s for cut in self._cuts.values()), default=None)

    # --- changes

    @property
    def settings(self) -> tuple[tuple[int, Consistency], ...]:
        """After which clock which setting; those that may still be asked for."""
        return tuple(self._settings)

    @property
    def minds_reads(self) -> bool:
        """Whether what is held is held for reads too: not for a checkpoint."""
        return self._holds_reads

    @property
    def prepared(self) -> int:
        """The newest change that was prepared; 0 before the first."""
        return self._prepared

    def restore(
        self,
        settings: tuple[tuple[int, Consistency], ...],
        number: int,
        prepared: Prepared,
    ) -> None:
        """As another server had it, whose place this one takes. Cuts ended with that one."""
        self._settings = list(settings)
        self.number = number
        self._prepared, self.hold_point, self._holds_reads, self._taken = prepared
        if self.hold_point is not None:
            self._lets_go = self._is_torn_from(self.hold_point)

    def _add(self, change: TableChange) -> None:
        self.number = change.number
        while self._settings[-1][0] >= change.after_clock:  # nothing had got there
            self._settings.pop()
        self._settings.append((change.after_clock, change.consistency))

    def forget_before(self, clock: int) -> None:
        """All before `clock` is decided, and not asked for any more."""
        while len(self._settings) > 1 and self._settings[1][0] < clock:
            del self._settings[0]
