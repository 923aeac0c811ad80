"""The places of a training loop, and the one at which a late joiner begins (SEMANTICS S6).

    for batch in batches:      # a place: the loop begins anew here
        critic.step()
        actor.step()

A joining worker begins with its loop. If the others are between the two steps then, they and it
wait for each other. So each worker tells where its loop began last, and how many clocks of each
table the loop took the time before; the joining worker ends steps with nothing up to a place.

    the loop              a place is
    trains one model      before each step
    trains several        before a step of the model that it steps first, if another came since
    does, and has save    each of these, unless they are many times of the loop apart
    points
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple

from ps_core.keys import TableId


class LoopPlace(NamedTuple):
    """A place of a worker's loop.

    Attributes:
        clocks: of the tables that it steps; empty: it has come to none since it stepped a second
            model.
        steps: the clocks that the loop took the last time; empty: it has not been around.
        in_turn: the loop steps several models.
    """

    clocks: Mapping[TableId, int]
    steps: Mapping[TableId, int]
    in_turn: bool


class LoopReport(NamedTuple):
    """A worker's report: the newest clocks that it has sealed on the tables that it steps, and its
    last place.
    """

    is_alive: bool
    sealed: Mapping[TableId, int]
    place: LoopPlace


_NO_PLACE = LoopPlace({}, {}, in_turn=True)
"""The script steps several models, or perhaps will, and has not come to a place that shows."""

_ALONE_AFTER = 8
"""Steps of a model in a row, from the first on, by which a script shows that it trains it alone."""

_LOOPS_TO_SAVE_POINT = 8
"""Save points that are further apart, as one an epoch, are no places of the loop."""


class TrainingLoop:
    """The loop of one worker, as far as its steps show.

    Attributes:
        place: the last; None before the first step.
        clocks: of the tables that it steps, when it began the newest step.
    """

    def __init__(self) -> None:
        self.place: LoopPlace | None = None
        self.clocks: Mapping[TableId, int] = {}
        self._first: Hashable = None  # the model that the loop steps first
        self._count = 0  # its steps
        self._in_turn = False
        self._has_others = False  # another model was stepped since the loop began
        self._loop_count = 0  # times that it has begun since the last save point
        self._has_save_points = False

    def begin_at(self, clocks: Mapping[TableId, int], place: LoopPlace) -> None:
        """A late joiner begins at these clocks, in a loop as that of `place`."""
        self.place, self._in_turn = place._replace(clocks=dict(clocks)), place.in_turn
        self._count = _ALONE_AFTER

    def begin_step(
        self, model: Hashable, clocks: Mapping[TableId, int], *, is_only: bool = True
    ) -> None:
        """The script begins a step of a model, when the tables that it steps have `clocks`.

        Args:
            is_only: the script has made no other model. Else it may come to another one, unless it
                has stepped this one `_ALONE_AFTER` times.
        """
        self.clocks = clocks
        if self._first is None:
            self._first = model
        if model != self._first:
            self._has_others = True
            self._step_in_turn()
            return
        self._count += 1
        if self._has_others or (not self._in_turn and (is_only or self._count > _ALONE_AFTER)):
            self._has_others = False
            self._loop_count += 1
            if self._loop_count > _LOOPS_TO_SAVE_POINT:
                self._heed_save_points(False)
            if not self._has_save_points:
                self._come(clocks, in_turn=self._in_turn)
        elif self.place is None or not (self._in_turn or self._has_save_points):
            self.place = _NO_PLACE

    def save_point(self, clocks: Mapping[TableId, int], *, is_only: bool = True) -> None:
        """The script says that it is between two times of its loop; as `begin_step`."""
        if is_only and not self._in_turn:
            return  # it may begin at each step
        self.clocks = clocks
        self._heed_save_points(self._loop_count <= _LOOPS_TO_SAVE_POINT)
        self._loop_count = 0
        if self._has_save_points:
            self._come(clocks, in_turn=True)

    def _heed_save_points(self, has_save_points: bool) -> None:
        if has_save_points is not self._has_save_points:
            self._has_save_points = has_save_points
            self.place = None if self.place is None else _NO_PLACE

    def _step_in_turn(self) -> None:
        if not self._in_turn and not self._has_save_points:
            self.place = _NO_PLACE
        self._in_turn = True

    def _come(self, clocks: Mapping[TableId, int], *, in_turn: bool) -> None:
        before = self.place or _NO_PLACE
        known = before.clocks
        moved = {table: clock - known.get(table, clock) for table, clock in clocks.items()}
        steps = moved if any(moved.values()) else before.steps
        self.place = LoopPlace(dict(clocks), steps, in_turn)


def first_place(place: LoopPlace, clocks: Mapping[TableId, int]) -> dict[TableId, int]:
    """The first place of a loop at which no table is below `clocks`, if the loop goes on as it did
    the last time; that of one model has a step of each table. Tables that it does not step stay.
    """
    steps = place.steps or ({} if place.in_turn else dict.fromkeys(place.clocks, 1))
    stepped = {t: count for t, count in steps.items() if count > 0 and t in clocks}
    times = max((-((place.clocks[t] - clocks[t]) // n) for t, n in stepped.items()), default=0)
    found = {t: max(clock, place.clocks.get(t, 0)) for t, clock in clocks.items()}
    return found | {t: place.clocks[t] + times * count for t, count in stepped.items()}


class PlaceSearch:
    """The search of a late joiner for the place at which it begins.

    Args:
        joined: the clocks after which it has joined the tables of its run.
        firsts: the clocks at which these tables began.

    Attributes:
        clocks: those up to which it ends steps with nothing; the place, once it is found.
        place: one of another worker, if any has told.
    """

    def __init__(self, joined: Mapping[TableId, int], firsts: Mapping[TableId, int]) -> None:
        self.clocks = dict(joined)
        self.place: LoopPlace | None = None
        self._is_at_start = all(clock <= firsts[table] for table, clock in joined.items())

    def hear(self, reports: Collection[LoopReport]) -> bool:
        """Take the newest reports of the other workers; True once it may begin at `clocks`.

        Where they step several models in turn, it may only when one of them has come to a place
        that is not before `clocks`. Until then it ends each step that one of them has sealed.
        """
        if self._is_at_start:
            return True
        if not reports:
            return False
        best = max(reports, key=_knowledge).place
        if best != self.place and best.clocks:  # else its loop may go on otherwise
            self.clocks = first_place(best, self.clocks)
        self.place = best
        live = [report for report in reports if report.is_alive]
        if not live or not best.in_turn or self._has_come(live):
            return True
        for report in live:
            for table, clock in report.sealed.items():
                self.clocks[table] = max(self.clocks.get(table, clock), clock)
        return False

    def _has_come(self, live: Iterable[LoopReport]) -> bool:
        """True if one has come to a place that is not before `clocks`, which are at one then."""
        places = [report.place for report in live if report.place.in_turn]
        for place in sorted(places, key=lambda place: sum(place.clocks.values())):
            shared = {t: c for t, c in place.clocks.items() if t in self.clocks}
            stepped = [t for t in shared if not place.steps or place.steps.get(t)]
            if not shared or any(shared[t] < self.clocks[t] for t in stepped):
                continue
            if not place.steps or first_place(place, self.clocks) != self.clocks:
                self.clocks |= {t: max(self.clocks[t], clock) for t, clock in shared.items()}
            return True
        return False


def _knowledge(report: LoopReport) -> tuple[bool, bool, bool, int]:
    """The order of workers that have told: by what they know of the loop. One that steps a second
    model knows more than one that has not come to it.
    """
    place = report.place
    return place.in_turn, bool(place.steps), report.is_alive, sum(place.clocks.values())
