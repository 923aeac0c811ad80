"""Staging memory of a table on a server: which step may stage, which must give way (SEMANTICS S3).

Rules:
    - A step is staged until it is added to a sum; then the sum counts, until its update is applied.
      The payloads of a step become the sum first, so together they never take more by it.
    - A step is (clock, rank). Space goes to the lowest step among those with something sent here.
    - When a lower step finds no space, the highest steps are given back whole, to be sent again.
    - A step that was refused anything, or given back, waits until it has credit or is staged whole.
    - So two servers never favour two different workers for good, and no arrival order deadlocks.
    - A sum of rows has the rows of each worker. What it takes beyond a step is told, and bounded by
      the workers alone: an update needs all of it.

Invariants:
    ROOM-1  Staged bytes and sums, of rows a step of these at most, never exceed the capacity.
    ROOM-2  The capacity holds a sum and any one step whole, so the lowest step always fits.
    ROOM-3  A step never releases more than it stages.
    ROOM-4  Sums are never larger than a step, but for those of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps_core import limits
from ps_core.cluster_view import Node
from ps_core.errors import InvariantViolation
from ps_core.keys import RangeId
from ps_core.ledger import ReplyKind
from ps_core.tables.table import Table
from ps_server.ranges.events import Effect, ReplyTo, Sender, StepId
from ps_server.ranges.range_machine import RangeMachine


class StagingQuota:
    """A quota of staging memory, shared by the steps of all ranges of a table."""

    def __init__(self, capacity_bytes: int, step_bytes: int) -> None:
        """`step_bytes`: the most that a step stages here; the capacity is at least two of them."""
        self._capacity_bytes = max(capacity_bytes, 2 * step_bytes)
        self._step_bytes = step_bytes
        self._summed_bytes = 0
        self._staged: dict[StepId, int] = {}
        self._staged_bytes = 0
        self._waiting: dict[StepId, int] = {}

    def resize(self, capacity_bytes: int, step_bytes: int) -> None:
        """Follow a table that grew on this server; the quota never shrinks."""
        self._step_bytes = max(self._step_bytes, step_bytes)
        self._capacity_bytes = max(self._capacity_bytes, capacity_bytes, 2 * self._step_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes that staged payloads and sums take."""
        return self._staged_bytes + self._summed_bytes

    @property
    def _left_by_sums(self) -> int:
        """Bytes of the capacity that steps may stage."""
        return self._capacity_bytes - min(self._summed_bytes, self._step_bytes)

    def admit(self, step: StepId, byte_count: int) -> Sequence[StepId] | None:
        """Stage one more payload of `step`; returns the steps given back for it; None: no space."""
        left_by_sums = self._left_by_sums
        free = left_by_sums - self._staged_bytes
        given_back = () if free >= byte_count else self._make_space(step, byte_count, free)
        if given_back is None:
            asked = self._waiting.get(step, 0) + byte_count
            # A retry without credit asks for the same bytes again: never count more than a step.
            self._waiting[step] = min(asked, self._step_bytes - self._staged.get(step, 0))
            return None
        staged = self._staged[step] = self._staged.get(step, 0) + byte_count
        self._staged_bytes += byte_count
        # This may be another payload than the refused ones, which still wait for their turn.
        waiting = min(self._waiting.pop(step, 0), self._step_bytes - staged)
        if waiting > 0:
            self._waiting[step] = waiting
        if self._staged_bytes > left_by_sums:
            raise InvariantViolation("ROOM-1", "staged more than fits")
        return given_back

    def _make_space(self, step: StepId, byte_count: int, free: int) -> Sequence[StepId] | None:
        given_back: list[StepId] = []
        for other in sorted((s for s in self._staged if s > step), reverse=True):
            if free >= byte_count:
                break
            free += self._staged[other]
            given_back.append(other)
        if free < byte_count:
            return None
        for other in given_back:
            size = self._staged.pop(other)
            self._staged_bytes -= size
            self._waiting[other] = self._waiting.get(other, 0) + size
        return given_back

    def release(self, step: StepId, byte_count: int) -> None:
        left = self._staged.get(step, 0) - byte_count
        if left < 0:
            raise InvariantViolation(
                "ROOM-3", f"step {step} releases {byte_count} bytes that it does not stage"
            )
        self._staged_bytes -= byte_count
        if left:
            self._staged[step] = left
        else:
            self._staged.pop(step, None)

    def add_sum(self, byte_count: int, *, are_rows: bool = False) -> None:
        self._summed_bytes += byte_count
        if self._summed_bytes > self._step_bytes and not are_rows:
            raise InvariantViolation(
                "ROOM-4", f"sums have {self._summed_bytes} bytes; a step {self._step_bytes}"
            )

    def end_sum(self, byte_count: int) -> None:
        self._summed_bytes -= byte_count

    def forget(self, rank: int) -> None:
        """Drop the waiting steps of a worker that left."""
        for step in [step for step in self._waiting if step.rank == rank]:
            del self._waiting[step]

    def credit(self) -> tuple[StepId, ...]:
        """The waiting steps that may be sent again, in order; each is named once."""
        if not self._waiting:
            return ()  # as nearly always
        turns: list[StepId] = []
        credited = 0
        for step in sorted(self._waiting):
            lower = sum(size for other, size in self._staged.items() if other <= step)
            if lower + credited + self._waiting[step] > self._left_by_sums:
                break
            credited += self._waiting.pop(step)
            turns.append(step)
        return tuple(turns)


