"""The versions of tables, from what an update log says was decided (docs/reference/UPDATE_LOG.md).

    changes, in the order of the log --grouped: what one decision did--> versions

Rules:
    - What one decision did in several ranges, tables and servers is one step: under BSP the update
      of a clock, else what one worker sealed with one clock.
    - Where all is BSP, a version is a clock: every range has that update, and nothing beyond it.
    - Else versions are counted, in the order in which steps were done: everything is as it was when
      the last change of that step was made. Of other steps it has what had been made by then.
    - A step that is not in every range is no version.

Invariants:
    VER-1  The changes of one table in one range are made in the order in which they were decided.

What it deliberately does not do: make changes (`ps_server.replay.replayer` does), or read files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ps_core.keys import Incarnation, RangeId, TableId

Place = tuple[TableId, RangeId]
Step = tuple[int, Incarnation | None]
"""A clock, and whose step it was; nobody's under BSP."""

INITIAL: Step = (0, None)
"""The initial values that rank 0 gave."""


class Part(NamedTuple):
    """Who had a part in an update."""

    rank: int
    incarnation: Incarnation
    skip: bool


class Decision(NamedTuple):
    """One table in one range got an update, or its initial values.

    Attributes:
        clock: of the update.
        is_bsp: whether it has every worker's step of that clock.
        parts: who had one.
        gone_count: workers that were declared gone, whose step is missing.
        staleness: updates by others that the step had not seen: the most of any block.
    """

    clock: int
    is_bsp: bool
    parts: tuple[Part, ...]
    gone_count: int = 0
    staleness: int = 0

    @property
    def step(self) -> Step:
        """What it is a part of."""
        if self.is_bsp or not self.clock or not self.parts:
            return self.clock, None
        return self.clock, self.parts[0].incarnation


class Origin(Enum):
    """Where a change comes from."""

    RECORD = "record"
    BEGIN = "begin"
    """A snapshot with which the log begins: what came before is not there."""
    JUMP = "jump"
    """A snapshot that has more than what came before it: what lies between is in no log."""
    SAME = "same"
    """A snapshot of what came before it."""


class Change(NamedTuple):
    """What happened to one table in one range.

    Attributes:
        place: where.
        origin: see there.
        clock: the newest that the values have anything of.
        time_s: when it was written, by its server's clock.
        decisions: what became values with it.
        payloads: its messages, opaque here.
        where: its file and its byte, for people.
    """

    place: Place
    origin: Origin
    clock: int
    time_s: float
    decisions: tuple[Decision, ...]
    payloads: tuple[memoryview, ...]
    where: str


