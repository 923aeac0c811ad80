"""The places of a training loop, and the one at which a late joiner begins (SEMANTICS S6).

    for batch in batches:      # a place: the loop begins anew here
        critic.step()
        actor.step()

A joining worker begins with its loop. If the others are between the two steps then, they and it
wait for each other. So each worker tells where its loop began last; the joining worker ends each
step that they have sealed with nothing, until one of them has come to a place.

    the loop              a place is
    trains one model      before each step
    trains several        before a step of the model that it steps first, if another came since
    has save points       each of these, if it trains several
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from enum import Enum
from typing import NamedTuple

from ps_core.keys import TableId


class LoopPlace(NamedTuple):
    """A place of a worker's loop.

    Attributes:
        clocks: of the tables that it trains; empty: it has come to none since it stepped a second
            model, or perhaps is about to step one.
        in_turn: the loop steps several models.
    """

    clocks: Mapping[TableId, int]
    in_turn: bool


class LoopReport(NamedTuple):
    """A worker's report: the newest clocks that it has sealed on the tables that it trains, and its
    last place. `is_alive` until it has left or is gone: one that is silent may go on.
    """

    is_alive: bool
    sealed: Mapping[TableId, int]
    place: LoopPlace


class LoopReports(NamedTuple):
    """The newest reports of the other workers of a run.

    Attributes:
        all_have_told: each that lives and began with the first step has told where its loop is.
    """

    told: Collection[LoopReport] = ()
    all_have_told: bool = True


_NO_PLACE = LoopPlace({}, in_turn=True)

_ALONE_AFTER = 8
"""Steps of a model in a row by which a script shows that it trains it alone."""

_LOOPS_TO_SAVE_POINT = 8
"""Save points that are further apart, as one an epoch, are no places of the loop."""

MOST_FOLLOWED_CLOCKS = 64
"""A late joiner ends at most so many steps of a table with nothing."""


class TrainingLoop:
    """The loop of one worker, as far as its steps show.

    Attributes:
        place: the last; None before the first step.
        clocks: of the tables that it trains, when it began the newest step.
    """

    def __init__(self) -> None:
        self.place: LoopPlace | None = None
        self.clocks: Mapping[TableId, int] = {}
        self._first: Hashable = None  # the model that the loop steps first
        self._newest: Hashable = None  # the one that it stepped last
        self._count = 0  # the steps of it in a row
        self._has_others = False  # another model was stepped since the loop began
        self._loop_count = 0  # times that it has begun since the last save point
        self._has_save_points = False

    def begin_alone(self) -> None:
        """A late joiner begins, and the others train one model alone."""
        self._count = _ALONE_AFTER

    def begin_step(
        self, model: Hashable, clocks: Mapping[TableId, int], *, is_only: bool = True
    ) -> None:
        """The script begins a step of a model, when the tables that it trains have `clocks`.

        Args:
            is_only: the script has made no other model. Else it may come to another one, unless it
                has just stepped this one `_ALONE_AFTER` times.
        """
        self.clocks = clocks
        if self._newest not in (None, model):
            self._count = 0
        self._newest, self._count = model, self._count + 1
        if is_only or self._count > _ALONE_AFTER:
            self._first, self._has_others, self._has_save_points = model, False, False
            self.place = LoopPlace(dict(clocks), in_turn=False)
            return
        if self.place is None or not self.place.in_turn:
            self.place = _NO_PLACE
        if self._first is None:
            self._first = model
        if model != self._first:
            self._has_others = True
        elif self._has_others:
            self._begin_loop(clocks)

    def save_point(self, clocks: Mapping[TableId, int], *, is_only: bool = True) -> None:
        """The script says that it is between two times of its loop; as `begin_step`."""
        if is_only or (self.place is not None and not self.place.in_turn):
            return  # it may begin at each step
        self.clocks = clocks
        self._has_save_points = self._loop_count <= _LOOPS_TO_SAVE_POINT
        self._loop_count = 0
        if self._has_save_points:
            self.place = LoopPlace(dict(clocks), in_turn=True)

    def _begin_loop(self, clocks: Mapping[TableId, int]) -> None:
        self._has_others = False
        self._loop_count += 1
        self._has_save_points &= self._loop_count <= _LOOPS_TO_SAVE_POINT
        if not self._has_save_points:
            self.place = LoopPlace(dict(clocks), in_turn=True)


class Found(Enum):
    """The outcome of a late joiner's question where it begins."""

    NOTHING = "none who lives has told of a loop, and one is to do so"
    ALONE = "it begins where it is: the others step one model, or have taken no step"
    DEAD = "it begins where those who stepped several models were last: nobody who told lives"
    FOLLOWS = "a living worker steps several models: it follows until one is at a place"
    PLACE = "it begins at a place"
    NO_FURTHER = "it begins where it is: it follows them no further"


