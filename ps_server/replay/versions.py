"""Versions of tables, from the decisions in update logs (docs/reference/UPDATE_LOG.md).

    changes, in the order of the log --grouped by step--> versions

Rules:
    - A step is one decision in all ranges, tables and servers: under BSP the update of a clock,
      else the changes that one worker sealed with one clock.
    - If all is BSP, a version is a clock: every range has that update, and nothing beyond it.
    - Else versions are counted, in the order in which steps were completed: a version is everything
      as it was when the last change of its step was made, changes of other steps included.
    - Counted versions begin with the last initial values, or the last snapshot with which a range
      begins. Steps that ended before them are no versions.
    - A step that is not in every range is no version.

Invariants:
    VER-1  The changes of one table in one range are made in the order in which they were decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ps_core.keys import Incarnation, RangeId, TableId

ShardKey = tuple[TableId, RangeId]
VersionStep = tuple[int, Incarnation | None]
"""A clock, and the worker whose step it was; None under BSP."""

INITIAL: VersionStep = (0, None)
"""The initial values of rank 0."""


class Participant(NamedTuple):
    """A worker that took part in an update."""

    rank: int
    incarnation: Incarnation
    skip: bool


class UpdateDecision(NamedTuple):
    """One table in one range got an update, or its initial values.

    Attributes:
        is_bsp: True if it has every worker's step of the clock.
        gone_count: workers that were declared gone, whose step is missing.
        staleness: updates by others that the step had not seen, the most of any block.
    """

    clock: int
    is_bsp: bool
    participants: tuple[Participant, ...]
    gone_count: int = 0
    staleness: int = 0

    @property
    def step(self) -> VersionStep:
        if self.is_bsp or not self.clock or not self.participants:
            return self.clock, None
        return self.clock, self.participants[0].incarnation


class Origin(Enum):
    """Sources of changes."""

    RECORD = "record"
    BEGIN = "begin"
    """A snapshot with which the log begins."""
    JUMP = "jump"
    """A snapshot with updates that are in no log before it."""
    SAME = "same"
    """A snapshot with the updates before it."""


class ReplayedChange(NamedTuple):
    """A change of one table in one range.

    Attributes:
        clock: the newest clock of which the values have anything.
        time_s: time of the write, by its server's clock.
        decisions: whose updates became values with it.
        payloads: its messages, opaque here.
        where: its file and byte, for people.
    """

    place: ShardKey
    origin: Origin
    clock: int
    time_s: float
    decisions: tuple[UpdateDecision, ...]
    payloads: tuple[memoryview, ...]
    where: str


@dataclass(slots=True)
class Reached:
    """Clocks of one table in one range at the end of the log.

    Attributes:
        first_clock: at its begin.
        clock: up to it all steps are decided.
        done: up to these all steps of each worker are decided.
    """

    first_clock: int
    clock: int = 0
    done: dict[Incarnation, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the chosen tables.

    Attributes:
        step: made it; None for the first version, with which the log begins.
        position: it has the changes up to this position.
        time_s: time at which the last change of the step was written.
        ranks: workers with a contribution in every range and table of the step.
        partial_ranks: workers with one in some of them only (backup workers).
        skipped_ranks: workers that took part without a contribution.
        gone_count: workers that were declared gone, whose step is missing.
        staleness: updates by others that the step had not seen, the most of any block.
    """

    number: int
    clock: int
    step: VersionStep | None
    position: int
    time_s: float
    ranks: tuple[int, ...] = ()
    partial_ranks: tuple[int, ...] = ()
    skipped_ranks: tuple[int, ...] = ()
    gone_count: int = 0
    staleness: int = 0


@dataclass(slots=True)
class History:
    """Changes and versions of the chosen tables.

    Attributes:
        is_by_clock: a version is a clock.
        changes: with their positions, in the order in which they are made again.
        unfinished: steps that are not in every range.
        lost_count: clocks that are no version, because some of their updates are in no log.
        earlier_count: steps that are no version, because they ended before the initial values of a
            table that came late, `late_table`.
    """

    is_by_clock: bool
    changes: list[tuple[int, ReplayedChange]]
    versions: list[Version]
    unfinished: list[VersionStep]
    lost_count: int = 0
    earlier_count: int = 0
    late_table: TableId | None = None


def history_of(changes: Sequence[ReplayedChange], reached: Mapping[ShardKey, Reached]) -> History:
    """Versions of tables, from their changes in the order of the log, and all their shards."""
    decided = [d for change in changes for d in change.decisions if d.clock]
    if all(decision.is_bsp for decision in decided):
        return _by_clock(changes, reached)
    return _by_order(changes, reached)


def arranged_by_clock(changes: Iterable[ReplayedChange]) -> list[tuple[int, ReplayedChange]]:
    """The changes, each with the clock that its shard has after it."""
    clocks: dict[ShardKey, int] = {}
    placed = []
    for change in changes:
        clock = clocks[change.place] = max(clocks.get(change.place, 0), change.clock)
        placed.append((clock, change))
    return sorted(placed, key=lambda each: each[0])  # stable: VER-1


