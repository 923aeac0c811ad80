"""Checkpoints that are made while a simulated cluster trains, and what each of them must have.

The scheduler's own machine proposes and cuts; servers' own machines hold and answer. What is here
is the thin edge of both (`ps_server.checkpoint.checkpoint_parts`,
`ps_worker.checkpoint.save_points`), over a network that loses, with draws of its own: a seed
without a checkpoint is what it was without this file.

Oracles:
    CUT    A range is captured with the steps of all workers up to the cut's clock, and no other
           (BSP, SSP); what is asynchronous has nothing twice.
    CP-1   No worker that has answered had named a clock beyond the cut.
    HOLD   A range that is held until its copies have room changes in nothing, and goes on then;
           but by an update that had formed before the cut, and waited for its scale alone.
           Where it is torn an update of BSP from before may form, of seals in effect by then.
    CP-2   A checkpoint that is complete has every range of its tables, at one clock.
    LIVE   A server is held by no checkpoint but the one that its view has. Workers that wait for
           one that was cut where they were thought to come next go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ps_core import limits
from ps_core.change import TableCut
from ps_core.cluster_view import ClusterView, Session
from ps_core.errors import (
    AlreadyPast,
    Fenced,
    InvalidConfig,
    NotOwner,
    StaleAssignment,
    UpdateFailed,
    WaitExpired,
)
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.manifest import PartReport, ReportedTable
from ps_core.sliced_work import Work
from ps_core.tables.table import Table
from ps_server.ranges.events import AnswerPull, Place, PullEvent, RefusePull
from ps_server.ranges.schedule import checkpoint_cut
from scheduler.machine.checkpoint_state import (
    CheckpointBegunAgain,
    CheckpointCut,
    CheckpointFailed,
    CheckpointMade,
    CheckpointUnneeded,
    CheckpointWritten,
)
from scheduler.machine.state import Transition

if TYPE_CHECKING:
    from tests.sim.actors import SimWorker, Waits
    from tests.sim.grads import Grad
    from tests.sim.scheduled import ScheduledSimulation
    from tests.sim.server import SimServer

SHARE = 0.5
"""Of the seeds that make checkpoints."""
RESEND_S = 1.0
DELAY_S = 0.5
NEVER_REFUSED = 0.95
WITHOUT_ROOM = 0.3
"""Of the ranges that are captured: their copies have to wait."""
WAITS = (0.0, 0.1, 0.9)
"""Of the scripts that wait for a checkpoint which is made, between two steps."""
WAITS_S = 8.0
GUESSES = 0.5
"""Of the workers in a step that are answered for with the next."""
COPIED_S = (0.01, 0.3, 3.0)

Key = tuple[TableId, RangeId]


@dataclass(eq=False)
class Captured:
    """What a server has of a checkpoint; since when it holds for it: from the proposal on, so that
    little is left for a capture where workers wait between that and the cut's clock.
    """

    number: int
    began_s: float
    is_broken: bool
    waiters: dict[int, Key] = field(default_factory=dict)
    tables: dict[TableId, ReportedTable] = field(default_factory=dict)
    is_asked: bool = False
    held: dict[Key, dict[int, list[Grad]] | None] = field(default_factory=dict)
    decided: dict[Key, int] = field(default_factory=dict)
    """The clock of an update that waited for its scale when its range was held: it is applied."""


class Checkpointer:
    """The checkpoints of one simulation, on the side of nodes."""

    share = SHARE

    def __init__(
        self, simulation: ScheduledSimulation, seed: int, *, may_begin: bool = True
    ) -> None:
        self.draw = random.Random(f"checkpoints of {seed}")
        self.simulation, self.world = simulation, simulation.world
        self.sessions: dict[object, Session] = {}  # of servers and workers
        self._parts: dict[NodeId, Captured] = {}
        self._named: dict[tuple[int, int], dict[TableId, int]] = {}  # by checkpoint and worker
        self._asked: dict[int, set[NodeId]] = {}
        self._waits = self.draw.choice(WAITS)
        self._waiting: set[int] = set()  # workers, by origin
        self._steps_follow: dict[int, bool] = {}
        self._ranges: dict[int, dict[Key, int]] = {}  # by checkpoint: at which clock
        self._every_s = self.draw.choice((0.7, 3.0, 10.0))
        if self.draw.random() < self.share and may_begin:
            self.world.after(self.draw.random() * self._every_s, self._begin)

    @property
    def _number(self) -> int:
        """Of the one that is made, as the scheduler has it."""
        checkpoint = self.simulation.scheduler.view.checkpoint
        return 0 if checkpoint is None else checkpoint.number

    def _begin(self) -> None:
        self.world.after(self.draw.expovariate(1 / self._every_s), self._begin)
        if not self.simulation.is_there:
            return
        decision = self.simulation.scheduler.begin_checkpoint("sim", self.world.now_s)
        self.world.counts["checkpoints that wait for a change"] += not decision.reply.number
        self.simulation._publish(decision.transitions)

    def _send(self, deliver: Callable[[], None], node_id: NodeId | None = None) -> None:
        """Over the network, whose faults are the simulation's."""
        faults, draw = self.world.faults, self.draw
        if draw.random() < faults.lose or (
            node_id is not None and self.world.cut[node_id, "scheduler"]
        ):
            return
        for _ in range(1 + (draw.random() < faults.duplicate)):
            delay_s = faults.delay_s + draw.random() * faults.jitter_s
            self.world.after(delay_s, lambda: self.simulation._reach(deliver))

    # --- the scheduler's side

    def happened(self, transition: Transition) -> None:
        """Something changed."""
        counts = self.world.counts
        match transition:
            case CheckpointCut(number):
                counts["checkpoints cut"] += 1
                self._check_named(number)
            case CheckpointWritten(attempt):
                self.world.after(
                    self.draw.random() * DELAY_S,
                    lambda: self.simulation._reach(lambda: self._complete(attempt.number)),
                )
            case CheckpointMade(number):
                counts["checkpoints"] += 1
                self._check_made(number)
            case CheckpointUnneeded():
                counts["checkpoints that were not needed"] += 1
            case CheckpointBegunAgain():
                counts["checkpoints begun again"] += 1
            case CheckpointFailed():
                counts["checkpoints that failed"] += 1

    def published(self) -> None:
        """A view goes out: workers are asked."""
        checkpoint = self.simulation.scheduler.view.checkpoint
        if checkpoint is None or checkpoint.is_cut:
            return
        attempt = self.simulation.scheduler._state.checkpoint
        if attempt is None or attempt.number != checkpoint.number:
            return  # what is told is no more
        self._asked.setdefault(checkpoint.number, set(attempt.awaited))
        for worker in self.simulation.workers:
            is_known = (checkpoint.number, worker.origin) in self._named
            if not is_known and worker in self.sessions and self._sees_one(worker):
                self._named[checkpoint.number, worker.origin] = {}
                self._answer(checkpoint.number, worker, self.draw.random() * DELAY_S)

    def _sees_one(self, worker: SimWorker) -> bool:
        """Whether a checkpoint is made, as the worker is told."""
        view = self.simulation.scheduler.view
        return view.of_run(worker.layout.run).checkpoint is not None

    def _complete(self, number: int) -> None:
        problem = "" if self.draw.random() < NEVER_REFUSED else "no space"
        decision = self.simulation.scheduler.end_checkpoint(number, problem)
        self.simulation._publish(decision.transitions)

    def _check_named(self, number: int) -> None:
        view, attempt = self.simulation.scheduler.view, self.simulation.scheduler._state.checkpoint
        if attempt is None or attempt.number != number:
            return  # what is told is no more
        members = {node.node_id for node in view.nodes if node.state.is_member}
        silent = (self._asked[number] & members) - attempt.workers.keys()
        assert not silent, f"CP-1: workers {silent} have not answered"
        for place in attempt.workers.values():
            for table in view.of_run("").tables:
                cut, clock = table.cut, place.clocks.get(table.table_id, 0)
                assert cut is not None and cut.after_clock >= clock, (  # noqa: PT018
                    f"CP-1: worker {place.rank} named {clock} of table {table.table_id}: {cut}"
                )

    def _check_made(self, number: int) -> None:
        found = self._ranges.get(number, {})
        tables = [table for table in self.simulation.layout.tables if not table.run]
        others = {table_id for table_id, _ in found} - {table.table_id for table in tables}
        assert not others, f"S19: checkpoint {number} has tables {others} of other runs"
        for table in tables:
            keys = [(table.table_id, r) for r in table.blocks_by_range(self._range_count)]
            clocks = {found.get(key) for key in keys}
            assert len(clocks) == 1 and None not in clocks, (  # noqa: PT018
                f"CP-2: checkpoint {number} has table {table.table_id} at {clocks}"
            )

    # --- a worker's side

    def _answer(self, number: int, worker: SimWorker, delay_s: float) -> None:
        """It says where it is until it is heard; where it was when it was asked."""

        def arrive() -> None:
            named = self._named[number, worker.origin]
            try:
                decision = self.simulation.scheduler.join_checkpoint(
                    self.sessions[worker], number, named, has_state=False, has_begun=True
                )
            except Fenced:
                return
            self.simulation._publish(decision.transitions)

        def say() -> None:
            checkpoint = self.simulation.scheduler.view.checkpoint
            if checkpoint is None or checkpoint.number != number or checkpoint.is_cut:
                return
            if not worker.is_down:
                named = self._named[number, worker.origin]
                if not named:
                    is_in_step = worker.origin not in self._waiting and self._steps_follow.get(
                        worker.origin
                    )
                    guessed = int(bool(is_in_step) and self.draw.random() < GUESSES)
                    clocks = self._sealed(worker.incarnation)
                    named.update({table_id: clock + guessed for table_id, clock in clocks.items()})
                elif worker.origin in self._waiting:  # what was guessed is taken back
                    named.update(self._sealed(worker.incarnation))
                self._send(arrive)
            self.world.after(RESEND_S, say)

        self.world.after(delay_s, say)

    def _sealed(self, incarnation: int) -> dict[TableId, int]:
        sealed = self.simulation.truth.sealed.items()
        return {table_id: clock for (table_id, whose), clock in sealed if whose == incarnation}

    def between(self, worker: SimWorker, more: bool) -> Waits:
        """Its script may wait for the checkpoint that is made, as `SavePoints.stay` does, and take
        no step meanwhile; unless it is told that another has taken one first.
        """
        self._steps_follow[worker.origin] = more
        number, draw = self._number if self._sees_one(worker) else 0, self.draw
        if not number or draw.random() > self._waits or worker not in self.sessions:
            return
        self.world.counts["scripts that wait for a checkpoint"] += 1
        self._waiting.add(worker.origin)
        told: list[bool] = []
        scheduler = self.simulation.scheduler

        def arrive() -> None:
            reached = {
                session.node_id: self._sealed(other.incarnation)
                for other, session in self.sessions.items()
                if hasattr(other, "incarnation") and other is not worker
            }
            clocks, now_s = self._sealed(worker.incarnation), self.world.now_s
            made = self.simulation.scheduler
            if made is not scheduler:
                return
            try:
                place = self.sessions[worker], made.checkpoints.newest_of(number), clocks
                joined = made.join_checkpoint(*place, has_state=False, has_begun=True)
                self.simulation._publish(joined.transitions)
                decision = made.stay_for_checkpoint(*place, reached, now_s)
            except Fenced:
                return
            self.simulation._publish(decision.transitions)
            if decision.reply:
                told.append(True)
                self.world.counts["scripts told to step first"] += 1

        def say() -> None:
            if worker.origin in self._waiting and not worker.is_down:
                self._send(arrive)
                self.world.after(draw.random() * RESEND_S, say)

        def is_over() -> bool:
            made = self.simulation.scheduler
            again = made.checkpoints.newest_of(number) if made is scheduler else 0
            return bool(told) or self._number != again or self.world.now_s >= until_s

        until_s = self.world.now_s + WAITS_S  # whoever is away then: its wait has expired
        say()
        yield is_over
        self.world.counts["scripts whose wait expired"] += self.world.now_s >= until_s
        self._waiting.discard(worker.origin)

    # --- a server's side

    def viewed(self, server: SimServer, view: ClusterView) -> None:
        """The server has observed the view."""
        checkpoint, part = view.checkpoint, self._parts.get(server.node_id)
        number = 0 if checkpoint is None else checkpoint.number
        if part is not None and part.number != number:
            del self._parts[server.node_id]  # first: works that are finished for it look here, too
            self._end_part(server, part)
        self._check_held(server, number if checkpoint is not None and checkpoint.is_cut else 0)
        if checkpoint is None:
            return
        if server.node_id not in self._parts:
            self._begin_part(server, number)
        part = self._parts[server.node_id]
        if part.is_broken or part.is_asked or not checkpoint.is_cut:
            return
        server.works.begin(self._cutting(server, part, view))

    def _cutting(self, server: SimServer, part: Captured, view: ClusterView) -> Work[None]:
        """As `CheckpointParts`: each range as of its own cut, one after the other."""
        cuts: dict[TableId, TableCut | None] = {t.table_id: t.cut for t in view.tables}
        if part.is_asked:
            return
        for key in list(server.machine.shards):
            yield
            if self._parts.get(server.node_id) is not part:
                return
            cut = cuts[key[0]]
            if cut is not None and cut.checkpoint == part.number:
                yield from self._reading(server, part, key, cut)
        part.is_asked = True
        self._report_if_done(server, part)

    def _end_part(self, server: SimServer, part: Captured) -> None:
        """Nothing is read or held for it any more."""
        for waiter in list(part.waiters):
            server.machine.answered(waiter)
            server.reads.pop(waiter, None)
        for key in list(part.held):
            self._let_go(server, part, key)

    def _hold(self, server: SimServer, part: Captured, key: Key, cut: TableCut) -> None:
        """As `ParameterNode.hold_copies`."""
        is_torn = server.machine.shards[key].state.schedule.is_torn_at(cut)
        part.held[key] = None
        unscaled = server.machine.shards[key].state.unscaled
        if unscaled is not None:
            part.decided[key] = unscaled.clock
        until_s = server.now_s + limits.CHECKPOINT_WRITTEN_S
        clock = 0 if is_torn else cut.after_clock
        server.machine.hold_copies(key, part.number, clock, until_s)
        self.world.counts["ranges held for copies"] += 1

    def _copied(self, server: SimServer, part: Captured, key: Key) -> None:
        """There is room for its copies."""
        if self._parts.get(server.node_id) is part and not getattr(server, "is_dead", False):
            if getattr(server, "is_paused", False):
                self.world.after(RESEND_S, lambda: self._copied(server, part, key))
            else:
                self._let_go(server, part, key)

    def _let_go(self, server: SimServer, part: Captured, key: Key) -> None:
        server.works.finish()
        if key not in part.held:
            return
        captured = part.held.pop(key)
        is_torn = part.tables[key[0]].is_torn
        if captured is not None and not is_torn and key in server.machine.shards:
            decided = part.decided.get(key)
            for block, before in captured.items():
                now = server.values[key[0], block]
                added = [grad for grad in now[len(before) :] if grad.clock != decided]
                assert now[: len(before)] == before, f"HOLD: {key} is another"
                assert not added, f"HOLD: {key} changed while its copies had no room"
        server.in_turn(
            lambda: server.carry_out(server.machine.copied(key, part.number, server.now_s))
        )

    def _begin_part(self, server: SimServer, number: int) -> None:
        """It makes its file; where it cannot, it says so, and reads nothing."""
        part = Captured(number, server.now_s, self.draw.random() > NEVER_REFUSED)
        self._parts[server.node_id] = part
        if part.is_broken:
            self._report(server, part, PartReport(problem="no space"))

    def _check_held(self, server: SimServer, number: int) -> None:
        for key, machine in server.machine.shards.items():
            for reader, cut in machine.state.schedule._cuts:
                assert reader != checkpoint_cut(0)[0] or cut == number, (
                    f"LIVE: {key} is held for checkpoint {cut}, and {number} is made"
                )

    def _reading(self, server: SimServer, part: Captured, key: Key, cut: TableCut) -> Work[None]:
        """As `ParameterNode.reading_at_cut`."""
        is_torn = server.machine.shards[key].state.schedule.is_torn_at(cut)
        if self.draw.random() < WITHOUT_ROOM:
            self._hold(server, part, key, cut)
        place = Place(*key, server.machine.assignment_epoch(key[1]))
        written = part.tables.setdefault(key[0], ReportedTable(0, cut.after_clock))
        part.tables[key[0]] = (
            written if not is_torn else ReportedTable(*_counts(written), is_torn=True)
        )

        def event(waiter: int) -> PullEvent:
            part.waiters[waiter] = key
            until_s = server.now_s + limits.CHECKPOINT_CUT_S
            cut_id = None if is_torn else checkpoint_cut(part.number)
            return PullEvent(place, waiter, None, cut.after_clock, not is_torn, until_s, cut_id)

        yield from server.capturing(event, lambda effect: self._answered(server, part, cut, effect))

    def _answered(
        self, server: SimServer, part: Captured, cut: TableCut, effect: AnswerPull | RefusePull
    ) -> None:
        key = part.waiters.pop(effect.waiter, None)
        if key is None:
            return
        if isinstance(effect, RefusePull):
            self._check_refused(server, part, effect)
            self.world.after(0.0, lambda: self._end_part(server, part))
            return
        (table,) = [t for t in self.simulation.layout.tables if t.table_id == key[0]]
        blocks = table.blocks_by_range(self._range_count)[key[1]]
        is_torn = part.tables[key[0]].is_torn
        for block in blocks:
            self._check_captured(server, table, block, None if is_torn else cut.after_clock)
        if key in part.held:
            if server.machine.shards[key].state.unscaled is None:
                part.held[key] = {block: list(server.values[key[0], block]) for block in blocks}
            later_s = self.draw.choice(COPIED_S) * self.draw.random()
            self.world.after(later_s, lambda: self._copied(server, part, key))
        count, clock = _counts(part.tables[key[0]])
        part.tables[key[0]] = ReportedTable(count + len(blocks), clock, is_torn)
        self._ranges.setdefault(part.number, {})[key] = cut.after_clock
        self._report_if_done(server, part)

    def _check_refused(self, server: SimServer, part: Captured, effect: RefusePull) -> None:
        error, waited_s = effect.error, server.now_s - part.began_s
        self.world.counts["captures refused"] += 1
        has_no_values = isinstance(error, InvalidConfig) and "no initial values" in error.message
        is_moved = isinstance(error, NotOwner | StaleAssignment)
        settings = self.simulation.layout.settings
        is_past = part.number in settings.cuts_given_up and isinstance(error, AlreadyPast)
        has_failed = isinstance(error, UpdateFailed) and effect.table_id in settings.unreadable
        is_expected = is_moved or has_no_values or is_past or has_failed
        assert isinstance(error, WaitExpired) or is_expected, f"CUT: {error}"
        is_over = server.came_late or self._number != part.number
        if isinstance(error, WaitExpired) and not is_over:
            assert waited_s >= limits.CHECKPOINT_CUT_S - 1.0, f"CUT: after {waited_s}: {error}"
        self._report(server, part, PartReport(problem=error.message))

    def _check_captured(
        self, server: SimServer, table: Table, block: int, clock: int | None
    ) -> None:
        simulation, found = self.simulation, server.values[table.table_id, block]
        assert len(found) == len(set(found)), f"CUT: twice in block {block}: {found}"
        truth, settings = simulation.truth, simulation.layout.settings
        if clock is None or settings.loses(table, clock):
            return
        differing = set(truth.living(found)) ^ truth.upto(table.table_id, block, clock)
        assert not differing, f"CUT: clock {clock} of {table.table_id}/{block}: {differing}"
        mode = settings.at(table, clock).mode.value
        self.world.counts[f"blocks captured under {mode}"] += 1

    def _report_if_done(self, server: SimServer, part: Captured) -> None:
        if part.is_asked and not part.waiters:
            self._report(server, part, PartReport("file", 1, "ab", part.tables))

    def _report(self, server: SimServer, part: Captured, said: PartReport) -> None:
        """Again and again, while anybody wants it."""

        def arrive() -> None:
            try:
                session = self.sessions[server]
                decision = self.simulation.scheduler.report_part(session, part.number, said)
            except (Fenced, InvalidConfig):
                return
            self.simulation._publish(decision.transitions)

        if self._parts.get(server.node_id) is part and self._number == part.number:
            if server in self.sessions and not getattr(server, "is_dead", False):
                self._send(arrive, server.node_id)
            self.world.after(RESEND_S, lambda: self._report(server, part, said))

    @property
    def _range_count(self) -> int:
        return self.simulation.layout.range_count


def _counts(written: ReportedTable) -> tuple[int, int]:
    return written.block_count, written.clock
