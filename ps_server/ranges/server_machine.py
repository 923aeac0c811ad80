"""The server machine: the ranges that this server serves, and who may send to them.

It routes every event to its range machine after the checks that do not consume a sequence number
(table, ownership, epoch), and shares each table's staging memory among the table's ranges.

Invariants:
    SM-1  A shard exists exactly for the (range, table) pairs that the view gives this server
          and that hold blocks.
    SM-2  An event of another assignment_epoch than the range's never reaches its machine.
    SM-3  No event of a worker whose membership has ended reaches a machine.
    SM-4  Nothing of a failed table is summed, applied or answered, in any range here.
    SM-5  Nothing happens to a suspended shard.
    SM-6  A shard hears only of workers of its table's run.
    SM-7  A removed table leaves nothing: no shard, no staging memory, no waiting pull.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ps_core import limits
from ps_core.change import ChangeOutcome, ChangeResult
from ps_core.cluster_view import ClusterView, Node
from ps_core.errors import (
    Fenced,
    InvalidKeys,
    NotOwner,
    Overloaded,
    PushpullError,
    Recovering,
    StaleAssignment,
    TableNotFound,
    UpdateFailed,
)
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_core.runs import words
from ps_core.sliced_work import Work, at_once
from ps_core.tables.table import Table
from ps_server.ranges.events import (
    AnswerPull,
    Apply,
    AssignValues,
    Effect,
    EntryEvent,
    Place,
    PullEvent,
    PushEvent,
    Record,
    RefusePull,
    ReplyTo,
    SealEvent,
    place_of,
)
from ps_server.ranges.range_copy import ShardCopy, restore
from ps_server.ranges.range_machine import RangeMachine
from ps_server.ranges.range_state import RangeState
from ps_server.ranges.read_gate import WaitCause
from ps_server.ranges.schedule import CutId, copies_cut
from ps_server.ranges.staging_memory import TableStaging


@dataclass(frozen=True, slots=True)
class ShardAdded:
    """Blocks of a table that this server serves from now on."""

    table: Table
    range_id: RangeId
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PreparedChange:
    """A prepared change: nothing of the table takes effect here beyond `clock` until it is decided.
    `outcome`: of the deciding range.
    """

    table_id: TableId
    number: int
    clock: int
    outcome: ChangeOutcome | None = None


class Doubt(NamedTuple):
    """An undecided change that holds steps here, and the server that can say its outcome."""

    table_id: TableId
    number: int
    decided_by: NodeId


class ServerMachine:
    """All shards of one server."""

    def __init__(self, node_id: NodeId, worker_count: int) -> None:
        self._node_id = node_id
        self._worker_count = worker_count  # of the run without a name
        self._worker_counts: dict[str, int] = {}  # of the others
        self._epochs: dict[RangeId, AssignmentEpoch] = {}
        self._primaries: dict[RangeId, NodeId | None] = {}
        self._tables: dict[TableId, Table] = {}
        self._is_open = False  # true if the view has a proposed change
        self._staging: dict[TableId, TableStaging] = {}
        self.shards: dict[tuple[TableId, RangeId], RangeMachine] = {}
        # Of ranges that another server is primary of, and that may come back.
        self.suspended: dict[tuple[TableId, RangeId], RangeMachine] = {}
        self._adopted: dict[tuple[TableId, RangeId], tuple[ShardCopy, float]] = {}
        self._waiting: dict[int, RangeMachine] = {}
        self._timed: dict[RangeMachine, None] = {}  # in order, so that a run can be repeated
        self._ended: dict[Incarnation, Node] = {}
        self._ready: dict[tuple[TableId, RangeId], dict[int, int]] = {}
        self._new_shards: list[RangeMachine] = []  # not yet told which workers have ended
        self._past_resent_count = 0  # of shards that are gone
        self.view_number = 0
        self.total_range_count = 0

    # --- the scheduler's views

    def prepare(self, shard: ShardAdded) -> None:
        """Prepare a shard that the next view may add."""
        self._ready[shard.table.table_id, shard.range_id] = dict.fromkeys(shard.blocks, 0)

    def observe(self, view: ClusterView) -> list[ShardAdded]:
        """`observing`, at once."""
        return at_once(self.observing(view))

    def observing(self, view: ClusterView) -> Work[list[ShardAdded]]:
        """Take a new view; returns the shards that this server serves from now on."""
        if view.view_number < self.view_number:
            return []
        self.view_number = view.view_number
        self.total_range_count = len(view.ranges)
        self._primaries = {r.range_id: r.primary for r in view.ranges}
        self._epochs = {
            r.range_id: r.assignment_epoch for r in view.ranges if r.primary == self._node_id
        }
        self._tables = view.tables_by_id
        self._worker_counts = {run.name: run.worker_count for run in view.runs}
        self._is_open = any(table.proposed is not None for table in view.tables)
        added: list[ShardAdded] = []
        for table in view.tables:
            yield
            for range_id, blocks in table.blocks_by_range(len(view.ranges)).items():
                if range_id in self._epochs and (table.table_id, range_id) not in self.shards:
                    added.append(self._add_shard(table, range_id, blocks))
        self._ready.clear()
        return added

    def removed_by(self, view: ClusterView) -> frozenset[TableId]:
        """The tables that a newer view has removed."""
        return frozenset(self._tables.keys() - view.tables_by_id.keys())

    def removing(self, table_ids: Collection[TableId]) -> Work[list[Effect]]:
        """Remove tables that the next view lacks (SM-7), and refuse pulls that wait for them."""
        gone = {**self.shards, **self.suspended}
        gone = {place: shard for place, shard in gone.items() if place[0] in table_ids}
        shards = set(gone.values())
        effects = self._refuse_pulls_of(
            shards, lambda state: TableNotFound(f"table '{state.name}' was removed")
        )
        for place, shard in gone.items():
            self._past_resent_count += shard.resent_count
            self._timed.pop(shard, None)
            self.shards.pop(place, None)
            self.suspended.pop(place, None)
            yield
        self._new_shards = [shard for shard in self._new_shards if shard not in shards]
        self._adopted = {p: copy for p, copy in self._adopted.items() if p[0] not in table_ids}
        for table_id in table_ids:
            self._staging.pop(table_id, None)
        return effects

    def adopt(self, range_id: RangeId, copies: Mapping[TableId, ShardCopy], now_s: float) -> None:
        """Adopt a range that this server backed up, before the view that makes it primary."""
        for table_id, copy in copies.items():
            self._adopted[table_id, range_id] = copy, now_s

    def giving_up(self, range_ids: Collection[RangeId]) -> Work[list[Effect]]:
        """Give up ranges with another primary, which gets later entries; refuse their pulls."""
        effects = yield from self.suspending(range_ids)
        for place in [place for place in self.suspended if place[1] in range_ids]:
            shard = self.suspended.pop(place)
            self._past_resent_count += shard.resent_count
            self._staging[place[0]].remove(shard)
            yield
        return effects

    def suspending(self, range_ids: Collection[RangeId]) -> Work[list[Effect]]:
        """Suspend ranges that another server is primary of, and that may come back: their shards
        stay as they are. Their pulls are refused.
        """
        shards: set[RangeMachine] = set()
        for place in [place for place in self.shards if place[1] in range_ids]:
            shard = self.suspended[place] = self.shards.pop(place)
            shards.add(shard)
            self._timed.pop(shard, None)
            yield
        server = f"server {self._node_id}"
        return self._refuse_pulls_of(
            shards, lambda state: NotOwner(f"{server} is not primary of range {state.range_id} now")
        )

    def _refuse_pulls_of(
        self, shards: Collection[RangeMachine], error_of: Callable[[RangeState], PushpullError]
    ) -> list[Effect]:
        effects: list[Effect] = []
        for waiter, shard in [item for item in self._waiting.items() if item[1] in shards]:
            del self._waiting[waiter]
            shard.cancel(waiter)
            state = shard.state
            place = state.table.table_id, state.range_id
            effects.append(RefusePull(waiter, *place, error_of(state)))
        return effects

    def resume(self, range_id: RangeId) -> None:
        """Resume a suspended range before the view that makes this server its primary again: its
        shards are told which workers ended meanwhile.
        """
        for place in [place for place in self.suspended if place[1] == range_id]:
            shard = self.shards[place] = self.suspended.pop(place)
            self._new_shards.append(shard)
            self._timed[shard] = None

    def _add_shard(self, table: Table, range_id: RangeId, blocks: tuple[int, ...]) -> ShardAdded:
        staging = self._staging.setdefault(table.table_id, TableStaging(table))
        versions = self._ready.pop((table.table_id, range_id), None)
        worker_count = self._worker_counts.get(table.run, self._worker_count)
        state = RangeState(table, range_id, blocks, worker_count, staging, versions)
        shard = RangeMachine(state)
        adopted = self._adopted.pop((table.table_id, range_id), None)
        if adopted is not None:
            restore(adopted[0], shard.state, adopted[1])
        staging.add(shard)
        self.shards[table.table_id, range_id] = shard
        self._new_shards.append(shard)
        return ShardAdded(table, range_id, blocks)

    def ending(self, workers: Sequence[Node], now_s: float) -> Work[list[Effect]]:
        """End the membership of workers that left or were declared gone, by the newest view. Called
        after each view: a shard added since learns of all of them, the others of the new ones.
        """
        effects: list[Effect] = []
        added, self._new_shards = self._new_shards, []
        for shard in added:
            for node in self._ended.values():
                if node.run == shard.state.table.run:  # SM-6
                    effects += shard.ended(node, now_s)
                yield
        for node in workers:
            if node.incarnation in self._ended:
                continue
            self._ended[node.incarnation] = node
            for shard in self.shards.values():
                if node.run == shard.state.table.run:  # SM-6
                    effects += shard.ended(node, now_s)
                yield
            for table_id, staging in self._staging.items():
                if node.run == self._tables[table_id].run:  # SM-6
                    staging.forget(node)
                    staging.credits(effects)
                yield
        yield from self._noting_times()
        return effects

    def observing_changes(self, now_s: float) -> Work[list[Effect]]:
        """Observe the newest view's changes of tables; called again when shards were added."""
        effects: list[Effect] = []
        for (table_id, range_id), shard in self.shards.items():
            table = self._tables[table_id]
            decides = range_id == table.deciding_range(self.total_range_count)
            effects += shard.observe(table, now_s, decides=decides)
            yield
            for join in table.joins:
                if join.incarnation in self._ended:  # the joined worker may have gone already
                    effects += shard.ended(self._ended[join.incarnation], now_s)
        for staging in self._staging.values():
            staging.credits(effects)
            yield
        yield from self._noting_times()
        return effects

    @property
    def prepared_changes(self) -> tuple[PreparedChange, ...]:
        """Changes that this server has prepared and the scheduler has not decided."""
        if not self._is_open:
            return ()
        held: dict[TableId, int] = {}
        for (table_id, _), shard in self.shards.items():
            clock = shard.state.schedule.hold_point
            if clock is not None:
                held[table_id] = max(clock, held.get(table_id, 0))
        outcomes = self._outcomes()
        undecided = (
            PreparedChange(table_id, proposed.number, clock)
            for table_id, clock in held.items()
            if (proposed := self._tables[table_id].proposed) is not None
            and table_id not in outcomes
        )
        return (*undecided, *outcomes.values())

    def has_blocks_in(self, table_id: TableId, range_ids: Sequence[RangeId]) -> bool:
        """True if a table has blocks in one of these ranges, here or not."""
        by_range = self._tables[table_id].blocks_by_range(self.total_range_count)
        return any(range_id in by_range for range_id in range_ids)

    # --- changes that are decided without the scheduler, or before it knows

    def _deciding(self, table_id: TableId) -> RangeMachine | None:
        """The shard that decides the table's changes, if it is here."""
        range_id = self._tables[table_id].deciding_range(self.total_range_count)
        return self.shards.get((table_id, range_id))

    def _outcomes(self) -> dict[TableId, PreparedChange]:
        """Outcomes that shards here have decided of the newest view's proposed changes."""
        found: dict[TableId, PreparedChange] = {}
        for table_id, table in self._tables.items():
            if table.proposed is None:
                continue
            shard, number = self._deciding(table_id), table.proposed.number
            if table.proposed.checkpoint:  # any range may give up a cut
                here = (p for (owner, _), p in self.shards.items() if owner == table_id)
                shard = next((p for p in here if p.state.schedule.settled(number)), None)
            settled = None if shard is None else shard.state.schedule.settled(number)
            if settled is not None:
                clock = max(settled.after_clock, table.proposed.after_clock)
                found[table_id] = PreparedChange(table_id, number, clock, settled.outcome)
        return found

    def go_on_alone(self, now_s: float) -> list[Effect]:
        """Give up the proposed changes that are undecided here: the scheduler is silent."""
        effects: list[Effect] = []
        for (table_id, range_id), shard in self.shards.items():
            schedule, table = shard.state.schedule, self._tables[table_id]
            is_freed = schedule.give_up_cut()
            if schedule.held_for and range_id == table.deciding_range(self.total_range_count):
                is_freed = schedule.give_up(schedule.held_for) or is_freed
            if is_freed:
                effects += shard.resume(now_s)
        return self._credited(effects)

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """Undecided changes that hold steps here, and may be decided elsewhere."""
        found: dict[TableId, Doubt] = {}
        for (table_id, _), shard in self.shards.items():
            number = shard.state.schedule.held_for
            decided_by = self._primaries.get(
                self._tables[table_id].deciding_range(self.total_range_count)
            )
            if number and decided_by is not None:
                found[table_id] = Doubt(table_id, number, decided_by)
        return tuple(found.values())

    def asked(self, table_id: TableId, number: int, now_s: float) -> list[Effect]:
        """Give up a change, unless it was taken: neither this server nor the asking one hears the
        scheduler.

        Raises:
            TableNotFound, NotOwner: the range that decides is not here.
        """
        shard = self.decider(table_id)
        is_freed = shard.state.schedule.give_up(number)
        return self._credited(shard.resume(now_s) if is_freed else [])

    def decider(self, table_id: TableId) -> RangeMachine:
        """The shard that decides the table's changes.

        Raises:
            TableNotFound, NotOwner: it is not here.
        """
        self.table(table_id)
        shard = self._deciding(table_id)
        if shard is None:
            raise NotOwner(
                f"server {self._node_id} is not primary of table {table_id}'s first range"
            )
        return shard

    def outcome(self, table_id: TableId, number: int) -> ChangeResult | None:
        """The outcome of a change, in the deciding range; None: it is open.

        Raises:
            TableNotFound, NotOwner: as `asked`.
        """
        return self.decider(table_id).state.schedule.settled(number)

    def settled(self, doubt: Doubt, settled: ChangeResult, now_s: float) -> list[Effect]:
        """Take the outcome of a change from the deciding range; none of a table that has gone."""
        effects: list[Effect] = []
        table = self._tables.get(doubt.table_id)
        change = None if table is None else table.proposed
        for (table_id, _), shard in self.shards.items():
            is_held = table_id == doubt.table_id and shard.state.schedule.held_for == doubt.number
            if is_held and change is not None and change.number == doubt.number:
                effects += shard.settled(change, settled, now_s)
        return self._credited(effects)

    def _credited(self, effects: list[Effect]) -> list[Effect]:
        for staging in self._staging.values():
            staging.credits(effects)
        self._note_times(self.shards.values())
        return effects

    def check_run(self, table_id: TableId, run: str) -> Table:
        """The table; checks that the sender's run is its own (SM-6).

        Raises:
            TableNotFound: it is, or there is no such table.
        """
        table = self.table(table_id)
        if table.run != run:
            raise TableNotFound(
                f"there is no table {table_id} in {words(run)}: it is of {words(table.run)}"
            )
        return table

    # --- workers' entries and pulls

    def table(self, table_id: TableId) -> Table:
        found = self._tables.get(table_id)
        if found is None:
            if not self.view_number:  # it may have the address of an earlier server
                raise Recovering("the server has no view of the cluster yet", retry_after_ms=100)
            raise TableNotFound(f"there is no table {table_id} (view {self.view_number})")
        return found

    def _shard(self, place: Place, incarnation: Incarnation | None, run: str) -> RangeMachine:
        """The machine that `place` names (SM-2), for a sender of a run (SM-6) that has not ended.

        Raises:
            Fenced: it has.
            TableNotFound, NotOwner, StaleAssignment, InvalidKeys: it means none here.
        """
        if incarnation in self._ended:
            raise Fenced(self._ended[incarnation].fence_words)
        table = self.check_run(place.table_id, run)
        assignment_epoch = self._epochs.get(place.range_id)
        if assignment_epoch is None:
            if place.range_id >= self.total_range_count:
                raise InvalidKeys(
                    f"there is no range {place.range_id}; expected one below "
                    f"{self.total_range_count}"
                )
            raise NotOwner(
                f"server {self._node_id} does not serve range {place.range_id} "
                f"(view {self.view_number})"
            )
        if assignment_epoch != place.assignment_epoch:
            raise StaleAssignment(
                f"range {place.range_id} is at assignment_epoch {assignment_epoch}; "
                f"got {place.assignment_epoch}"
            )
        shard = self.shards.get((place.table_id, place.range_id))
        if shard is None:
            raise InvalidKeys(f"range {place.range_id} holds no block of table '{table.spec.name}'")
        return shard

    def entry(self, event: EntryEvent, now_s: float) -> list[Effect]:
        try:
            shard = self._shard(event.place, event.sender.incarnation, event.sender.run)
        except PushpullError as error:
            return [self._refusal(event, error)]
        staging = self._staging[event.place.table_id]
        staging.heard(event.sender)
        match event:
            case PushEvent(problem=Recovering() as lost) | SealEvent(problem=Recovering() as lost):
                return [self._refusal(event, lost)]  # the payload is lost, not wrong
        effects = shard.entry(event, now_s)
        staging.credits(effects)
        if shard.wake_s is not None:
            self._timed[shard] = None
        return effects

    @staticmethod
    def _refusal(event: EntryEvent, error: PushpullError) -> ReplyTo:
        table_id, range_id, _ = event.place
        return ReplyTo(
            event.sender, ReplyKind.ERROR, table_id, range_id, event.sequence, error=error
        )

    def reduced(self, record: Record, squares: tuple[float, ...]) -> list[Effect]:
        return self.shards[record.table_id, record.range_id].reduced(record, squares)

    def failed(self, record: Record, error: UpdateFailed, rest: Sequence[Effect]) -> list[Effect]:
        """Fail the table of a record whose update could not be computed (SM-4). Meanwhile entries
        may have ended as APPLIED, pulls been released and later updates formed; none of that has
        left the server, so all of it is changed, in every range of the table.

        Args:
            record: what was to be applied; nothing of it has been.
            error: why.
            rest: effects that have not been carried out, replies from before the update included.

        Returns:
            What to carry out in the place of `rest`.
        """
        table_id = record.table_id
        later = [effect.record for effect in rest if isinstance(effect, Apply | AssignValues)]
        lost = [record, *(each for each in later if each.table_id == table_id)]
        for each in lost:
            self.shards[table_id, each.range_id].overturn(each, error)
        out = list(_instead(rest, lost, error))
        for shard in self._shards_of(table_id):
            out += shard.fail(error)
        self._staging[table_id].credits(out)
        return out

    def loaded(
        self, place: tuple[TableId, RangeId], versions: Mapping[int, int], now_s: float
    ) -> list[Effect]:
        effects = self.shards[place].loaded(versions, now_s)
        self._staging[place[0]].credits(effects)
        self._note_times([self.shards[place]])
        return effects

    def refuse_table(self, table_id: TableId, error: UpdateFailed) -> list[Effect]:
        """Fail a table before anything was done with it (SM-4).

        Raises:
            TableNotFound, NotOwner: nothing of it is here.
        """
        return [effect for shard in self._shards_of(table_id) for effect in shard.fail(error)]

    def pull(self, event: PullEvent, now_s: float) -> list[Effect]:
        try:
            shard = self._shard(event.place, event.incarnation, event.run)
            if len(self._waiting) >= limits.MAX_WAITER_COUNT:
                raise Overloaded(
                    f"{limits.MAX_WAITER_COUNT} pulls wait already", retry_after_ms=500
                )
        except PushpullError as error:
            place = event.place
            return [RefusePull(event.waiter, place.table_id, place.range_id, error)]
        effects = shard.pull(event, now_s)
        if shard.read_gate.waits_for(event.waiter):
            self._waiting[event.waiter] = shard
        for effect in effects:
            if type(effect) is not AnswerPull:  # steps went on
                self._staging[event.place.table_id].credits(effects)
                break
        return effects

    def begin_cut(self, table_id: TableId, cut_id: CutId, deadline_s: float) -> int:
        """Hold the table's ranges here at the returned clock until each has answered the reader.

        Raises:
            TableNotFound: there is no such table.
            NotOwner: nothing of it is here.
            Overloaded: too many cuts are held.
            UpdateFailed: the table has failed here.
        """
        shards = self._shards_of(table_id)
        self._timed |= dict.fromkeys(shards)
        return max(shard.begin_cut(cut_id, deadline_s) for shard in shards)

    def end_cut(self, table_id: TableId, cut_id: CutId, now_s: float) -> list[Effect]:
        """End a cut; raises as `begin_cut`."""
        effects: list[Effect] = []
        for shard in self._shards_of(table_id):
            effects += shard.end_cut(cut_id, now_s)
        self._staging[table_id].credits(effects)
        return effects

    def hold_copies(
        self, key: tuple[TableId, RangeId], number: int, clock: int, deadline_s: float
    ) -> None:
        """Hold a range at `clock` until it is `copied` for a checkpoint."""
        shard = self.shards[key]
        shard.state.schedule.hold(copies_cut(number), clock, deadline_s)
        self._timed[shard] = None

    def copied(self, key: tuple[TableId, RangeId], number: int, now_s: float) -> list[Effect]:
        """Release a range, if it is still here, that was held for a checkpoint's copies."""
        shard = self.shards.get(key)
        if shard is None:
            if key in self.suspended:  # its steps go on when the range does
                self.suspended[key].state.schedule.end_cut(copies_cut(number))
            return []
        effects = shard.end_cut(copies_cut(number), now_s)
        self._staging[key[0]].credits(effects)
        return effects

    def _shards_of(self, table_id: TableId) -> list[RangeMachine]:
        table = self.table(table_id)
        shards = [shard for (owner, _), shard in self.shards.items() if owner == table_id]
        if not shards:
            raise NotOwner(f"server {self._node_id} serves nothing of table '{table.spec.name}'")
        return shards

    def answered(self, waiter: int) -> None:
        """Forget a pull that was answered, refused or cancelled."""
        shard = self._waiting.pop(waiter, None)
        if shard is not None:
            shard.cancel(waiter)
            if shard.wake_s is not None:
                self._timed[shard] = None

    def wait_cause(self, waiter: int) -> WaitCause | None:
        """The reason for which a pull waits; None if it does not."""
        shard = self._waiting.get(waiter)
        return None if shard is None else shard.read_gate.cause(waiter)

    def tick(self, now_s: float) -> list[Effect]:
        """Refuse expired pulls, and form updates whose grace time is over."""
        shards = dict.fromkeys([*self._waiting.values(), *self._timed])
        effects = [effect for shard in shards for effect in shard.tick(now_s)]
        for table_id in dict.fromkeys(shard.state.table.table_id for shard in shards):
            self._staging[table_id].credits(effects)
        timed, self._timed = self._timed, {}
        self._note_times(timed)
        return effects

    def _noting_times(self) -> Work[None]:
        for shard in self.shards.values():
            self._note_times((shard,))
            yield

    def _note_times(self, shards: Iterable[RangeMachine]) -> None:
        """Note the shards that `tick` must look at."""
        self._timed |= dict.fromkeys(shard for shard in shards if shard.wake_s is not None)

    @property
    def wake_s(self) -> float | None:
        """The time at which `tick` may do something; None: time alone changes nothing."""
        if not self._timed:  # as nearly always
            return None
        times_s = (shard.wake_s for shard in self._timed)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    # --- views of the state

    def assignment_epoch(self, range_id: RangeId) -> AssignmentEpoch:
        """The epoch under which this server serves the range; 0 if it does not."""
        return self._epochs.get(range_id, AssignmentEpoch(0))

    @property
    def range_count(self) -> int:
        return len(self._epochs)

    @property
    def gate_bytes(self) -> int:
        """Bytes of staged payloads and sums, of all tables."""
        return sum(staging.held_bytes for staging in self._staging.values())

    @property
    def resent_count(self) -> int:
        """Entries that came again after their outcome, and were answered from ledgers."""
        return self._past_resent_count + sum(shard.resent_count for shard in self.shards.values())


def _instead(
    rest: Sequence[Effect], lost: Sequence[Record], error: UpdateFailed
) -> Iterator[Effect]:
    """The effects to carry out in place of `rest` when the `lost` updates of a table could not be
    computed: those of other tables, replies with an error for lost entries, and refused pulls.
    """
    table_id = lost[0].table_id
    entries = {
        (record.range_id, contributor.incarnation, sequence)
        for record in lost
        for contributor in record.contributors
        for sequence in contributor.sequences
    }
    ending = Ending(Outcome.INVALID, error)
    for effect in rest:
        if place_of(effect)[0] != table_id:
            yield effect
        elif isinstance(effect, ReplyTo):
            entry = effect.range_id, effect.sender.incarnation, effect.sequence
            is_lost = effect.ending is not None and entry in entries
            yield effect._replace(ending=ending) if is_lost else effect
        elif isinstance(effect, AnswerPull):
            yield RefusePull(effect.waiter, table_id, effect.range_id, error)
        elif isinstance(effect, RefusePull):
            yield effect
