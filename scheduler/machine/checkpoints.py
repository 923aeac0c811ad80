"""Checkpoints: the cut of all tables, and the reports of the parts (SEMANTICS S6, S10).

    proposed   each server names its hold point; each worker names the clocks at which it can save
               its own state next, and goes no further
    cut        all have answered: each table is cut after the highest clock that anyone named
    written    every server has written its blocks as of the cut, every worker its state
    complete   the manifest is written

    proposed   --nothing has moved since the checkpoint that the cluster began from--> that one
    cut        --all workers wait for it, before the step of the cut--> proposed, as another
    proposed | cut --too late, a range has another primary, a server left, a node cannot write-->
        failed

Rules:
    - One checkpoint runs at a time. A request gets it while it is proposed, the next one later.
    - None is proposed while values that it would have are lost, or on a server that has left and
      may come with its update log.
    - The first of `checkpoint_full_every` complete checkpoints in a row is full. The others refer
      to the newest complete one that this cluster wrote.
    - A worker that reports that it cannot write its state fails the checkpoint: it lives, and the
      next one may have it.
    - A worker that is gone, or left and could not write its state then, is lost in the manifest,
      because no later checkpoint can have it; the others have their state there. But where workers
      have parameters that no server has, one without any worker's state fails. So says a table of
      AGGREGATE, or a worker's report of a part.
    - A worker that has left takes no more steps, so the state that it wrote when it left is valid
      at every cut from its last step on. An earlier cut has no state of it. One that left without
      a file had nothing to write.
    - Shards of data sets that were reported before the cut are done in it: their workers had sealed
      the steps, so none of these is after the cut (DS-3).
    - Until something has moved, the checkpoint that the cluster began from is the answer: while it
      starts up, tables have not been created again, and states have not been attached. Something
      has moved once a table is beyond that checkpoint, or a shard was reported since, or each
      worker of the first ones has begun, which it says at its first save point, or has left with
      its state, or with none to write. A changed consistency is no movement: one made for its
      sake would lack those tables and states. It is named instead.
    - A worker that has not begun by a later cut, and has no state yet, is lost in the manifest.
    - A worker's next clock is a guess while its script is in a step. A script that waits for the
      checkpoint takes no step. If every script waits before the step of a cut, but for those that
      start up, no worker will take that step, and the checkpoint is begun again at the steps where
      the workers are. Not if the servers have that step, of a worker that has ended since: they
      would be cut there again, so the others must take it.

Invariants:
    CP-1  No table is cut before every server with a shard of it, and every worker that was asked,
          has named its clock; the cut is after the highest of them.
    CP-2  A checkpoint is complete only if every block of every table that it cut was reported.
    CP-3  Where only workers have parameters, a checkpoint that lacks a worker's state is complete
          only if it has another's.

`scheduler.machine.checkpoint_schedule` decides when a checkpoint is due; the edge
(`scheduler.edge.checkpointing`) writes its manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ps_core import limits
from ps_core.change import Checkpoint, TableCut
from ps_core.cluster_view import RESTORE, Node, NodeState, Role, lost_among
from ps_core.errors import InvalidConfig, listed
from ps_core.keys import NodeId, TableId
from ps_core.manifest import PartReport, directory_name, is_file_name, number_of
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from scheduler.machine.changes import PendingProposal, TableChanges
from scheduler.machine.checkpoint_state import (
    Attempt,
    CheckpointBegunAgain,
    CheckpointCut,
    CheckpointFailed,
    CheckpointMade,
    CheckpointUnneeded,
    CheckpointWritten,
    CompleteCheckpoint,
    LeftPart,
    WorkerClocks,
)
from scheduler.machine.data_shards import DataSet
from scheduler.machine.state import ClusterSettings, ClusterState, Restored, Transition
from scheduler.machine.tables import first_consistency

_REMEMBERED_COUNT = 100  # ended checkpoints whose results are remembered
LEAVING = 0  # the number of no checkpoint: the part of a worker that leaves
UNNAMED = ""  # the run that checkpoints cover
CHECKPOINTS_FEATURE = "checkpoints"  # feature of a worker that answers views with a checkpoint

_NAMED_COUNT = 3  # lost workers that a message names
_NOT_BEGUN = "it was starting up, had taken no step and attached no state"


def without_parameters(states: Iterable[tuple[int, str, str]]) -> str:
    """Message if none of workers' states (rank, file, problem) is there, and one is lost; else
    empty.
    """
    found = sorted(states)
    lost = [f"worker {rank}: {problem}" for rank, _, problem in found if problem]
    if not lost or any(file for _, file, _ in found):
        return ""
    named = listed(lost, _NAMED_COUNT)
    return f"no worker's state is in it, and only the workers have parameters: {named}"


class CheckpointAttempts:
    """The checkpoints of a cluster.

    Attributes:
        reached: clocks in the last heartbeat of each worker, for messages.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        state: ClusterState,
        changes: TableChanges,
        describe: Callable[[Node, float], str],
    ) -> None:
        self._settings = settings
        self._state = state
        self._changes = changes
        self._describe = describe
        self.reached: Mapping[NodeId, Mapping[TableId, int]] = {}

    @property
    def under_way(self) -> Checkpoint | None:
        attempt = self._state.checkpoint
        if attempt is None:
            return None
        return Checkpoint(attempt.number, attempt.url, attempt.is_cut, attempt.base)

    @property
    def has_left_parts(self) -> bool:
        """True if there are files of workers that have left."""
        return any(each.part.file for each in self._state.left_parts.values())

    def begin(self, reason: str, now_s: float) -> tuple[PendingProposal, list[Transition]]:
        """Propose a checkpoint, or find the proposed one. `reason` is for the manifest; the result
        has number 0 if another proposal or a cut checkpoint must end first.
        """
        state, attempt = self._state, self._state.checkpoint
        if attempt is not None:
            said = self._reason(attempt, now_s)
            return PendingProposal(said, 0 if attempt.is_cut else attempt.number), []
        obstacle = self._obstacle(now_s)
        if obstacle:
            return PendingProposal(obstacle), []
        state.checkpoint_count += 1
        number = state.checkpoint_count
        url = f"{self._settings.checkpoint_url}/{directory_name(number, self._settings.cluster_id)}"
        cut_by_s = now_s + limits.CHECKPOINT_CUT_S
        written_by_s = now_s + limits.CHECKPOINT_WRITTEN_S
        attempt = Attempt(number, url, reason, self._base(), cut_by_s, written_by_s)
        state.checkpoint = attempt
        transitions: list[Transition] = []
        for table in state.tables_of(UNNAMED):
            transitions += self._changes.propose_cut(table, number, cut_by_s, now_s)
            attempt.tables.append(table.table_id)
        for worker in state.workers_by_rank(UNNAMED).values():
            if _answers(state, worker):
                attempt.awaited.add(worker.node_id)
            elif worker.state is NodeState.SILENT:
                attempt.lose(worker, "it was silent when the checkpoint was proposed")
            elif worker.state is NodeState.GONE:
                attempt.lose(worker, worker.ended_words)
        return PendingProposal(self._reason(attempt, now_s), attempt.number), transitions

    def _obstacle(self, now_s: float) -> str:
        """Message if no checkpoint can be proposed now; else empty."""
        tables = self._state.tables_of(UNNAMED)
        if self.lost_words:
            return self.lost_words
        for busy in tables:
            if busy.proposed is not None:
                return f"a change of table '{busy.spec.name}' has not ended"
        away = self._away(tables)
        if away:  # not for good, as nothing is lost
            return f"{self._named(away, now_s)} had values, and nobody has come back with them yet"
        if tables:
            return self._changes.cuts_refusal(tables)
        whose = "run without a name, of which checkpoints are," if self._state.tables else "cluster"
        return f"the {whose} has no table yet"

    def _away(self, tables: Iterable[Table]) -> set[NodeId]:
        """Servers that had values of these tables, and are no members."""
        return {p for p in self._primaries(tables) if not self._member(p).state.is_member}

    @property
    def all_is_here(self) -> bool:
        """True if members have all values that a checkpoint would have."""
        return not self.lost_words and not self._away(self._state.tables_of(UNNAMED))

    @property
    def lost_words(self) -> str:
        """Message if values are lost that a checkpoint would have; else empty."""
        lost = lost_among(self._state.ranges, self._state.tables_of(UNNAMED))
        if not lost:
            return ""
        servers = sorted({each.primary for each in lost if each.primary is not None})
        return (
            f"{len(lost)} key ranges are lost, of which server {', '.join(map(str, servers))} had "
            f"the only copy. {RESTORE}"
        )

    def _primaries(self, tables: Iterable[Table]) -> set[NodeId]:
        """Servers with a shard of these tables."""
        ranges = self._state.ranges
        held = {range_id for table in tables for range_id in table.blocks_by_range(len(ranges))}
        return {p for range_id in held if (p := ranges[range_id].primary) is not None}

    def _member(self, node_id: NodeId) -> Node:
        return self._state.members[node_id].node

    def _running(self, number: int) -> Attempt | None:
        attempt = self._state.checkpoint
        return None if attempt is None or attempt.number != number else attempt

    def join(self, node: Node, number: int, place: WorkerClocks) -> list[Transition]:
        """A worker goes no further than these clocks until the cut."""
        attempt = self._running(number)
        if attempt is None or attempt.is_cut or node.run != UNNAMED:
            return []
        attempt.awaited.discard(node.node_id)
        attempt.workers[node.node_id] = place
        return self.look()

    def stay(
        self, node: Node, number: int, clocks: Mapping[TableId, int], now_s: float
    ) -> list[Transition]:
        """A worker's script waits for the checkpoint, and takes no step meanwhile."""
        attempt = self._running(number)
        if attempt is None or node.run != UNNAMED or attempt.is_written:
            return []
        attempt.staying[node.node_id] = dict(clocks)
        if not attempt.is_cut or not self._is_out_of_reach(attempt) or self._obstacle(now_s):
            return []  # a waiting worker reports again
        self._state.checkpoint = None
        withdrawn = self._changes.withdraw_cuts(attempt.number, "it is begun again")
        pending, begun = self.begin(attempt.reason, now_s)
        self._state.checkpoint_again[attempt.number] = pending.number
        again = CheckpointBegunAgain(attempt.number, attempt.url, pending.number)
        return [*withdrawn, again, *begun]

    def is_awaited(self, node: Node, number: int) -> bool:
        """True if the script of another worker waits for the checkpoint."""
        attempt = self._running(number)
        return attempt is not None and any(each != node.node_id for each in attempt.staying)

    def _is_out_of_reach(self, attempt: Attempt) -> bool:
        """True if every worker waits that does not start up, before the step of a cut, which the
        servers do not have.
        """
        members = (node for node in self._state.workers_of(UNNAMED) if node.state.is_member)
        workers = {node.node_id for node in members if not self._is_starting(attempt, node)}
        staying = [attempt.staying[each] for each in workers & attempt.staying.keys()]
        if len(staying) < len(workers):
            return False
        return any(
            step > max((each[table_id] for each in staying if table_id in each), default=step)
            for table_id, step in attempt.steps.items()
            if not attempt.is_taken(table_id)
        )

    def _is_starting(self, attempt: Attempt, worker: Node) -> bool:
        """True if a worker has said that its script has come to no save point, at no clock, or has
        not been asked, because it came later: it may take minutes until it takes a step.
        """
        place = attempt.workers.get(worker.node_id)
        has_begun = place is not None and (place.has_begun or any(place.clocks.values()))
        has_begun |= worker.node_id in attempt.staying
        return _answers(self._state, worker) and not has_begun

    def must_step(
        self,
        node: Node,
        number: int,
        clocks: Mapping[TableId, int],
        reached: Mapping[NodeId, Mapping[TableId, int]],
    ) -> bool:
        """True if another worker has taken, or begun with others, a step up to that of a cut that
        this one, with these `clocks`, has not: the other may wait for it in that step. `reached`
        has the clocks in the last heartbeat of each worker.
        """
        attempt = self._running(number)
        if attempt is None:
            return False
        others = [
            each
            for known in (reached, attempt.staying)
            for node_id, each in known.items()
            if node_id != node.node_id
        ]
        return any(
            (clock := clocks.get(table_id, step)) < step
            and (
                attempt.is_taken(table_id) or any(each.get(table_id, 0) > clock for each in others)
            )
            for table_id, step in attempt.steps.items()
        )

    def report(self, node: Node, number: int, part: PartReport) -> list[Transition]:
        """A node has written its part, or cannot. The part with number `LEAVING` counts once its
        worker has left.
        """
        _check_names(part)
        attempt = self._running(number)
        if node.role is Role.WORKER and node.run == UNNAMED:
            self._state.workers_have_parameters |= part.has_parameters
            if number == LEAVING:
                self._state.left_parts[node.rank] = LeftPart(node.node_id, part)
        if attempt is None or attempt.is_written:
            return []
        if part.problem and node.role is Role.SERVER:  # reported once, before the cut or after
            return self._fail(attempt, f"server {node.node_id}: {part.problem}")
        if not attempt.is_cut:
            return []
        if node.role is Role.WORKER and node.node_id not in attempt.workers:
            raise InvalidConfig(f"worker {node.rank} is not in checkpoint {number}")
        if part.problem:
            return self._fail(attempt, f"worker {node.rank}: {part.problem}")
        tables = {each: written for each, written in part.tables.items() if each in attempt.cuts}
        attempt.parts[node.node_id] = replace(part, tables=tables)
        return self.look()

    def found(self, rank: int, node_id: NodeId) -> None:
        """The scheduler has seen the file of a worker that leaves."""
        left = self._state.left_parts.get(rank)
        if left is not None and left.node_id == node_id:
            self._state.left_parts[rank] = replace(left, is_found=True)

    @property
    def unfound(self) -> frozenset[int]:
        """Ranks of workers that wrote a file when they left, which the scheduler has never seen."""
        parts = self._state.left_parts.items()
        return frozenset(rank for rank, left in parts if left.part.file and not left.is_found)

    def ended(self, node: Node) -> list[Transition]:
        """A node's membership has ended: the checkpoint does not wait for a worker, and fails
        without the part of a server.
        """
        attempt = self._state.checkpoint
        if attempt is None or attempt.is_written:
            return []
        if node.role is Role.SERVER:
            writers = attempt.servers or self._changes.asked_for(attempt.number)
            left = f"a server was lost while it was made: server node {node.node_id} has left"
            is_missed = node.node_id in writers and node.node_id not in attempt.parts
            return self._fail(attempt, left) if is_missed else []
        if node.role is not Role.WORKER:
            return []
        has_named = node.node_id in attempt.workers and node.node_id not in attempt.parts
        if node.node_id in attempt.awaited or has_named:
            attempt.awaited.discard(node.node_id)
            attempt.lose(node, node.ended_words)
        return self.look()

    def expire(self, now_s: float) -> list[Transition]:
        attempt = self._state.checkpoint
        if attempt is None:
            return []
        deadline_s = attempt.written_by_s if attempt.is_cut else attempt.cut_by_s
        return self.give_up(self._reason(attempt, now_s)) if now_s >= deadline_s else []

    def give_up(self, reason: str) -> list[Transition]:
        """Fail the running checkpoint, unless only its manifest is missing."""
        attempt = self._state.checkpoint
        if attempt is None or attempt.is_written:
            return []
        return self._fail(attempt, reason)

    def done(
        self, number: int, problem: str, made: CompleteCheckpoint | None = None
    ) -> list[Transition]:
        """The manifest is written, or could not be. Later schedulers know of it as `made`."""
        attempt = self._running(number)
        if attempt is None:
            return []
        if problem:
            self._state.checkpoint_base = 0
            return self._fail(attempt, problem)
        for rank, part in attempt.left.items():
            left = self._state.left_parts.get(rank)
            if left is not None and left.part is part:  # it was copied
                self._state.left_parts[rank] = replace(left, is_found=True)
        since = self._state.checkpoints_since_full + 1 if attempt.base else 1
        self._state.checkpoint_base, self._state.checkpoints_since_full = number, since
        self._state.checkpoint_made = made or self._state.checkpoint_made
        self._state.checkpoint = None
        self._remember(number, "")
        return [CheckpointMade(number, attempt.url)]

    @property
    def newest(self) -> CompleteCheckpoint | None:
        """The newest complete one, also of an earlier scheduler of this cluster."""
        return self._state.checkpoint_made

    def _remember(self, number: int, problem: str) -> None:
        """Note the result for the requesters, who poll."""
        ends = self._state.checkpoint_ends
        ends[number] = problem
        while len(ends) > _REMEMBERED_COUNT:
            oldest = min(ends)
            del ends[oldest]
            for number in [n for n in self._state.checkpoint_again if n < oldest]:
                del self._state.checkpoint_again[number]

    def problem_of(self, number: int) -> str | None:
        """Reason of failure; empty for a complete checkpoint, None for a running one."""
        return self._state.checkpoint_ends.get(number)

    def newest_of(self, number: int) -> int:
        """Number of the last attempt at a checkpoint, its own if it was not begun again."""
        while number in self._state.checkpoint_again:
            number = self._state.checkpoint_again[number]
        return number

    def reason(self, now_s: float) -> str:
        """Message on the servers or workers that the running checkpoint waits for."""
        attempt = self._state.checkpoint
        return "" if attempt is None else self._reason(attempt, now_s)

    # --- what follows

    def look(self) -> list[Transition]:
        """Cut once all clocks are named; end the writing once all parts are reported."""
        attempt = self._state.checkpoint
        if attempt is None or attempt.is_written:
            return []
        if not attempt.is_cut:
            return self._cut(attempt)
        if self._servers_missing(attempt) or self._workers_missing(attempt):
            return []
        attempt.left = self._left(attempt)
        problem = self._uncovered(attempt) or self._without_parameters(attempt)
        if problem:
            return self._fail(attempt, problem)
        attempt.is_written = True
        return [CheckpointWritten(attempt)]

    def _left(self, attempt: Attempt) -> dict[int, PartReport]:
        """Parts by rank of workers that have left and wrote none for this checkpoint."""
        holders, parts = self._state.workers_by_rank(UNNAMED), attempt.parts
        own = {
            place.rank
            for node_id, place in attempt.workers.items()
            if not place.has_state or not parts[node_id].problem
        }
        found = {}
        for rank, left in self._state.left_parts.items():
            if not (left.part.file or left.part.problem):
                continue  # there was nothing to write
            holder = holders.get(rank)  # may be a replacement
            has_left = holder is None or (
                holder.node_id == left.node_id and holder.state is NodeState.LEFT
            )
            if has_left and rank not in own and _is_before(left.part, attempt.cuts):
                found[rank] = left.part
        return found

    def _base(self) -> int:
        """Checkpoint that the next one refers to; 0 for a full one."""
        state = self._state
        is_full_due = state.checkpoints_since_full >= self._settings.checkpoint_full_every
        return 0 if is_full_due else state.checkpoint_base

    def _cut(self, attempt: Attempt) -> list[Transition]:
        held = self._changes.held_for(attempt.number)
        uncut = [table_id for table_id in attempt.tables if table_id not in held]
        if uncut:  # its table's was withdrawn
            return self._fail(attempt, self._changes.withdrawal(uncut[0]))
        if attempt.awaited or any(clock is None for clock in held.values()):
            return []
        if self._settings.restored is not None:
            restored = self._settings.restored
            if not self._has_moved(attempt, restored, held):
                return self._unneeded(attempt, restored)
            self._lose_late(attempt)
        for table_id, clock in held.items():
            named = (place.clocks.get(table_id, 0) for place in attempt.workers.values())
            cut = TableCut(attempt.number, max(clock or 0, *named, 0))
            attempt.cuts[table_id] = self._changes.commit_cut(table_id, cut)
        data_sets = self._state.data_sets.values()
        attempt.data_sets = tuple(each.saved() for each in data_sets if each.run == UNNAMED)
        attempt.is_cut = True
        attempt.servers = frozenset(self._primaries(attempt.cuts.values()))
        clocks = {t.spec.name: t.cut.after_clock for t in attempt.cuts.values() if t.cut}
        return [CheckpointCut(attempt.number, clocks)]

    def _has_moved(
        self, attempt: Attempt, restored: Restored, held: Mapping[TableId, int | None]
    ) -> bool:
        """True if the cluster has anything that the checkpoint `restored`, which it began from, has
        not, or each of its workers has begun. `held`: how far each table has come.
        """
        first = self._first_clocks()
        if any((clock or 0) > first[table_id] for table_id, clock in held.items()):
            return True
        before = {each.spec.name: DataSet.restored(each).progress for each in restored.data_sets}
        own = (each for each in self._state.data_sets.values() if each.run == UNNAMED)
        if any(each.progress > before.get(each.spec.name, (0, 0)) for each in own):
            return True
        return all(self._has_begun(attempt, rank) for rank in range(self._settings.worker_count))

    def _first_clocks(self) -> dict[TableId, int]:
        """Clock of each table in the checkpoint that the cluster began from; 0 of a new one."""
        tables = self._state.tables_of(UNNAMED)
        return {table.table_id: table.restored_clock or 0 for table in tables}

    def _has_begun(self, attempt: Attempt, rank: int) -> bool:
        holder = self._state.workers_by_rank(UNNAMED).get(rank)
        if holder is None:
            return False
        if holder.state is NodeState.LEFT:
            left = self._state.left_parts.get(rank)
            return left is not None and left.node_id == holder.node_id and not left.part.problem
        place = attempt.workers.get(holder.node_id)
        return place is not None and place.has_begun

    def _unneeded(self, attempt: Attempt, restored: Restored) -> list[Transition]:
        self._state.checkpoint = None
        self._remember(attempt.number, "")
        reason = f"no step was taken since {restored.url}"
        withdrawn = self._changes.withdraw_cuts(attempt.number, reason)
        changed = tuple(
            table.spec.name
            for table in self._state.tables_of(UNNAMED)
            if (before := restored.tables.get(table.spec.name)) is not None
            and table.consistency != first_consistency(table.spec, before)
        )
        unneeded = CheckpointUnneeded(attempt.number, attempt.url, restored.url, changed)
        return [*withdrawn, unneeded]

    def _lose_late(self, attempt: Attempt) -> None:
        """Note the workers that had not begun: the checkpoint began from may have their state."""
        first = self._first_clocks()
        for node_id, place in attempt.workers.items():
            steps = (clock > first.get(table_id, 0) for table_id, clock in place.clocks.items())
            is_late = not (place.has_state or place.has_begun or any(steps))
            if is_late and place.rank < self._settings.worker_count:
                attempt.parts[node_id] = PartReport(problem=_NOT_BEGUN)

    def _fail(self, attempt: Attempt, reason: str) -> list[Transition]:
        self._state.checkpoint = None
        self._remember(attempt.number, reason or "it failed")
        withdrawn = self._changes.withdraw_cuts(attempt.number, reason)
        return [*withdrawn, CheckpointFailed(attempt.number, attempt.url, reason)]

    def _servers_missing(self, attempt: Attempt) -> set[NodeId]:
        return set(attempt.servers - attempt.parts.keys())

    def _workers_missing(self, attempt: Attempt) -> set[NodeId]:
        return {
            node_id
            for node_id, place in attempt.workers.items()
            if place.has_state and node_id not in attempt.parts
        }

    def _uncovered(self, attempt: Attempt) -> str:
        """Message on a table with missing blocks (CP-2); empty if there is none."""
        counts: Counter[TableId] = Counter()
        for node_id in attempt.servers:
            for table_id, written in attempt.parts[node_id].tables.items():
                counts[table_id] += written.block_count
        for table in attempt.cuts.values():
            found = counts[table.table_id]
            if found != table.block_count:
                return f"{found} of {table.block_count} blocks of '{table.spec.name}' were written"
        return ""

    def _without_parameters(self, attempt: Attempt) -> str:
        """Message if only workers have parameters, and no worker's state is there (CP-3); else
        empty.
        """
        if not self._have_parameters(attempt.cuts.values()):
            return ""
        found = [*attempt.left.items()]
        for node_id, place in attempt.workers.items():
            if node_id in attempt.parts and place.rank not in attempt.left:
                found.append((place.rank, attempt.parts[node_id]))
        return without_parameters((rank, part.file, part.problem) for rank, part in found)

    def _have_parameters(self, tables: Iterable[Table]) -> bool:
        """True if workers have parameters that no server has."""
        kinds = {table.spec.optimizer.kind for table in tables}
        return OptimizerKind.AGGREGATE in kinds or self._state.workers_have_parameters

    def needs_states(self, attempt: Attempt) -> bool:
        """True if CP-3 holds for it: the edge reads its states, and may find none."""
        return self._have_parameters(attempt.cuts.values())

    @property
    def parameters_are_lost(self) -> bool:
        """True if no checkpoint will have the parameters that only workers had: all have ended, one
        of them without its state, and none has left one.
        """
        workers = self._state.workers_of(UNNAMED)
        if any(node.state.is_member for node in workers):
            return False
        parts = [left.part for left in self._state.left_parts.values()]
        is_lost = any(part.problem for part in parts)
        is_lost |= any(node.state is not NodeState.LEFT for node in workers)
        has_one = any(part.file for part in parts)
        return is_lost and not has_one and self._have_parameters(self._state.tables_of(UNNAMED))

    def _reason(self, attempt: Attempt, now_s: float) -> str:
        what = f"checkpoint {attempt.number}"
        if attempt.is_written:
            return f"{what} waits for its manifest"
        if attempt.is_cut:
            missing = self._servers_missing(attempt)
            if missing and (late := self._late(attempt)):
                return f"{what} waits for a step of {self._named(late, now_s)}"
            missing = missing or self._workers_missing(attempt)
            return f"{what} waits for the files of {self._named(missing, now_s)}"
        if attempt.awaited:
            return f"{what} waits for the clocks of {self._named(attempt.awaited, now_s)}"
        unprepared = self._changes.unprepared_for(attempt.number)
        return f"{what} waits until {self._named(unprepared, now_s)} is prepared"

    def _late(self, attempt: Attempt) -> set[NodeId]:
        """Workers that had not come to a cut when last heard, and whose steps it waits for."""
        living = {node.node_id for node in self._state.workers_of(UNNAMED) if node.state.is_member}
        found: set[NodeId] = set()
        for table_id, table in attempt.cuts.items():
            step = table.cut_step or 0
            clocks = {each: at.get(table_id, step) for each, at in self.reached.items()}
            late = {each for each in living if clocks.get(each, step) < step}
            if len(late) > table.consistency.backup_workers:
                found |= late
        return found

    def _named(self, node_ids: set[NodeId], now_s: float) -> str:
        members = self._state.members
        return ", ".join(self._describe(members[each].node, now_s) for each in sorted(node_ids))


def _is_before(part: PartReport, cuts: Mapping[TableId, Table]) -> bool:
    """True if none of the worker's steps is after a cut."""
    return all(
        written.clock <= table.cut.after_clock
        for table_id, written in part.tables.items()
        if (table := cuts.get(table_id)) is not None and table.cut is not None
    )


def _answers(state: ClusterState, node: Node) -> bool:
    features = state.members[node.node_id].registration.features
    return node.state is NodeState.ALIVE and CHECKPOINTS_FEATURE in features


def _check_names(part: PartReport) -> None:
    """Refuse a name with which the scheduler would open a file outside its checkpoints."""
    if part.file and not is_file_name(part.file):
        raise InvalidConfig(f"file is {part.file[:200]!r}; expected the plain name of a file")
    for base in part.bases:
        if number_of(base) is None:
            raise InvalidConfig(
                f"bases has {base[:200]!r}; expected the name of a checkpoint's directory"
            )
