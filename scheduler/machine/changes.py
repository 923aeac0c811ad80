"""Changes of tables under training: their consistency, and their workers (SEMANTICS S6).

A two-phase commit at a clock:

    proposed   the view asks every server with a shard of the table to prepare
    prepared   each server has named its hold point: it holds back every later clock
    decided    all are prepared: the change is after the highest hold point. The primary of the
               table's first range takes it, or has given it up because it lost the scheduler
    committed  the first range took it
    withdrawn  not all servers were prepared by the deadline, a range changed its primary before
               that, or the first range gave it up: nothing has changed

Rules:
    - A table has one proposal at a time; another request waits for its end.
    - Proposal numbers are never given twice, so an answer to an old proposal is ignored.
    - A table stays asynchronous while workers of its run have leased data shards (SEMANTICS S20): a
      request for another setting is refused, unless the same was proposed before.
    - A replacement worker, or a late joiner, joins every existing table by one change each; a
      withdrawn join is proposed again. Later tables have it from the start.

Invariants:
    CH-1  A change is decided only when every server with a shard of the table is prepared, and
          after the highest hold point.
    CH-2  Only the table's first range commits or withdraws a decided change: it may have taken
          effect there, and servers that lost the scheduler hear of it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ps_core.change import ChangeOutcome, Join, TableChange, TableCut
from ps_core.cluster_view import Node
from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidConfig, Overloaded, TableNotFound, listed
from ps_core.keys import Incarnation, NodeId, RangeId, TableId
from ps_core.tables.table import Table
from scheduler.machine import view_size
from scheduler.machine.state import (
    ChangeCommitted,
    ChangeDecided,
    ChangeProposed,
    ChangeWithdrawn,
    ClusterState,
    Proposal,
    Transition,
)

MAX_AFTER_CLOCK = 2**53 - 1
_NAMED_COUNT = 4  # holders of shards in a message


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """A request for a consistency of a table, from a clock after `after_clock` on, until
    `deadline_s`. `reason` is for the log; `run` is the table's.
    """

    table_name: str
    consistency: Consistency
    after_clock: int
    deadline_s: float
    reason: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class PendingProposal:
    """A request waits for `reason`. `number` is that of its proposal, for `outcome`; 0 if another
    proposal must end first.
    """

    reason: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A request that was withdrawn."""

    reason: str


Outcome = TableChange | PendingProposal | Withdrawn  # result of a request