class PlaceSearch:
    """The search of a late joiner for the place at which it begins.

    Args:
        ended: the clocks up to which it has ended steps with nothing before.

    Attributes:
        clocks: those up to which it ends steps with nothing, of the tables that it has joined.
        placed: the tables on which they are a place.
    """

    def __init__(self, ended: Mapping[TableId, int] | None = None) -> None:
        self.clocks: dict[TableId, int] = dict(ended or {})
        self.placed: frozenset[TableId] = frozenset()
        self._joined: Mapping[TableId, int] = {}

    def hear(
        self,
        joined: Mapping[TableId, int],
        reports: LoopReports,
        awaited: Collection[TableId] = (),
        own: Mapping[TableId, int] | None = None,
    ) -> Found:
        """Take the clocks after which it has joined its tables, as far as it has, and what the
        others have told.

        Args:
            awaited: tables that it has not joined yet.
            own: its clocks on others, on which it ends no steps: they were made after it came, or
                its script has begun to step them. A worker that is further there waits for it.
        """
        self._joined = joined
        self.clocks = {t: max(clock, self.clocks.get(t, 0)) for t, clock in joined.items()}
        living = [report for report in reports.told if report.is_alive]
        if not living:
            in_turn = [report for report in reports.told if report.place.in_turn]
            self._follow(in_turn)
            are_known = reports.all_have_told or not in_turn
            return Found.DEAD if reports.told and are_known else Found.NOTHING
        if not any(report.place.in_turn for report in living):
            return Found.ALONE
        if self._has_come([report.place for report in living], awaited):
            return Found.PLACE
        is_free = all(
            r.sealed.get(t, 0) <= clock for r in living for t, clock in (own or {}).items()
        )
        return Found.FOLLOWS if self._follow(living) and is_free else Found.NO_FURTHER

    def _follow(self, reports: Collection[LoopReport]) -> bool:
        """False if others have sealed more than it follows."""
        is_near = True
        for report in reports:
            for table in report.sealed.keys() & self.clocks.keys():
                clock = max(self.clocks[table], report.sealed[table])
                if clock <= self._joined[table] + MOST_FOLLOWED_CLOCKS:
                    self.clocks[table] = clock
                else:
                    is_near = False
        return is_near

    def _has_come(self, places: Collection[LoopPlace], awaited: Collection[TableId]) -> bool:
        """True if one is at a place that is not before `clocks`, which are at the nearest then."""
        for place in sorted(places, key=lambda place: sum(place.clocks.values())):
            shared = {t: c for t, c in place.clocks.items() if t in self.clocks}
            if (
                place.in_turn
                and shared
                and place.clocks.keys().isdisjoint(awaited)
                and all(
                    self.clocks[table] <= clock <= self._joined[table] + MOST_FOLLOWED_CLOCKS
                    for table, clock in shared.items()
                )
            ):
                self.clocks |= shared
                self.placed = frozenset(shared)
                return True
        return False
