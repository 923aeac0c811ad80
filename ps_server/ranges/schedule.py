"""The schedule of a table's settings by clock, and the clock beyond which all must wait (SEMANTICS
S6, S10).

    decided   --proposed-->   prepared: nothing beyond `hold_point` takes effect here
    prepared  --committed-->  decided, with another setting from some clock on
    prepared  --withdrawn-->  decided, as before
    prepared  --given up-->   decided, as before: the scheduler is silent

A change is a two-phase commit at a clock. The table's first range decides it: when the scheduler
says that all have prepared, that range takes the change, unless it has given it up by then. The
other ranges take it when a view has it, or when the first range's primary says so. An outcome never
changes. The clock of a change is the highest that any range had reached when it prepared, so every
range treats a clock alike, and none has to undo anything.

A cut holds a table for a reader that wants one state of it where updates do not form clock by
clock: every range holds steps beyond the clock that it has reached; the reader then names the
highest, and each range goes on up to it, answers, and lets go.

    open      --begin-->      held at the reached clock
    held      --named-->      held at the reader's clock
    held      --answered, given up, or out of time-->  open

A cut for a checkpoint is proposed and committed as a change is, and then held as a reader's cut.
Asynchronous settings hold nothing for it: their values are read as they are. A server that does not
hear the scheduler holds nothing for it either: once the cut's clock has passed, the checkpoint
fails.

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
from ps_core.tables import Table

_BEFORE_ALL = -1

_CHECKPOINTS = Incarnation(0)
"""The owner of cuts for checkpoints, which is no worker."""

_COPIES = Incarnation(-1)
"""The owner of holds for checkpoints whose copies do not fit, which is no worker either."""

CutId = tuple[Incarnation, int]
"""The owner of a cut, and its number for it."""


def checkpoint_cut(number: int) -> CutId:
    """The cut held for a checkpoint; its reader is the server itself."""
    return _CHECKPOINTS, number


def copies_cut(number: int) -> CutId:
    """The cut held until a checkpoint's copies fit in memory."""
    return _COPIES, number


@dataclass(slots=True)
class Cut:
    """Holds everything beyond `clock`."""

    clock: int
    deadline_s: float


class Prepared(NamedTuple):
    """Prepared state of a range: the newest change, its hold point, whether that holds pulls too,
    and the newest change that the range took as the deciding one, with its clock.
    """

    prepared: int
    hold_point: int | None
    minds_reads: bool
    taken: tuple[int, int]