def torn_at(
    changes: Iterable[ReplayedChange], reached: Mapping[ShardKey, Reached], clock: int
) -> str:
    """Reason that some shard never had all up to `clock` and nothing beyond it; empty if each had
    such a moment.
    """
    newest: dict[ShardKey, ReplayedChange] = {}
    for change in changes:
        before = newest.get(change.place)
        if before is None or change.clock > before.clock:
            newest[change.place] = change
        is_late = any(0 < decision.clock <= clock for decision in change.decisions)
        if is_late and before is not None and before.clock > clock:
            return (
                f"range {change.place[1]} got clock {before.clock} ({before.where}) before all of "
                f"clock {clock} ({change.where})"
            )
        was_at = reached[change.place].first_clock if before is None else before.clock
        is_short = was_at < clock
        comes_instead = change.origin is Origin.BEGIN or (change.origin is Origin.JUMP and is_short)
        if comes_instead and change.clock > clock:
            return f"range {change.place[1]} is at clock {change.clock} where its log goes on"
    return ""


# --- a version is a clock


def _by_clock(changes: Sequence[ReplayedChange], reached: Mapping[ShardKey, Reached]) -> History:
    placed = arranged_by_clock(changes)
    begins = [change.clock for change in changes if change.origin is Origin.BEGIN]
    first = max([0, *begins, *(each.first_clock for each in reached.values())])
    found: dict[int, _Gathered] = {}
    times: list[float] = []
    for clock, change in placed:
        if clock <= first and (change.origin is Origin.BEGIN or change.decisions):
            times.append(change.time_s)
        for decision in change.decisions:
            if decision.clock:
                found.setdefault(decision.clock, _Gathered()).add(change, decision)
    lost = _leapt(changes)
    begin_s = max(times, default=min((change.time_s for change in changes), default=0.0))
    versions = [Version(first, first, INITIAL if not first else None, first, begin_s)]
    history = History(True, placed, versions, [])
    for clock, gathered in sorted(found.items()):
        if clock <= first:
            continue
        if not _is_everywhere((clock, None), gathered.tables, reached):
            history.unfinished.append((clock, None))
        elif clock in lost:
            history.lost_count += 1
        else:
            versions.append(gathered.version(clock, (clock, None), clock))
    return history


def _leapt(changes: Sequence[ReplayedChange]) -> set[int]:
    """Clocks at which some shard never was."""
    found: set[int] = set()
    clocks: dict[ShardKey, int] = {}
    for change in changes:
        before = clocks.get(change.place, 0)
        if change.origin is Origin.JUMP:
            found.update(range(before + 1, change.clock))
        clocks[change.place] = max(before, change.clock)
    return found


# --- versions are counted


def _by_order(changes: Sequence[ReplayedChange], reached: Mapping[ShardKey, Reached]) -> History:
    placed = list(enumerate(changes))
    begin, snapshot = 0, -1
    found: dict[VersionStep, _Gathered] = {}
    ends: dict[VersionStep, int] = {}
    for position, change in placed:
        if change.origin is Origin.BEGIN or any(not d.clock for d in change.decisions):
            begin = position
            snapshot = position if change.origin is Origin.BEGIN else snapshot
        for decision in change.decisions:
            if decision.clock:
                found.setdefault(decision.step, _Gathered()).add(change, decision)
                ends[decision.step] = position
    first = changes[begin] if changes else None
    is_snapshot = first is not None and first.origin is Origin.BEGIN
    first_clock = first.clock if first is not None and is_snapshot else 0
    is_initial = first is not None and any(not d.clock for d in first.decisions)
    if not (is_initial or is_snapshot):
        begin = -1  # the tables begin with what their specs say
    begin_s = changes[max(begin, 0)].time_s if changes else 0.0
    versions = [Version(0, first_clock, INITIAL if is_initial else None, begin, begin_s)]
    history = History(False, placed, versions, [])
    for step, end in sorted(ends.items(), key=lambda each: each[1]):
        if end <= begin:
            if is_initial and snapshot < end < begin:
                history.earlier_count += 1
                history.late_table = changes[begin].place[0]
            continue
        if not _is_everywhere(step, found[step].tables, reached):
            history.unfinished.append(step)
            continue
        versions.append(found[step].version(len(versions), step, end))
    return history


def _is_everywhere(
    step: VersionStep, tables: set[TableId], reached: Mapping[ShardKey, Reached]
) -> bool:
    clock, incarnation = step
    return all(
        (each.clock if incarnation is None else each.done.get(incarnation, 0)) >= clock
        for (table_id, _), each in reached.items()
        if table_id in tables
    )


@dataclass(slots=True)
class _Gathered:
    tables: set[TableId] = field(default_factory=set)
    time_s: float = 0.0
    place_count: int = 0
    counts: Counter[int] = field(default_factory=Counter)  # of contributions, by rank
    skipped: set[int] = field(default_factory=set)
    gone_count: int = 0
    staleness: int = 0

    def add(self, change: ReplayedChange, decision: UpdateDecision) -> None:
        self.tables.add(change.place[0])
        self.time_s = max(self.time_s, change.time_s)
        self.place_count += 1
        self.counts.update(each.rank for each in decision.participants if not each.skip)
        self.skipped.update(each.rank for each in decision.participants if each.skip)
        self.gone_count = max(self.gone_count, decision.gone_count)
        self.staleness = max(self.staleness, decision.staleness)

    def version(self, number: int, step: VersionStep, position: int) -> Version:
        is_whole = self.place_count if step[1] is None else 0  # a push at a time: eager
        return Version(
            number,
            step[0],
            step,
            position,
            self.time_s,
            tuple(sorted(rank for rank, n in self.counts.items() if n >= is_whole)),
            tuple(sorted(rank for rank, n in self.counts.items() if n < is_whole)),
            tuple(sorted(self.skipped - self.counts.keys())),
            self.gone_count,
            self.staleness,
        )
