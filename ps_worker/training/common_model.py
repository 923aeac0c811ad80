"""Gives all workers the same parameters: two barriers with a pull between them (SEMANTICS S17).

With `Outer` the first barrier carries whether a worker has moved since its last outer step. If one
has, all take an outer step, and meet again, until the servers have every move: one that came too
late is in the next outer step.

Rules:
    - With backup workers no more take an outer step than an update has, unless more have moved.
      Else those that have not might be first each time. The others pass its clock.
    - The next call resumes one that was interrupted. So does the next step, which otherwise only
      some workers would pull.
    - Changes that the script makes after an interruption stay: they are an edit of the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ps_core.errors import EditRefused, InvalidConfig
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.client.client import Client
from ps_worker.steps.inner_steps import InnerSteps
from ps_worker.training.local_optimizer import OuterNeeds
from ps_worker.training.module_buffers import BufferTable
from ps_worker.training.planned_edits import FROZEN, PlannedEdits, is_of_frozen, names_of
from ps_worker.training.tables.trained_table import TrainedTable

_PULL = ""
"""The pull, among the names of barriers."""


@dataclass(frozen=True, slots=True)
class EarlyOuterStep:
    """An outer step that a meeting takes before it is due.

    Attributes:
        inner: the inner steps since the last one.
        needs: says what it needs of the other workers, at this worker's present clock.
        pass_to: passes the clocks up to the given one.
        seal: seals it.
        end: waits for the end of the one that is sealed, if one is.
    """

    inner: InnerSteps
    needs: Callable[[], OuterNeeds]
    pass_to: Callable[[int], object]
    seal: Callable[[], object]
    end: Callable[[], object]


class Share(NamedTuple):
    """One worker's share of the first barrier."""

    rank: int
    has_moved: bool
    needs: OuterNeeds


def outer_takers(shares: Sequence[Share]) -> list[int]:
    """The ranks that take the next outer step of a meeting: none, if nobody has moved."""
    movers = [share for share in shares if share.has_moved]
    ranks = [share.rank for share in movers]
    if any(share.needs.waits_for_others for share in movers):
        others = [share.rank for share in shares if not share.has_moved]
        enough = enough_for_all(shares)
        ranks += others[: max(enough - len(ranks), 0)] if enough else others
    return ranks


def least_clock_of_all(shares: Sequence[Share]) -> int:
    """The clock that every worker must be at before the next outer step."""
    return max(share.needs.least_clock for share in shares)


def enough_for_all(shares: Sequence[Share]) -> int:
    """The workers whose steps make the next update, with backup workers; 0: it has those of all.
    Where the views of the workers furthest on differ, all take the step: nobody is waited for then
    who does not.
    """
    least = least_clock_of_all(shares)
    furthest = [share.needs.enough for share in shares if share.needs.least_clock == least]
    return max(share.needs.enough for share in shares) if all(furthest) else 0


def may_be_behind(shares: Sequence[Share]) -> bool:
    """True if a worker may have taken no part in the step before: its clock is to be passed."""
    return any(share.needs.enough for share in shares)


