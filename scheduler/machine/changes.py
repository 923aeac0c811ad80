"""Changes of tables while they are trained: of their consistency, and of who their workers are
(SEMANTICS S6, "scheduled change").

    proposed   every server with a part of the table is asked, by the view
    promised   each has said beyond which clock it holds everything back
    decided    once all have: the change is after the highest of these clocks. The primary of the
               table's first range takes it, or has given it up since it did not hear the scheduler
    committed  it was taken
    withdrawn  not all had promised by the deadline, a range had another primary before all had, or
               it was given up: all is as before

Rules:
    - A table has one proposal at a time; who wants another change waits for it to be settled.
    - Numbers are never given twice: a promise for an old proposal counts for nothing.
    - A worker that replaces one that is gone, or comes beyond the first, joins every table there
      is, each by a change of its own; what was not promised in time is proposed again. Later tables
      have it from the start.

Invariants:
    CH-1  A change is decided only when every server with a part of the table has promised, and
          after the highest clock that any of them named.
    CH-2  What is decided is committed or withdrawn by the word of the table's first range alone: it
          may have taken effect there, and says so to servers that do not hear the scheduler.

What it deliberately does not do: know where workers are (the servers do), or wait (the edge asks
again when the view has changed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ps_core.change import Change, ChangeOutcome, Join, TableCut
from ps_core.cluster_view import Node
from ps_core.consistency import Consistency
from ps_core.errors import InvalidConfig, Overloaded, TableNotFound
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.tables import Table
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


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """Someone wants this consistency for a table, not before the clock after `after_clock`, and
    waits for it until `deadline_s`; `reason` is for the log, `run` is the table's.
    """

    table_name: str
    consistency: Consistency
    after_clock: int
    deadline_s: float
    reason: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """It is not settled; `reason` says what it waits for. `number`: of the proposal, if it is made:
    to ask `Changes.outcome` about; 0 if another has to be settled first.
    """

    reason: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """It was given up."""

    reason: str


Outcome = Change | Pending | Withdrawn
"""What became of a wish."""


class Changes:
    """The changes of a cluster's tables.

    Args:
        state: the cluster's, changed in place.
        describe: says who a node is and when it was last heard.
        room_bytes: how much the view may grow.
    """

    def __init__(
        self,
        state: ClusterState,
        describe: Callable[[Node, float], str],
        room_bytes: Callable[[], int],
    ) -> None:
        self._state = state
        self._describe = describe
        self._room_bytes = room_bytes

    def request(
        self, wanted: ChangeRequest, worker_count: int, now_s: float
    ) -> tuple[Change | Pending, list[Transition]]:
        """Propose the change, or find that it is proposed or made already.

        Raises:
            TableNotFound: there is no such table.
            InvalidConfig: its optimizer, or the number of workers, does not allow it.
            Overloaded: the view has no room for it.
        """
        table = self._table(wanted.run, wanted.table_name)
        if not 0 <= wanted.after_clock <= MAX_AFTER_CLOCK:
            raise InvalidConfig(
                f"after_clock is {wanted.after_clock}; expected 0 to {MAX_AFTER_CLOCK}"
            )
        check_workers(table.spec.name, wanted.consistency, worker_count)
        replace(table.spec, consistency=wanted.consistency).validated()
        # Where a bound that moves is at present is not what anybody wishes.
        wanted = replace(wanted, consistency=wanted.consistency.begun)
        is_so = table.consistency.begun == wanted.consistency
        if table.proposed is not None:
            other = table.proposed.join or table.proposed.checkpoint
            is_same = table.proposed.consistency.begun == wanted.consistency and not other
            if not (is_so and is_same):
                reason = self._reason(table, table.proposed, now_s)
                return Pending(reason, table.proposed.number if is_same else 0), []
        if is_so:
            return table.change or Change(0, 0, wanted.consistency), []
        needed_bytes, room_bytes = self.needed_bytes(table), self._room_bytes()
        if needed_bytes > room_bytes:
            raise Overloaded(
                f"a change of table '{table.spec.name}' takes {needed_bytes} bytes of the "
                f"cluster's view, which has room for {room_bytes}"
            )
        return self._propose(table, wanted, now_s)

    def move(self, wanted: ChangeRequest, now_s: float) -> list[Transition]:
        """Propose that the bound of a table moves to where the wish has it; nothing if it is there,
        the table's setting has other bounds, another change is not settled or the view is full.
        """
        table = self._table(wanted.run, wanted.table_name)
        has_bounds = table.consistency.begun == wanted.consistency.begun
        if table.proposed is not None or not has_bounds or table.consistency == wanted.consistency:
            return []
        if self.needed_bytes(table) > self._room_bytes():
            return []
        # Somebody may have wanted the setting from a later clock on: not a step before.
        after_clock = 0 if table.change is None else table.change.after_clock
        return self._propose(table, replace(wanted, after_clock=after_clock), now_s)[1]

    def needed_bytes(self, table: Table) -> int:
        """What a change of the table takes of the view, beyond what it takes already."""
        return 0 if table.table_id in self._state.change_counts else view_size.CHANGE_BYTES

    # --- workers that join

    def join_bytes(self, run: str, rank: int) -> int:
        """What a worker that joins with this rank takes of the view, beside its node."""
        needed_bytes = sum(self.needed_bytes(table) for table in self._state.tables_of(run))
        return needed_bytes + view_size.JOIN_BYTES * len(self._without_room(run, rank))

    def _without_room(self, run: str, rank: int) -> list[TableId]:
        """The tables of a run that nobody has joined with this rank, nor was to."""
        rooms, tables = self._state.join_rooms, self._state.tables_of(run)
        return [t.table_id for t in tables if (t.table_id, rank) not in rooms]

    def join(self, run: str, join: Join) -> None:
        """This worker is to have its rank in every table of its run, whoever had it or was due
        to.
        """
        state = self._state
        for table_id in self._without_room(run, join.rank):
            state.view_bytes += view_size.JOIN_BYTES
            state.join_rooms.add((table_id, join.rank))
        for table in state.tables_of(run):
            due = state.joins_due.setdefault(table.table_id, [])
            due[:] = [*(other for other in due if other.rank != join.rank), join]

    def ended(self, node: Node) -> None:
        """Whoever has ended joins nothing any more."""
        for due in self._state.joins_due.values():
            due[:] = [join for join in due if join.incarnation != node.incarnation]

    def joined_before(self, run: str, worker_count: int) -> tuple[Join, ...]:
        """Who has the ranks that were given anew, and those beyond the first, in a table of the run
        that is made now.
        """
        first: dict[int, Node] = {}
        for node in self._state.workers_of(run):
            first.setdefault(node.rank, node)
        newest = self._state.workers_by_rank(run)
        return tuple(
            Join(rank, node.incarnation)
            for rank, node in sorted(newest.items())
            if (node.state.is_member if rank >= worker_count else node is not first[rank])
        )

    def resume(self, reason: str) -> list[Transition]:
        """The scheduler goes on from its journal, which has no promises: what is not decided is
        withdrawn. Who wants it asks again; who joins is proposed again.
        """
        return [
            self._withdraw(table, reason)
            for table in list(self._state.tables.values())
            if table.proposed is not None and not table.proposed.is_decided  # CH-2
        ]

    def propose_joins(self, patience_s: float, now_s: float) -> list[Transition]:
        """Propose what is due and has its turn."""
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
        due = self._state.joins_due[table.table_id]
        due[:] = [other for other in due if other.incarnation != join.incarnation]
        others = (other for other in table.joins if other.rank != join.rank)
        return replace(table, joins=tuple(sorted((*others, join), key=lambda j: j.rank)))

    # --- cuts

    def cuts_lack_room(self) -> str:
        """Why the view has no room to cut all tables; nothing if it has."""
        tables = self._state.tables.values()
        needed_bytes, room_bytes = sum(map(self.needed_bytes, tables)), self._room_bytes()
        if needed_bytes <= room_bytes:
            return ""
        return (
            f"the cuts of {len(tables)} tables take {needed_bytes} bytes of the cluster's view, "
            f"which has room for {room_bytes}"
        )

    def propose_cut(
        self, table: Table, checkpoint: int, deadline_s: float, now_s: float
    ) -> list[Transition]:
        """Propose to cut a table that has no proposal, for a checkpoint."""
        wanted = ChangeRequest(table.spec.name, table.consistency, 0, deadline_s, run=table.run)
        return self._propose(table, wanted, now_s, checkpoint=checkpoint)[1]

    def held_for(self, checkpoint: int) -> dict[TableId, int | None]:
        """The tables that are proposed to be cut for it, and beyond which clock all servers hold
        each; None where not all have promised.
        """
        return {
            table.table_id: self._held_clock(table)
            for table in self._state.tables.values()
            if table.proposed is not None and table.proposed.checkpoint == checkpoint
        }

    def _held_clock(self, table: Table) -> int | None:
        proposal = self._state.proposals[table.table_id]
        return None if proposal.missing else max(proposal.clocks.values(), default=0)

    def commit_cut(self, table_id: TableId, cut: TableCut) -> Table:
        """The cut of a table is settled; the table from now on."""
        table = next(t for t in self._state.tables.values() if t.table_id == table_id)
        del self._state.proposals[table_id]
        return self._put(replace(table, proposed=None, cut=cut))

    def withdraw_cuts(self, checkpoint: int, reason: str) -> list[Transition]:
        """Nothing comes of the checkpoint: servers hold nothing for it any more, settled or not."""
        for table in list(self._state.tables.values()):
            if table.cut is not None and table.cut.checkpoint == checkpoint:
                self._put(replace(table, cut=None))
        ids = self.held_for(checkpoint).keys()
        tables = [t for t in self._state.tables.values() if t.table_id in ids]
        return [self._withdraw(table, reason) for table in tables]

    def _propose(
        self,
        table: Table,
        wanted: ChangeRequest,
        now_s: float,
        join: Join | None = None,
        checkpoint: int = 0,
    ) -> tuple[Change | Pending, list[Transition]]:
        state = self._state
        state.view_bytes += self.needed_bytes(table)
        number = state.change_counts.get(table.table_id, 0) + 1
        state.change_counts[table.table_id] = number
        change = Change(number, wanted.after_clock, wanted.consistency, join, checkpoint)
        ranges = table.blocks_by_range(len(state.ranges))
        primaries = {state.ranges[range_id].primary for range_id in ranges}
        servers = frozenset(primary for primary in primaries if primary is not None)
        state.proposals[table.table_id] = Proposal(servers, wanted.deadline_s)
        proposed = self._put(replace(table, proposed=change))
        return (
            Pending(self._reason(proposed, change, now_s), number),
            [ChangeProposed(proposed, change, wanted.reason)],
        )

    def outcome(self, table_name: str, number: int, now_s: float, run: str = "") -> Outcome:
        """What has become of a proposal.

        Raises:
            TableNotFound: there is no such table.
        """
        table = self._table(run, table_name)
        if table.proposed is not None and table.proposed.number == number:
            return Pending(self._reason(table, table.proposed, now_s), number)
        if table.change is not None and table.change.number >= number:
            return table.change
        return Withdrawn(self._state.withdrawals.get(table.table_id, "it was withdrawn"))

    def promise(
        self, node_id: NodeId, table_id: TableId, number: int, clock: int
    ) -> list[Transition]:
        """A server holds all of its parts of the table beyond `clock`.

        Raises:
            TableNotFound: there is no such table.
            InvalidConfig: the clock is before the one that was proposed.
        """
        table = next((t for t in self._state.tables.values() if t.table_id == table_id), None)
        if table is None and table_id < self._state.next_table_id:
            return []  # it was removed, which the server has not heard
        if table is None:
            raise TableNotFound(f"there is no table {table_id}")
        change, proposal = table.proposed, self._state.proposals.get(table_id)
        if change is None or proposal is None or change.number != number or change.is_decided:
            return []
        if not change.after_clock <= clock <= MAX_AFTER_CLOCK:
            raise InvalidConfig(
                f"a promise for table '{table.spec.name}' is at clock {clock}; expected "
                f"{change.after_clock} to {MAX_AFTER_CLOCK}"
            )
        if node_id in proposal.servers:
            proposal.clocks[node_id] = clock
        if proposal.missing or change.checkpoint:  # all tables are cut at once
            return []
        after_clock = max(proposal.clocks.values(), default=clock)
        decided = replace(change, after_clock=after_clock, is_decided=True)
        return [ChangeDecided(self._put(replace(table, proposed=decided)), decided)]

    def settled(self, table_id: TableId, number: int, outcome: ChangeOutcome) -> list[Transition]:
        """The table's first range has taken a change that is decided, or will never take it."""
        table = next((t for t in self._state.tables.values() if t.table_id == table_id), None)
        change = None if table is None else table.proposed
        if table is None or change is None or change.number != number:
            return []
        if outcome is ChangeOutcome.GIVEN_UP:
            reason = "the servers gave it up, since they did not hear the scheduler; ask again"
            return [self._withdraw(table, reason)]
        if not change.is_decided:  # nobody takes what was not
            return []
        committed = replace(change, is_decided=False)
        table = replace(table, proposed=None)
        if change.join is None:
            table = replace(table, change=committed)
        else:  # the setting stays what it is, one that is to come included
            table = self._joined(table, replace(change.join, after_clock=change.after_clock))
        del self._state.proposals[table_id]
        return [ChangeCommitted(self._put(table), committed)]

    def expire(self, now_s: float) -> list[Transition]:
        """Withdraw what was not promised in time."""
        withdrawn: list[Transition] = []
        for table in list(self._state.tables.values()):
            proposal, change = self._state.proposals.get(table.table_id), table.proposed
            if proposal is None or change is None or now_s < proposal.deadline_s:
                continue
            if change.is_decided:  # CH-2
                continue
            withdrawn.append(self._withdraw(table, self._reason(table, change, now_s)))
        return withdrawn

    def failed_over(self, range_ids: Iterable[RangeId]) -> list[Transition]:
        """These ranges have other primaries, which have promised nothing for them."""
        moved = set(range_ids)
        return [
            self._withdraw(table, "a server that was to promise it was lost; ask again")
            for table in list(self._state.tables.values())
            if table.table_id in self._state.proposals
            and not (table.proposed is not None and table.proposed.is_decided)  # CH-2
            and moved & table.blocks_by_range(len(self._state.ranges)).keys()
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

    def _reason(self, table: Table, change: Change, now_s: float) -> str:
        members = self._state.members
        missing = ", ".join(
            self._describe(members[node_id].node, now_s)
            for node_id in sorted(self._state.proposals[table.table_id].missing)
        )
        join = change.join
        what = f"worker {join.rank} joining" if join else f"the change to {change.consistency} of"
        what = f"checkpoint {change.checkpoint} of" if change.checkpoint else what
        if change.is_decided:
            range_id = table.deciding_range(len(self._state.ranges))
            primary = self._state.ranges[range_id].primary
            server = "" if primary is None else self._describe(members[primary].node, now_s)
            return f"{what} table '{table.spec.name}' is decided and waits for {server} to take it"
        return f"{what} table '{table.spec.name}' waits for the promise of {missing}"


def joins_due_of(state: ClusterState, table: Table, worker_count: int) -> list[Join]:
    """Whom a table waits for to join it: the newest worker of a rank that was given anew, or is
    beyond the first, if it is a member and has not joined.
    """
    first: dict[int, Node] = {}
    for node in state.workers_of(table.run):
        first.setdefault(node.rank, node)
    joined = {join.incarnation for join in table.joins}
    newest = sorted(state.workers_by_rank(table.run).values(), key=lambda node: node.node_id)
    return [
        Join(node.rank, node.incarnation)
        for node in newest
        if (node.rank >= worker_count or node is not first[node.rank])
        and node.state.is_member
        and node.incarnation not in joined
    ]


def check_workers(table_name: str, consistency: Consistency, worker_count: int) -> None:
    """Refuse as many backup workers as there are workers.

    Raises:
        InvalidConfig: naming both.
    """
    if consistency.backup_workers >= worker_count:
        raise InvalidConfig(
            f"table '{table_name}' has {consistency.backup_workers} backup workers of "
            f"{worker_count} workers; expected fewer: an update needs a step"
        )
