"""Gate memory of one table on one server: who may stage a step, and who must give way (SEMANTICS
S3).

Rules:
    - A step is staged until it is added to a sum; then the sum counts, until the update is applied.
      What takes part in a sum first becomes the sum, so together they never take more by it.
    - A step is (clock, rank). StagingMemory goes to the lowest step among those with something sent
      here.
    - Where a lower step finds no room, the highest steps are given back, whole, to be sent again.
    - So two servers never favour two different workers for good, and no order of arrival deadlocks.

Invariants:
    ROOM-1  Staged bytes and sums never exceed the capacity.
    ROOM-2  The capacity holds a sum and any one step whole, so the lowest step always finds room.
    ROOM-3  A step never releases more than it stages.
    ROOM-4  Sums are never larger than a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_core import limits
from ps_core.cluster_view import Node
from ps_core.errors import InvariantViolation
from ps_core.keys import RangeId
from ps_core.ledger import ReplyKind
from ps_core.tables import Table
from ps_server.ranges.events import Effect, ReplyTo, Sender, Step
from ps_server.ranges.range_machine import RangeMachine


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether there is room, and which steps were given back to make it."""

    admitted: bool
    given_back: tuple[Step, ...] = ()


_ADMITTED = Admission(True)


class StagingQuota:
    """StagingMemory for staged steps, whatever ranges they are in."""

    def __init__(self, capacity_bytes: int, step_bytes: int) -> None:
        """Args:
        capacity_bytes: room for staged payloads and sums; two steps if it is less.
        step_bytes: the most that one step stages on this server.
        """
        self._capacity_bytes = max(capacity_bytes, 2 * step_bytes)
        self._step_bytes = step_bytes
        self._summed_bytes = 0
        self._staged: dict[Step, int] = {}
        self._staged_bytes = 0
        self._waiting: dict[Step, int] = {}

    def resize(self, capacity_bytes: int, step_bytes: int) -> None:
        """The table grew on this server; the room never shrinks."""
        self._step_bytes = max(self._step_bytes, step_bytes)
        self._capacity_bytes = max(self._capacity_bytes, capacity_bytes, 2 * self._step_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of what is staged at present, and of sums."""
        return self._staged_bytes + self._summed_bytes

    def admit(self, step: Step, byte_count: int) -> Admission:
        """Ask for room for one more payload of `step`."""
        free = self._capacity_bytes - self.held_bytes
        if free < byte_count:
            return self._make_space(step, byte_count, free)
        self._stage(step, byte_count)
        return _ADMITTED

    def _make_space(self, step: Step, byte_count: int, free: int) -> Admission:
        given_back: list[Step] = []
        for other in sorted((s for s in self._staged if s > step), reverse=True):
            if free >= byte_count:
                break
            free += self._staged[other]
            given_back.append(other)
        if free < byte_count:
            asked = self._waiting.get(step, 0) + byte_count
            # A retry without credit asks for the same bytes again: never count more than a step.
            self._waiting[step] = min(asked, self._step_bytes - self._staged.get(step, 0))
            return Admission(False)
        for other in given_back:
            size = self._staged.pop(other)
            self._staged_bytes -= size
            self._waiting[other] = self._waiting.get(other, 0) + size
        self._stage(step, byte_count)
        return Admission(True, tuple(given_back))

    def _stage(self, step: Step, byte_count: int) -> None:
        self._staged[step] = self._staged.get(step, 0) + byte_count
        self._staged_bytes += byte_count
        self._waiting.pop(step, None)
        if self.held_bytes > self._capacity_bytes:
            raise InvariantViolation("ROOM-1", "staged more than fits")

    def release(self, step: Step, byte_count: int) -> None:
        """A payload of `step` is no longer staged."""
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

    def add_sum(self, byte_count: int) -> None:
        """Payloads that were released have become a sum, or more of one."""
        self._summed_bytes += byte_count
        if self._summed_bytes > self._step_bytes:
            raise InvariantViolation(
                "ROOM-4", f"sums have {self._summed_bytes} bytes; a step {self._step_bytes}"
            )

    def end_sum(self, byte_count: int) -> None:
        """A sum of so many bytes is there no more."""
        self._summed_bytes -= byte_count

    def forget(self, rank: int) -> None:
        """A worker left: it waits for nothing any more."""
        for step in [step for step in self._waiting if step.rank == rank]:
            del self._waiting[step]

    def credit(self) -> tuple[Step, ...]:
        """The waiting steps whose turn has come, in order; each is named once."""
        if not self._waiting:
            return ()  # as nearly always
        turns: list[Step] = []
        promised = 0
        for step in sorted(self._waiting):
            lower = sum(size for other, size in self._staged.items() if other <= step)
            if lower + promised + self._waiting[step] > self._capacity_bytes - self._summed_bytes:
                break
            promised += self._waiting.pop(step)
            turns.append(step)
        return tuple(turns)


class TableStaging:
    """One table's gate memory on this server, shared by its ranges."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._shards: list[RangeMachine] = []
        self._senders: dict[int, Sender] = {}
        self._step_bytes = 0
        self._quota = StagingQuota(0, 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of what is staged, and of sums, in all ranges."""
        return self._quota.held_bytes

    def add(self, shard: RangeMachine) -> None:
        """A range joins; the room grows with the step."""
        self._shards.append(shard)
        self._step_bytes += self._bytes_of(shard)
        self._resize()

    def _bytes_of(self, shard: RangeMachine) -> int:
        """Of one step on the shard."""
        element_bytes = max(self._table.spec.accumulator_element_bytes, 4)
        # A converted payload is staged in a buffer of aligned length.
        unit = limits.BLOCK_ALIGNMENT_ELEMENTS
        blocks, last = shard.state.blocks, self._table.block_count - 1
        count = len(blocks) * self._table.spec.block_elements
        if blocks and blocks[-1] == last:  # all others are whole
            missing = self._table.spec.block_elements - self._table.block_length(last)
            count -= missing // unit * unit
        return count * element_bytes

    def _resize(self) -> None:
        bound = self._table.spec.gate_bytes or (
            self._step_bytes + max(self._step_bytes, limits.DEFAULT_GATE_EXTRA_BYTES)
        )
        self._quota.resize(bound, self._step_bytes)

    def remove(self, shard: RangeMachine) -> None:
        """The range is not here any more, nor what it held."""
        shard.state.unstage_all()
        self._shards.remove(shard)
        self._step_bytes -= self._bytes_of(shard)
        self._resize()

    def admit(self, step: Step, byte_count: int, effects: list[Effect]) -> bool:
        """See `range_state.StagingMemory`."""
        admission = self._quota.admit(step, byte_count)
        for given in admission.given_back:
            for shard in self._shards:
                shard.give_back(given, effects)
            if given.rank not in self._senders:  # gone: it waits for no turn
                self._quota.forget(given.rank)
        return admission.admitted

    def release(self, step: Step, byte_count: int) -> None:
        """See `range_state.StagingMemory`."""
        self._quota.release(step, byte_count)

    def add_sum(self, byte_count: int) -> None:
        """See `range_state.StagingMemory`."""
        self._quota.add_sum(byte_count)

    def end_sum(self, byte_count: int) -> None:
        """See `range_state.StagingMemory`."""
        self._quota.end_sum(byte_count)

    def heard(self, sender: Sender) -> None:
        """Remember where to send credit."""
        self._senders[sender.rank] = sender

    def forget(self, node: Node) -> None:
        """The worker has ended: it waits for no turn. Another may have its rank already."""
        sender = self._senders.get(node.rank)
        if sender is None or sender.incarnation <= node.incarnation:
            self._senders.pop(node.rank, None)
            self._quota.forget(node.rank)

    def credits(self, out: list[Effect]) -> None:
        """Tell those whose turn has come."""
        for step in self._quota.credit():
            sender = self._senders.get(step.rank)
            if sender is not None:
                reply = ReplyTo(sender, ReplyKind.CREDIT, self._table.table_id, RangeId(0), 0)
                out.append(reply)
