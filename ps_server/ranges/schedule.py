"""A table's settings by clock, and the clock beyond which all must wait (SEMANTICS S6, S10).

    decided   --proposed-->   prepared: nothing beyond `hold_point` takes effect here
    prepared  --committed-->  decided, with another setting from some clock on
    prepared  --withdrawn-->  decided, as before
    prepared  --given up-->   decided, as before: the scheduler is silent

A change is a two-phase commit at a clock: the highest that any range had reached when it prepared
(a join's: by steps, not by pulls), so every range treats a clock alike, and none has to undo
anything. The table's first range decides: when the scheduler says that all have prepared, it takes
the change, unless it has given it up. The others take it from a view, or from the first range's
primary.

A cut holds a table for a reader that wants one state of it where updates do not form clock by
clock: every range holds steps beyond the clock that it has reached; the reader then names the
highest, and each range goes on up to it, answers, and lets go.

A cut for a checkpoint is proposed and committed as a change is, and then held as a reader's cut.
Nothing holds for it under asynchronous settings, whose values are read as they are, nor while the
scheduler is silent: once the cut's clock has passed, the checkpoint fails.

Invariants:
    SC-1  The setting of a clock does not change once something of that clock has taken effect.
    SC-2  A change that was given up is never taken, and a taken one is never given up.
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
from ps_core.tables.table import Table

_BEFORE_ALL = -1

_CHECKPOINTS = Incarnation(0)
"""The owner of cuts for checkpoints, which is no worker."""

_COPIES = Incarnation(-1)
"""The owner of holds for checkpoints whose copies do not fit, which is no worker either."""

CutId = tuple[Incarnation, int]
"""The owner of a cut, and its number for it."""

Settings = tuple[tuple[int, Consistency], ...]


def checkpoint_cut(number: int) -> CutId:
    """The cut held for a checkpoint; its reader is the server itself."""
    return _CHECKPOINTS, number


def copies_cut(number: int) -> CutId:
    """The cut held until a checkpoint's copies fit in memory."""
    return _COPIES, number


class ReachedClocks(NamedTuple):
    """The highest clock that a range has reached.

    Attributes:
        by_steps: of which a step has taken effect.
        by_updates: that, or the clock up to which everything is decided.
        by_anything: of which anything has taken effect, or that was pulled for.
    """

    by_steps: int
    by_updates: int
    by_anything: int


@dataclass(slots=True)
class Cut:
    """Holds everything beyond `clock`."""

    clock: int
    deadline_s: float