class TableStaging:
    """One table's staging memory on this server, shared by its ranges."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._shards: list[RangeMachine] = []
        self._senders: dict[int, Sender] = {}
        self._step_bytes = 0
        self._quota = StagingQuota(0, 0)
        self.release = self._quota.release
        self.end_sum = self._quota.end_sum

    @property
    def held_bytes(self) -> int:
        return self._quota.held_bytes

    def add(self, shard: RangeMachine) -> None:
        """Add a range; the quota grows with the step."""
        self._shards.append(shard)
        self._add_bytes(self._bytes_of(shard))

    def _bytes_of(self, shard: RangeMachine) -> int:
        """Bytes of one step on the shard."""
        if self._table.spec.rows is not None:
            return len(shard.state.blocks) * limits.MAX_MESSAGE_BYTES
        element_bytes = max(self._table.spec.accumulator_element_bytes, 4)
        # A converted payload is staged in a buffer of aligned length.
        unit = limits.BLOCK_ALIGNMENT_ELEMENTS
        blocks, last = shard.state.blocks, self._table.block_count - 1
        count = len(blocks) * self._table.spec.block_elements
        if blocks and blocks[-1] == last:  # all others are whole
            missing = self._table.spec.block_elements - self._table.block_length(last)
            count -= missing // unit * unit
        return count * element_bytes

    def _add_bytes(self, byte_count: int) -> None:
        step_bytes = self._step_bytes = self._step_bytes + byte_count
        default = step_bytes + max(step_bytes, limits.DEFAULT_GATE_EXTRA_BYTES)
        self._quota.resize(self._table.spec.gate_bytes or default, step_bytes)

    def remove(self, shard: RangeMachine) -> None:
        """Remove a range, and the bytes that it held."""
        shard.state.unstage_all()
        self._shards.remove(shard)
        self._add_bytes(-self._bytes_of(shard))

    def admit(self, step: StepId, byte_count: int, effects: list[Effect]) -> bool:
        given_back = self._quota.admit(step, byte_count)
        for given in given_back or ():
            for shard in self._shards:
                shard.give_back(given, effects)
            if given.rank not in self._senders:  # gone
                self._quota.forget(given.rank)
        return given_back is not None

    def add_sum(self, byte_count: int) -> None:
        self._quota.add_sum(byte_count, are_rows=self._table.spec.rows is not None)

    def heard(self, sender: Sender) -> None:
        """Remember the worker's newest stream, where credit goes."""
        self._senders[sender.rank] = sender

    def forget(self, node: Node) -> None:
        """Drop the waiting steps of a worker that ended; another may have its rank already."""
        sender = self._senders.get(node.rank)
        if sender is None or sender.incarnation <= node.incarnation:
            self._senders.pop(node.rank, None)
            self._quota.forget(node.rank)

    def credits(self, out: list[Effect]) -> None:
        """Send credit to the workers whose steps may be sent again."""
        table_id = self._table.table_id
        for step in self._quota.credit():
            sender = self._senders.get(step.rank)
            if sender is not None:
                out.append(ReplyTo(sender, ReplyKind.CREDIT, table_id, RangeId(0), 0))