class Schedule:
    """The settings of one table in one range.

    Attributes:
        hold_point: nothing beyond it may take effect, nor be pulled for; None while no change is
            prepared.
        number: the newest change that was committed; 0 before the first.
        is_freed: what a cut held may go on, and has not yet.
    """

    def __init__(self, table: Table) -> None:
        self._settings = [(_BEFORE_ALL, table.spec.consistency)]  # (after which clock, setting)
        self._prepared = 0
        self.hold_point: int | None = None
        self.number = 0
        self._holds_reads = True
        self._lets_go = False  # the proposal is a cut, and the clocks beyond are asynchronous
        self._proposed = 0  # the proposal of the newest view; 0: it has none
        self._taken = (0, 0)  # the newest change taken as the deciding range; its clock
        self._cuts: dict[CutId, Cut] = {}
        self._cut_for = 0 if table.cut is None else table.cut.checkpoint
        self._torn_for = 0  # the newest checkpoint at whose cut it was asynchronous
        self.is_freed = False
        if table.change is not None:
            self._add(table.change)

    def at(self, clock: int) -> Consistency:
        if len(self._settings) == 1:  # nearly always, and asked several times a seal
            return self._settings[0][1]
        for after_clock, setting in reversed(self._settings):
            if clock > after_clock:
                return setting
        return self._settings[0][1]  # long past and decided

    def is_bsp(self, clock: int) -> bool:
        """True if the update of `clock` has every worker's step; else each step is an update."""
        return self.at(clock).mode is Mode.BSP

    def begins_after(self, clock: int) -> int:
        """The last clock before the setting of `clock` begins; -1 if it is the first."""
        return max((after for after, _ in self._settings if after < clock), default=_BEFORE_ALL)

    def bsp_before(self, clock: int) -> int:
        """The last BSP clock below `clock` that may not have formed; -1 if there is none."""
        last = _BEFORE_ALL
        for (_, setting), (until, _) in pairwise(self._settings):
            if setting.mode is Mode.BSP and until < clock:
                last = until
        return last

    def holds(self, clock: int) -> bool:
        if self._cuts and any(clock > cut.clock for cut in self._cuts.values()):
            return True
        return self._holds(clock)

    def holds_reads(self, clock: int) -> bool:
        """True if pulls for steps of `clock` must wait; a cut holds no pulls."""
        return self._holds_reads and self._holds(clock)

    def _holds(self, clock: int) -> bool:
        return self.hold_point is not None and clock > self.hold_point and not self._lets_go

    @property
    def varies(self) -> bool:
        """True if the clocks in use have different settings."""
        return len(self._settings) > 1

    @property
    def compensates(self) -> bool:
        """True if gradients may still come that need the values their workers were given."""
        return any(setting.policy is StalePolicy.COMPENSATE for _, setting in self._settings)

    def observe(
        self, table: Table, reached: int, stepped: int, read_clock: int, now_s: float
    ) -> bool:
        """Take the newest view's table; True if held steps may go on.

        Args:
            table: as in that view.
            reached: the highest clock of which anything has taken effect here.
            stepped: the highest of which a step has.
            read_clock: the highest that was pulled for.
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

    # --- a change that is prepared

    @property
    def held_for(self) -> int:
        """The change that holds later clocks; 0: none. A cut does not count."""
        return self._prepared if self.hold_point is not None and self._holds_reads else 0

    @property
    def is_open(self) -> bool:
        """True if the newest view proposes a change that was prepared here, decided since or
        not.
        """
        return 0 < self._proposed == self._prepared

    @property
    def taken(self) -> tuple[int, int]:
        """The newest change that this range took as the deciding one, and its clock."""
        return self._taken

    def settled(self, number: int) -> ChangeResult | None:
        """The outcome of the newest proposal, in the deciding range; None: it is open."""
        if number == self._taken[0]:
            return ChangeResult(ChangeOutcome.TAKEN, self._taken[1])
        is_given_up = number == self._prepared and self.hold_point is None
        return ChangeResult(ChangeOutcome.GIVEN_UP) if is_given_up else None

    def take(self, change: TableChange) -> bool:
        """Take the held change from its clock on; False if it is not held for."""
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
        """Give up that change and all before; True if held steps may go on."""
        if number < self._prepared or number <= self._taken[0]:
            return False
        was_held = self.hold_point is not None
        self._prepared, self.hold_point = number, None
        return was_held

    def give_up_cut(self) -> bool:
        """Give up a proposed cut; True if held steps may go on."""
        if self.hold_point is None or self._holds_reads:
            return False
        self.hold_point = None
        return not self._lets_go

    def _is_torn_from(self, clock: int) -> bool:
        """True if the proposal is a cut, and every setting from `clock` on is asynchronous, so that
        it cannot make one state.
        """
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
        """Hold a committed cut for a checkpoint until it is read; asynchronous tables are read as
        they are. A cut that the view no longer has was given up.
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
        if not self._cuts:
            return None
        return min((cut.deadline_s for cut in self._cuts.values()), default=None)

    # --- changes

    @property
    def settings(self) -> tuple[tuple[int, Consistency], ...]:
        """(after which clock, setting), of settings still in use."""
        return tuple(self._settings)

    @property
    def minds_reads(self) -> bool:
        """True if the hold point holds pulls too: not for a checkpoint."""
        return self._holds_reads

    @property
    def prepared(self) -> int:
        """The newest prepared change; 0 before the first."""
        return self._prepared

    def restore(
        self,
        settings: tuple[tuple[int, Consistency], ...],
        number: int,
        prepared: Prepared,
    ) -> None:
        """Restore the schedule of another server, whose place this one takes. Cuts ended with that
        one.
        """
        self._settings = list(settings)
        self.number = number
        self._prepared, self.hold_point, self._holds_reads, self._taken = prepared
        if self.hold_point is not None:
            self._lets_go = self._is_torn_from(self.hold_point)

    def _add(self, change: TableChange) -> None:
        self.number = change.number
        while self._settings[-1][0] >= change.after_clock:  # nothing had reached them
            self._settings.pop()
        self._settings.append((change.after_clock, change.consistency))

    def forget_before(self, clock: int) -> None:
        while len(self._settings) > 1 and self._settings[1][0] < clock:
            del self._settings[0]