class Schedule:
    """The settings of one table in one range.

    Attributes:
        settings: (after which clock, setting), of settings still in use.
        prepared: the newest prepared change; 0 before the first.
        hold_point: nothing beyond it takes effect or is pulled for; None: no change is prepared.
        minds_reads: the hold point holds pulls too: not for a checkpoint.
        is_for_join: the hold point is a join's, and may be one that was pulled beyond.
        taken: the newest change that this range took as the deciding one, and its clock.
        number: the newest change that was committed; 0 before the first.
        is_freed: what a cut held may go on, and has not yet.
    """

    def __init__(self, table: Table) -> None:
        self.settings: Settings = ((_BEFORE_ALL, table.spec.consistency),)
        self.prepared = 0
        self.hold_point: int | None = None
        self.number = 0
        self.minds_reads = True
        self.is_for_join = False
        self._lets_go = False  # the proposal is a cut, and the clocks beyond are asynchronous
        self._proposed = 0  # the proposal of the newest view; 0: it has none
        self.taken = (0, 0)
        self._cuts: dict[CutId, Cut] = {}
        self._cut_for = 0 if table.cut is None else table.cut.checkpoint
        self._torn_for = 0  # the newest checkpoint at whose cut it was asynchronous
        self.is_freed = False
        if table.change is not None:
            self._add(table.change)

    def at(self, clock: int) -> Consistency:
        after_clock, setting = self.settings[-1]
        if clock > after_clock:  # nearly always, and asked several times a seal
            return setting
        for after_clock, setting in reversed(self.settings):
            if clock > after_clock:
                return setting
        return self.settings[0][1]  # long past and decided

    def is_bsp(self, clock: int) -> bool:
        """True if the update of `clock` has every worker's step; else each step is an update."""
        return self.at(clock).mode is Mode.BSP

    def begins_after(self, clock: int) -> int:
        """The last clock before the setting of `clock` begins; -1 if it is the first."""
        return max((after for after, _ in self.settings if after < clock), default=_BEFORE_ALL)

    def bsp_before(self, clock: int) -> int:
        """The last BSP clock below `clock` that may not have formed; -1 if there is none."""
        last = _BEFORE_ALL
        for (_, setting), (until, _) in pairwise(self.settings):
            if setting.mode is Mode.BSP and until < clock:
                last = until
        return last

    def up_to_bsp(self, clock: int, reached: int) -> int:
        """`reached`, or the last clock before the BSP setting that begins next after `clock`, if
        that is lower: a BSP clock forms, or is passed, even if no worker has a step of it.
        """
        begins = [after for after, found in self.settings if found.mode is Mode.BSP]
        return min([reached, *(after for after in begins if after > clock)])

    def holds(self, clock: int) -> bool:
        if self._cuts and any(clock > cut.clock for cut in self._cuts.values()):
            return True
        return self._holds(clock)

    def holds_reads(self, clock: int) -> bool:
        """True if pulls for steps of `clock` must wait; a cut holds no pulls."""
        return self.minds_reads and self._holds(clock)

    def _holds(self, clock: int) -> bool:
        return self.hold_point is not None and clock > self.hold_point and not self._lets_go

    @property
    def varies(self) -> bool:
        """True if the clocks in use have different settings."""
        return len(self.settings) > 1

    @property
    def compensates(self) -> bool:
        """True if gradients may still come that need the values their workers were given."""
        return any(setting.policy is StalePolicy.COMPENSATE for _, setting in self.settings)

    def observe(self, table: Table, reached: ReachedClocks, now_s: float) -> bool:
        """Take the newest view's table; True if held steps may go on."""
        held, proposed = self.hold_point, table.proposed
        self._observe_cut(table, now_s)
        committed = table.change is not None and table.change.number > self.number
        if table.change is not None and committed:
            self._check_after(table.change, reached.by_anything, "reached")
            self._add(table.change)
        if proposed is None or proposed.number != self.prepared:
            self.hold_point = None
        self._proposed = 0 if proposed is None else proposed.number
        if proposed is not None and self._proposed > self.prepared:
            self.prepared = proposed.number
            self.minds_reads = not proposed.checkpoint
            self.is_for_join = proposed.join is not None
            self.hold_point = max(proposed.after_clock, self._at_present(proposed, reached))
            self._lets_go = self._is_torn_from(self.hold_point)
        return committed or (held is not None and self.hold_point != held)

    @staticmethod
    def _at_present(proposed: TableChange, reached: ReachedClocks) -> int:
        """The clock at which this range prepares: for another setting, beyond what was pulled for,
        which was answered under the present one. A pull or a final seal is no step, and the workers
        of a table that sleeps may never take one: who joins is to be where they are.
        """
        if proposed.checkpoint:
            return reached.by_steps
        return reached.by_anything if proposed.join is None else reached.by_updates

    @staticmethod
    def _check_after(change: TableChange, clock: int, was: str) -> None:
        words = f"a change after clock {change.after_clock} came when {clock} was {was}"
        check(change.after_clock >= clock, "SC-1", words)

    # --- a change that is prepared

    @property
    def held_for(self) -> int:
        """The change that holds later clocks; 0: none. A cut does not count."""
        return self.prepared if self.hold_point is not None and self.minds_reads else 0

    @property
    def is_open(self) -> bool:
        """True if the newest view proposes a change that was prepared here, decided or not."""
        return 0 < self._proposed == self.prepared

    @property
    def changes(self) -> tuple[int, int | None, tuple[int, int]]:
        """The prepared change, its hold point, and the taken one."""
        return self.prepared, self.hold_point, self.taken

    def settled(self, number: int) -> ChangeResult | None:
        """The outcome of a proposal since the newest that was taken, in the deciding range; None:
        it is open, or not known any more. One before another that was prepared has ended.
        """
        if number == self.taken[0]:
            return ChangeResult(ChangeOutcome.TAKEN, self.taken[1])
        has_ended = number < self.prepared or (number == self.prepared and self.hold_point is None)
        is_given_up = has_ended and number > self.taken[0]
        return ChangeResult(ChangeOutcome.GIVEN_UP) if is_given_up else None

    def take(self, change: TableChange) -> bool:
        """Take the held change from its clock on; False if it is not held for."""
        if self.held_for != change.number or self.hold_point is None:
            return False
        self._check_after(change, self.hold_point, "held")
        self.taken = change.number, change.after_clock
        self.hold_point = None
        if change.join is None:
            self._add(change)
        return True

    def give_up(self, number: int) -> bool:
        """Give up that change and all before; True if held steps may go on."""
        if number < self.prepared or number <= self.taken[0]:
            return False
        was_held = self.hold_point is not None
        self.prepared, self.hold_point = number, None
        return was_held

    def give_up_cut(self) -> bool:
        """Give up a proposed cut; True if held steps may go on."""
        if self.hold_point is None or self.minds_reads:
            return False
        self.hold_point = None
        return not self._lets_go

    def _is_torn_from(self, clock: int) -> bool:
        """True if the proposal is a cut that cannot make one state: all from `clock` on is ASP."""
        ends = [after for after, _ in self.settings[1:]]
        return not self.minds_reads and all(
            setting.mode is Mode.ASP
            for (_, setting), until in zip(self.settings, [*ends, clock], strict=True)
            if until >= clock
        )

    # --- cuts

    def _observe_cut(self, table: Table, now_s: float) -> None:
        """Hold a committed cut until it is read. One that the view no longer has was given up."""
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
        """True if the range is read as it is for a checkpoint. The setting at the time of the
        commit counts, since earlier settings are forgotten as clocks go on.
        """
        return self._torn_for == cut.checkpoint

    def begin_cut(self, cut_id: CutId, reached: int, deadline_s: float) -> int:
        """Hold everything beyond `reached`, and return the held clock; asked again, the same.

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
        """Raise a cut to the reader's `clock`; False if the cut does not hold up to there."""
        cut = self._cuts.get(cut_id)
        if cut is None or clock < cut.clock:
            return False
        self.is_freed = self.is_freed or clock > cut.clock
        cut.clock = clock
        return True

    def hold(self, cut_id: CutId, clock: int, deadline_s: float) -> None:
        self._cuts[cut_id] = Cut(clock, deadline_s)

    @property
    def copied_for(self) -> int:
        """The checkpoint whose copies hold the range; 0: none."""
        return max((number for whose, number in self._cuts if whose == _COPIES), default=0)

    def end_cut(self, cut_id: CutId) -> None:
        self.is_freed = self._cuts.pop(cut_id, None) is not None or self.is_freed

    def end_late_cuts(self, now_s: float) -> None:
        """End the cuts whose deadline has passed."""
        for cut_id in [key for key, cut in self._cuts.items() if cut.deadline_s <= now_s]:
            self.end_cut(cut_id)

    @property
    def cut_deadline_s(self) -> float | None:
        """The earliest deadline of a cut; None without cuts."""
        return min(cut.deadline_s for cut in self._cuts.values()) if self._cuts else None

    # --- changes

    def restore(
        self,
        prepared: int,
        hold_point: int | None,
        taken: tuple[int, int],
        *,
        minds_reads: bool,
        is_for_join: bool,
    ) -> None:
        """Restore the changes of another server, whose cuts ended with it."""
        self.prepared, self.hold_point = prepared, hold_point
        self.taken, self.minds_reads, self.is_for_join = taken, minds_reads, is_for_join
        if self.hold_point is not None:
            self._lets_go = self._is_torn_from(self.hold_point)

    def _add(self, change: TableChange) -> None:
        self.number = change.number
        # Nothing had reached the settings that it replaces.
        kept = tuple(each for each in self.settings if each[0] < change.after_clock)
        self.settings = (*kept, (change.after_clock, change.consistency))

    def forget_before(self, clock: int) -> None:
        while len(self.settings) > 1 and self.settings[1][0] < clock:
            self.settings = self.settings[1:]