@dataclass(slots=True)
class Reached:
    """How far one table in one range is at the end of the log.

    Attributes:
        first_clock: where it began.
        clock: up to it all is decided.
        done: the same of each worker.
    """

    first_clock: int
    clock: int = 0
    done: dict[Incarnation, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the tables that were chosen.

    Attributes:
        number: its name.
        clock: of the step that made it.
        step: that step; None: the first, with which the log begins.
        position: it has the changes up to that position.
        time_s: when the last change of the step was written.
        ranks: who had a part in it, in every range and table of the step.
        partial_ranks: who had one in some of them only (backup workers).
        skipped_ranks: who took part in it with nothing.
        gone_count: workers that were declared gone, whose step is missing.
        staleness: updates by others that the step had not seen: the most of any block.
    """

    number: int
    clock: int
    step: Step | None
    position: int
    time_s: float
    ranks: tuple[int, ...] = ()
    partial_ranks: tuple[int, ...] = ()
    skipped_ranks: tuple[int, ...] = ()
    gone_count: int = 0
    staleness: int = 0


@dataclass(slots=True)
class History:
    """What happened to the tables that were chosen.

    Attributes:
        is_by_clock: whether a version is a clock.
        changes: with their positions, in the order in which they are made again.
        versions: ascending.
        unfinished: steps that are not in every range.
        lost_count: clocks that are no version, because what lies around them is in no log.
    """

    is_by_clock: bool
    changes: list[tuple[int, Change]]
    versions: list[Version]
    unfinished: list[Step]
    lost_count: int = 0


def history_of(changes: Sequence[Change], reached: Mapping[Place, Reached]) -> History:
    """The versions of these tables.

    Args:
        changes: what happened to them, in the order of the log.
        reached: every place that they are in.
    """
    decided = [d for change in changes for d in change.decisions if d.clock]
    if all(decision.is_bsp for decision in decided):
        return _by_clock(changes, reached)
    return _by_order(changes, reached)


def arranged_by_clock(changes: Iterable[Change]) -> list[tuple[int, Change]]:
    """The changes, each at the clock that it brings its place to."""
    clocks: dict[Place, int] = {}
    placed = []
    for change in changes:
        clock = clocks[change.place] = max(clocks.get(change.place, 0), change.clock)
        placed.append((clock, change))
    return sorted(placed, key=lambda each: each[0])  # stable: VER-1


def torn_at(changes: Iterable[Change], clock: int) -> str:
    """Why there was no moment at which a place had all up to `clock` and nothing beyond it; empty
    if there was one in each.
    """
    newest: dict[Place, Change] = {}
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
        if change.origin in (Origin.BEGIN, Origin.JUMP) and change.clock > clock and _skips(
            change, before, clock
        ):  # fmt: skip
            return f"range {change.place[1]} is at clock {change.clock} where its log goes on"
    return ""


def _skips(change: Change, before: Change | None, clock: int) -> bool:
    """Whether a snapshot comes where the clock should have been."""
    return change.origin is Origin.BEGIN or (before is not None and before.clock < clock)


# --- a version is a clock


def _by_clock(changes: Sequence[Change], reached: Mapping[Place, Reached]) -> History:
    placed = arranged_by_clock(changes)
    first = max((each.first_clock for each in reached.values()), default=0)
    begins = [c.clock for c in changes if c.origin is Origin.BEGIN]
    first = max([first, *begins])
    found: dict[int, _Gathered] = {}
    times: list[float] = []
    for clock, change in placed:
        if clock <= first and (change.origin is Origin.BEGIN or change.decisions):
            times.append(change.time_s)
        for decision in change.decisions:
            if decision.clock:
                found.setdefault(decision.clock, _Gathered()).add(change, decision)
    lost = _leapt(changes)
    begin_s = max(times, default=0.0)
    versions = [Version(first, first, INITIAL if not first else None, first, begin_s)]
    history = History(True, placed, versions, [])
    for clock, gathered in sorted(found.items()):
        if clock <= first:
            continue
        tables = gathered.tables
        if any(each.clock < clock for place, each in reached.items() if place[0] in tables):
            history.unfinished.append((clock, None))
        elif clock in lost:
            history.lost_count += 1
        else:
            versions.append(gathered.version(clock, (clock, None), clock))
    return history


def _leapt(changes: Sequence[Change]) -> set[int]:
    """Clocks that some place has never been at."""
    found: set[int] = set()
    clocks: dict[Place, int] = {}
    for change in changes:
        before = clocks.get(change.place, 0)
        if change.origin is Origin.JUMP:
            found.update(range(before + 1, change.clock))
        clocks[change.place] = max(before, change.clock)
    return found


# --- versions are counted


def _by_order(changes: Sequence[Change], reached: Mapping[Place, Reached]) -> History:
    placed = list(enumerate(changes))
    begin = 0
    found: dict[Step, _Gathered] = {}
    ends: dict[Step, int] = {}
    for position, change in placed:
        if change.origin is Origin.BEGIN or any(not d.clock for d in change.decisions):
            begin = position
        for decision in change.decisions:
            if decision.clock:
                found.setdefault(decision.step, _Gathered()).add(change, decision)
                ends[decision.step] = position
    begun = changes[begin] if changes else None
    first_clock = begun.clock if begun is not None and begun.origin is Origin.BEGIN else 0
    is_initial = begun is not None and any(not d.clock for d in begun.decisions)
    if begun is None or not (is_initial or begun.origin is Origin.BEGIN):
        begin = -1  # the tables begin with what their specs say
    begin_s = changes[max(begin, 0)].time_s if changes else 0.0
    step = INITIAL if is_initial else None
    versions = [Version(0, first_clock, step, begin, begin_s)]
    history = History(False, placed, versions, [])
    for step, end in sorted(ends.items(), key=lambda each: each[1]):
        if end <= begin:
            continue
        if not _is_everywhere(step, found[step].tables, reached):
            history.unfinished.append(step)
            continue
        versions.append(found[step].version(len(versions), step, end))
    return history


def _is_everywhere(step: Step, tables: set[TableId], reached: Mapping[Place, Reached]) -> bool:
    clock, incarnation = step
    for place, each in reached.items():
        if place[0] in tables:
            done = each.clock if incarnation is None else each.done.get(incarnation, 0)
            if done < clock:
                return False
    return True


class _Gathered:
    """What is known of one step."""

    __slots__ = ("_counts", "_gone_count", "_place_count", "_skipped", "_staleness", "_time_s",
                 "tables")  # fmt: skip

    def __init__(self) -> None:
        self.tables: set[TableId] = set()
        self._time_s = 0.0
        self._counts: dict[int, int] = {}
        self._skipped: set[int] = set()
        self._place_count = 0
        self._gone_count = 0
        self._staleness = 0

    def add(self, change: Change, decision: Decision) -> None:
        self.tables.add(change.place[0])
        self._time_s = max(self._time_s, change.time_s)
        self._place_count += 1
        self._gone_count = max(self._gone_count, decision.gone_count)
        self._staleness = max(self._staleness, decision.staleness)
        for part in decision.parts:
            if part.skip:
                self._skipped.add(part.rank)
            else:
                self._counts[part.rank] = self._counts.get(part.rank, 0) + 1

    def version(self, number: int, step: Step, position: int) -> Version:
        is_whole = self._place_count if step[1] is None else 0  # a push at a time: eager
        return Version(
            number,
            step[0],
            step,
            position,
            self._time_s,
            tuple(sorted(rank for rank, n in self._counts.items() if n >= is_whole)),
            tuple(sorted(rank for rank, n in self._counts.items() if n < is_whole)),
            tuple(sorted(self._skipped - self._counts.keys())),
            self._gone_count,
            self._staleness,
        )