class CommonModel:
    """The meetings of one model's workers; tables, buffers and edits are the owner's."""

    def __init__(
        self,
        client: Client,
        name: str,
        tables: Sequence[TrainedTable],
        buffers: Sequence[BufferTable],
        edits: PlannedEdits,
    ) -> None:
        self._client = client
        self._name = name
        self._tables = tables
        self._buffers = buffers
        self._edits = edits
        self._left: deque[str] = deque()  # the barriers, and the pull, that have not ended
        self._is_due = False  # the workers have agreed on an outer step
        self._least_clock = 0  # from which on all take it

    @property
    def is_interrupted(self) -> bool:
        """True if a meeting was begun and has not ended."""
        return bool(self._left)

    def meet(
        self, timeout_s: float | None, *, is_pulled: bool, outer: EarlyOuterStep | None
    ) -> None:
        """Wait until all workers have called this, and have the model; raises as
        `DistributedOptimizer.synchronize`. `is_pulled` is False if they have the same anyway;
        `outer` is None without `Outer`.
        """
        went_on = self.is_interrupted
        if not went_on:
            has_moved = outer is not None and outer.inner.have_moved
            if is_pulled and not has_moved:  # else a change counts as a move
                self._check_unchanged()
            self._least_clock = 0
            self._is_due = has_moved and outer is not None and not outer.needs().waits_for_others
            # After the first barrier no worker takes a step, until all have passed the second.
            self._left.append(f"synchronize {self._name}")
            self._left.extend([_PULL, f"synchronized {self._name}"] if is_pulled else [])
        self.go_on(timeout_s, outer)
        if went_on and is_pulled:
            self._check_unchanged()

    def go_on(self, timeout_s: float | None = None, outer: EarlyOuterStep | None = None) -> None:
        """End a meeting that was interrupted, if one was. Changed parameters keep their values."""
        try:
            while self._left:
                if self._left[0] == _PULL:
                    if outer is None or not self._keeps_moves(outer):
                        self._pull_all()
                    self._left.popleft()
                elif outer is not None and _PULL in self._left:
                    self._take_outer_step(outer, timeout_s)
                else:
                    calls = self._client.collectives
                    with self._meeting():
                        calls.barrier_left_open(self._left[0], timeout_s=timeout_s)
                    with uninterrupted():
                        calls.close_call()
                        self._left.popleft()
        except BaseException:
            if _PULL in self._left:
                parts: list[TrainedTable | BufferTable] = [*self._tables, *self._buffers]
                with uninterrupted():
                    for part in parts:
                        part.left()
            raise

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """A collective call, which ends for all with the error of different calls."""
        try:
            yield
        except InvalidConfig:
            self._left.clear()
            for table in self._tables:  # which a call before may have left
                table.forget_left()
            raise

    def _keeps_moves(self, outer: EarlyOuterStep) -> bool:
        """True for a late joiner that has moved before its first outer step, which takes the moves:
        nobody waits at the barrier for it, and it would wait in an early step for the others.
        """
        return outer.inner.have_moved and not self._client.collectives.takes_part

    def _take_outer_step(self, outer: EarlyOuterStep, timeout_s: float | None) -> None:
        """The first barrier, and before it outer steps of all workers, while any has moved."""
        calls, rank = self._client.collectives, self._client.rank
        while True:
            if self._is_due:
                if not outer.inner.have_moved:  # else a change counts as a move
                    self._check_unchanged()
                with uninterrupted():
                    outer.pass_to(self._least_clock)
                    outer.seal()
                    self._is_due = False
            outer.end()
            if not calls.takes_part:
                self._left.popleft()
                return
            given = (rank, outer.inner.have_moved, tuple(outer.needs()))
            with self._meeting():
                found = calls.gather_left_open(given, name=self._left[0], timeout_s=timeout_s)
            with uninterrupted():
                calls.close_call()
                shares = [Share(other, moved, OuterNeeds(*needs)) for other, moved, needs in found]
                takers = outer_takers(shares)
                self._is_due = rank in takers
                self._least_clock = least_clock_of_all(shares)
                if not takers:
                    if may_be_behind(shares):
                        outer.pass_to(self._least_clock)
                    self._left.popleft()
                    return

    def _check_unchanged(self) -> None:
        each = [(table, table.edited(looks=True)) for table in self._tables]
        edited = {table: indexes for table, indexes in each if indexes}
        if edited:
            is_frozen = is_of_frozen(edited)
            remedy = f"or take a step() {'under BSP ' if is_frozen else ''}first"
            if self.is_interrupted:
                remedy = "and call synchronize() or step() again"
            self._edits.look_next()  # as all workers do, before the same step
            raise EditRefused(
                f"parameter {names_of(edited)} of '{self._name}' was changed since the last "
                f"step, and synchronize would give it the servers' value. Undo the change, {remedy}"
                + (f". {FROZEN}" if is_frozen else "")
            )

    def _pull_all(self) -> None:
        """Pull all parameters and buffers, while no worker takes a step."""
        pulled = [buffers for buffers in self._buffers if buffers.is_pulled]
        for table in self._tables:
            table.begin_refresh()
        for buffers in pulled:
            buffers.begin_pull()
        for table in self._tables:
            table.finish_refresh()
        with uninterrupted():
            for table in self._tables:
                table.write_common_values()
        for buffers in pulled:
            buffers.finish()