class TableChanges:
    """The changes of a cluster's tables."""

    def __init__(
        self,
        state: ClusterState,
        describe: Callable[[Node, float], str],
        free_bytes: Callable[[], int],
    ) -> None:
        self._state = state
        self._describe = describe
        self._free_view_bytes = free_bytes

    def request(
        self, wanted: ChangeRequest, worker_count: int, now_s: float
    ) -> tuple[TableChange | PendingProposal, list[Transition]]:
        """Propose a change, or find it proposed or made."""
        table = self._table(wanted.run, wanted.table_name)
        if not 0 <= wanted.after_clock <= MAX_AFTER_CLOCK:
            raise InvalidConfig(
                f"after_clock is {wanted.after_clock}; expected 0 to {MAX_AFTER_CLOCK}"
            )
        check_workers(table.spec.name, wanted.consistency, worker_count)
        replace(table.spec, consistency=wanted.consistency).validated()
        # An adaptive table's present bound is not part of the request.
        wanted = replace(wanted, consistency=wanted.consistency.as_requested)
        is_so = table.consistency.as_requested == wanted.consistency
        is_same = False
        if table.proposed is not None:
            other = table.proposed.join or table.proposed.checkpoint
            is_same = table.proposed.consistency.as_requested == wanted.consistency and not other
        if not is_same:
            self._check_no_shards(table, wanted.consistency, now_s)
        if table.proposed is not None and not (is_so and is_same):
            if is_same:  # it is withdrawn when the last of those who wait has given up
                proposal = self._state.proposals[table.table_id]
                proposal.deadline_s = max(proposal.deadline_s, wanted.deadline_s)
            reason = self._reason(table, table.proposed, now_s)
            return PendingProposal(reason, table.proposed.number if is_same else 0), []
        if is_so:
            return table.change or TableChange(0, 0, wanted.consistency), []
        needed_bytes, free_bytes = self.needed_bytes(table), self._free_view_bytes()
        if needed_bytes > free_bytes:
            raise Overloaded(
                f"a change of table '{table.spec.name}' takes {needed_bytes} bytes of the "
                f"cluster's view, which may grow by {free_bytes}"
            )
        return self._propose(table, wanted, now_s)

    def _check_no_shards(self, table: Table, wanted: Consistency, now_s: float) -> None:
        """Refuse that a table stops being asynchronous while workers of its run have data shards:
        those that have none left would wait for the shards, and keep the others waiting.
        """
        if table.consistency.mode is not Mode.ASP or wanted.mode is Mode.ASP:
            return
        members = self._state.members
        for data_set in self._state.data_sets.values():
            if data_set.run != table.run or not data_set.leases:
                continue
            holders = sorted(set(data_set.leases.values()))
            named = [self._describe(members[each].node, now_s) for each in holders]
            raise InvalidConfig(
                f"table '{table.spec.name}' is {table.consistency}, and would be {wanted} while "
                f"shards of data set '{data_set.spec.name}' are leased to "
                f"{listed(named, _NAMED_COUNT)}: workers would wait for the steps of those that "
                "have no shard left. Nothing has changed; ask again when the pass is over, or "
                "these workers have left"
            )

    def move(self, wanted: ChangeRequest, now_s: float) -> list[Transition]:
        """Propose to move an adaptive bound, if it is not there yet, and the table has these
        limits, no other proposal, and space in the view.
        """
        table = self._table(wanted.run, wanted.table_name)
        has_bounds = table.consistency.as_requested == wanted.consistency.as_requested
        if table.proposed is not None or not has_bounds or table.consistency == wanted.consistency:
            return []
        if self.needed_bytes(table) > self._free_view_bytes():
            return []
        # The setting itself may be due only after a later clock.
        after_clock = 0 if table.change is None else table.change.after_clock
        return self._propose(table, replace(wanted, after_clock=after_clock), now_s)[1]

    def needed_bytes(self, table: Table) -> int:
        """Bytes that a proposal adds to the view; 0 after the table's first."""
        return 0 if table.table_id in self._state.change_counts else view_size.CHANGE_BYTES

    # --- workers that join

    def join_bytes(self, run: str, rank: int) -> int:
        """Bytes that the joins of a worker with this rank add to the view, beside its node."""
        needed_bytes = sum(self.needed_bytes(table) for table in self._state.tables_of(run))
        return needed_bytes + view_size.JOIN_BYTES * len(self._uncounted_tables(run, rank))

    def _uncounted_tables(self, run: str, rank: int) -> list[TableId]:
        """Tables of a run whose join of this rank is not in `view_bytes` yet."""
        counted, tables = self._state.counted_joins, self._state.tables_of(run)
        return [t.table_id for t in tables if (t.table_id, rank) not in counted]

    def join(self, run: str, join: Join) -> None:
        """Make a worker due to join every table of its run, in place of any other of its rank."""
        state, uncounted = self._state, self._uncounted_tables(run, join.rank)
        state.view_bytes += view_size.JOIN_BYTES * len(uncounted)
        state.counted_joins |= {(table_id, join.rank) for table_id in uncounted}
        for table in state.tables_of(run):
            due = state.joins_due.setdefault(table.table_id, [])
            due[:] = [*(other for other in due if other.rank != join.rank), join]

    def ended(self, node: Node) -> None:
        """Drop the due joins of a worker whose membership has ended."""
        for table_id in list(self._state.joins_due):
            self._due_no_more(table_id, node.incarnation)

    def _due_no_more(self, table_id: TableId, incarnation: Incarnation) -> None:
        """Drop the due join of a worker, if the table has one; the last one with its list."""
        due = self._state.joins_due.get(table_id, [])
        due[:] = [join for join in due if join.incarnation != incarnation]
        if not due:
            self._state.joins_due.pop(table_id, None)

    def joined_before(self, run: str, worker_count: int) -> tuple[Join, ...]:
        """Joins of replacement workers and late joiners, for a table that is created now."""
        joining = self._state.late_or_replacing(run, worker_count)
        return tuple(
            Join(node.rank, node.incarnation)
            for node in sorted(joining, key=lambda node: node.rank)
            if node.rank < worker_count or node.state.is_member
        )

    def resume(self, reason: str) -> list[Transition]:
        """Withdraw the undecided proposals of a journal, which does not have the hold points."""
        return [self._withdraw(table, reason) for table, _ in self._undecided()]

    def _undecided(self) -> list[tuple[Table, TableChange]]:
        """Tables with a proposal that may be withdrawn (CH-2), and the proposal."""
        proposed = [(table, table.proposed) for table in self._state.tables.values()]
        return [(table, change) for table, change in proposed if change and not change.is_decided]

    def propose_joins(self, patience_s: float, now_s: float) -> list[Transition]:
        """Propose one due join for each table without a proposal."""
        proposed: list[Transition] = []
        for table in list(self._state.tables.values()):
            due = self._state.joins_due.get(table.table_id)
            if due and table.proposed is None:
                wanted = ChangeRequest(
                    table.spec.name, table.consistency, 0, now_s + patience_s, run=table.run
                )
                proposed += self._propose(table, wanted, now_s, due[0])[1]
        return proposed

    def _joined(self, table: Table, join: Join) -> Table:
        self._due_no_more(table.table_id, join.incarnation)  # it is not, if the worker has ended
        others = (other for other in table.joins if other.rank != join.rank)
        return replace(table, joins=tuple(sorted((*others, join), key=lambda j: j.rank)))

    # --- cuts

    def cuts_refusal(self, tables: Sequence[Table]) -> str:
        """Message if the view has no space to cut these tables; else empty."""
        needed_bytes, free_bytes = sum(map(self.needed_bytes, tables)), self._free_view_bytes()
        if needed_bytes <= free_bytes:
            return ""
        return (
            f"the cuts of {len(tables)} tables take {needed_bytes} bytes of the cluster's view, "
            f"which may grow by {free_bytes}"
        )

    def propose_cut(
        self, table: Table, checkpoint: int, deadline_s: float, now_s: float
    ) -> list[Transition]:
        wanted = ChangeRequest(table.spec.name, table.consistency, 0, deadline_s, run=table.run)
        return self._propose(table, wanted, now_s, checkpoint=checkpoint)[1]

    def held_for(self, checkpoint: int) -> dict[TableId, int | None]:
        """The highest hold point of each table of a checkpoint; None if one is missing."""
        return {t.table_id: self._held_clock(t.table_id) for t in self._cut_for(checkpoint)}

    def asked_for(self, checkpoint: int) -> set[NodeId]:
        """Servers that were asked to prepare the cuts of a checkpoint."""
        proposals = (self._state.proposals[t.table_id] for t in self._cut_for(checkpoint))
        return {node_id for proposal in proposals for node_id in proposal.servers}

    def unprepared_for(self, checkpoint: int) -> set[NodeId]:
        """Those of them that are not prepared, for one table at least."""
        proposals = (self._state.proposals[t.table_id] for t in self._cut_for(checkpoint))
        return {node_id for proposal in proposals for node_id in proposal.missing}

    def _cut_for(self, checkpoint: int) -> list[Table]:
        tables = self._state.tables.values()
        return [t for t in tables if t.proposed is not None and t.proposed.checkpoint == checkpoint]

    def _held_clock(self, table_id: TableId) -> int | None:
        proposal = self._state.proposals[table_id]
        return None if proposal.missing else max(proposal.clocks.values(), default=0)

    def commit_cut(self, table_id: TableId, cut: TableCut) -> Table:
        del self._state.proposals[table_id]
        table = next(t for t in self._state.tables.values() if t.table_id == table_id)
        return self._put(replace(table, proposed=None, cut=cut))

    def withdraw_cuts(self, checkpoint: int, reason: str) -> list[Transition]:
        """Withdraw the cuts of a checkpoint, committed or not: servers hold nothing back for it."""
        for table in list(self._state.tables.values()):
            if table.cut is not None and table.cut.checkpoint == checkpoint:
                self._put(replace(table, cut=None))
        return [self._withdraw(table, reason) for table in self._cut_for(checkpoint)]

    def _propose(
        self,
        table: Table,
        wanted: ChangeRequest,
        now_s: float,
        join: Join | None = None,
        checkpoint: int = 0,
    ) -> tuple[TableChange | PendingProposal, list[Transition]]:
        state = self._state
        state.view_bytes += self.needed_bytes(table)
        number = state.change_counts.get(table.table_id, 0) + 1
        state.change_counts[table.table_id] = number
        change = TableChange(number, wanted.after_clock, wanted.consistency, join, checkpoint)
        ranges = table.blocks_by_range(len(state.ranges))
        primaries = {state.ranges[range_id].primary for range_id in ranges}
        servers = frozenset(primary for primary in primaries if primary is not None)
        state.proposals[table.table_id] = Proposal(servers, wanted.deadline_s)
        proposed = self._put(replace(table, proposed=change))
        return (
            PendingProposal(self._reason(proposed, change, now_s), number),
            [ChangeProposed(proposed, change, wanted.reason)],
        )

    def outcome(self, table_name: str, number: int, now_s: float, run: str = "") -> Outcome:
        table = self._table(run, table_name)
        if table.proposed is not None and table.proposed.number == number:
            return PendingProposal(self._reason(table, table.proposed, now_s), number)
        if table.change is not None and table.change.number >= number:
            return table.change
        return Withdrawn(self.withdrawal(table.table_id))

    def withdrawal(self, table_id: TableId) -> str:
        """Reason of the last withdrawal of one of a table's proposals."""
        return self._state.withdrawals.get(table_id, "it was withdrawn")

    def prepare(
        self, node_id: NodeId, table_id: TableId, number: int, clock: int
    ) -> list[Transition]:
        """A server is prepared: it holds back every clock of the table after `clock`."""
        table = self._state.table(table_id)
        if table is None:
            if table_id < self._state.next_table_id:
                return []  # it was removed, and the server has not heard of that
            raise TableNotFound(f"there is no table {table_id}")
        change, proposal = table.proposed, self._state.proposals.get(table_id)
        if change is None or proposal is None or change.number != number or change.is_decided:
            return []
        if not change.after_clock <= clock <= MAX_AFTER_CLOCK:
            raise InvalidConfig(
                f"the hold point of table '{table.spec.name}' is clock {clock}; expected "
                f"{change.after_clock} to {MAX_AFTER_CLOCK}"
            )
        if node_id in proposal.servers:
            proposal.clocks[node_id] = clock
        if proposal.missing or change.checkpoint:  # all tables are cut at once
            return []
        after_clock = max(proposal.clocks.values(), default=clock)
        decided = replace(change, after_clock=after_clock, is_decided=True)
        return [ChangeDecided(self._put(replace(table, proposed=decided)), decided)]

    def end_decided(
        self, table_id: TableId, number: int, outcome: ChangeOutcome
    ) -> list[Transition]:
        """The table's first range has taken a decided change, or has given it up."""
        table = self._state.table(table_id)
        change = None if table is None else table.proposed
        if table is None or change is None or change.number != number:
            return []
        if outcome is ChangeOutcome.GIVEN_UP:
            reason = "the servers gave it up, because they did not hear the scheduler; ask again"
            return [self._withdraw(table, reason)]
        if not change.is_decided:  # no server takes an undecided change
            return []
        committed = replace(change, is_decided=False)
        table = replace(table, proposed=None)
        if change.join is None:
            table = replace(table, change=committed)
        else:  # the consistency stays, a change of it that is due later too
            table = self._joined(table, replace(change.join, after_clock=change.after_clock))
        del self._state.proposals[table_id]
        return [ChangeCommitted(self._put(table), committed)]

    def expire(self, now_s: float) -> list[Transition]:
        return [
            self._withdraw(table, self._reason(table, change, now_s))
            for table, change in self._undecided()
            if now_s >= self._state.proposals[table.table_id].deadline_s
        ]

    def failed_over(self, range_ids: Iterable[RangeId]) -> list[Transition]:
        """Withdraw undecided proposals of these ranges: their new primaries are not prepared."""
        moved = set(range_ids)
        return [
            self._withdraw(table, "a server that had to prepare it was lost; ask again")
            for table, _ in self._undecided()
            if moved & table.blocks_by_range(len(self._state.ranges)).keys()
        ]

    def _withdraw(self, table: Table, reason: str) -> Transition:
        self._state.withdrawals[table.table_id] = reason
        del self._state.proposals[table.table_id]
        return ChangeWithdrawn(self._put(replace(table, proposed=None)), reason)

    def _table(self, run: str, name: str) -> Table:
        table = self._state.tables.get((run, name))
        if table is None:
            where = f" in run '{run}'" if run else ""
            raise TableNotFound(f"there is no table '{name[:200]}'{where}")
        return table

    def _put(self, table: Table) -> Table:
        self._state.tables[table.key] = table
        return table

    def _reason(self, table: Table, change: TableChange, now_s: float) -> str:
        members, number = self._state.members, change.checkpoint
        unprepared = self.unprepared_for(number) if number else set()  # all tables are cut at once
        missing = ", ".join(
            self._describe(members[node_id].node, now_s)
            for node_id in sorted(self._state.proposals[table.table_id].missing | unprepared)
        )
        join = change.join
        what = f"worker {join.rank} joining" if join else f"the change to {change.consistency} of"
        what = f"checkpoint {number} of" if number else what
        if change.is_decided:
            range_id = table.deciding_range(len(self._state.ranges))
            primary = self._state.ranges[range_id].primary
            server = "" if primary is None else self._describe(members[primary].node, now_s)
            return f"{what} table '{table.spec.name}' is decided and waits for {server} to take it"
        if number and not missing:
            return f"{what} table '{table.spec.name}' waits for the clocks of workers"
        return f"{what} table '{table.spec.name}' waits until {missing} is prepared"


def joins_due_of(state: ClusterState, table: Table, worker_count: int) -> list[Join]:
    """Joins that a table waits for, of members that have not joined it."""
    joined = {join.incarnation for join in table.joins}
    joining = state.late_or_replacing(table.run, worker_count)
    return [
        Join(node.rank, node.incarnation)
        for node in sorted(joining, key=lambda node: node.node_id)
        if node.state.is_member and node.incarnation not in joined
    ]


def check_workers(table_name: str, consistency: Consistency, worker_count: int) -> None:
    if consistency.backup_workers >= worker_count:
        raise InvalidConfig(
            f"table '{table_name}' has {consistency.backup_workers} backup workers of "
            f"{worker_count} workers; expected fewer: an update needs a step"
        )
