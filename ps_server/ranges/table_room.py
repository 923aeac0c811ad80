"""One table's gate memory on one server, and whom it is given to (SEMANTICS S3)."""

from __future__ import annotations

from ps_core import limits
from ps_core.cluster_view import Node
from ps_core.keys import RangeId
from ps_core.ledger import ReplyKind
from ps_core.tables import Table
from ps_server.ranges.events import Effect, ReplyTo, Sender
from ps_server.ranges.memory import GateRoom, Step
from ps_server.ranges.range_machine import RangeMachine


class TableRoom:
    """One table's gate memory on this server, shared by its ranges."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._parts: list[RangeMachine] = []
        self._senders: dict[int, Sender] = {}
        self._step_bytes = 0
        self._room = GateRoom(0, 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of what is staged, and of sums, in all ranges."""
        return self._room.held_bytes

    def add(self, part: RangeMachine) -> None:
        """A range joins; the room grows with the step."""
        self._parts.append(part)
        self._step_bytes += self._bytes_of(part)
        self._resize()

    def _bytes_of(self, part: RangeMachine) -> int:
        """Of one step on the part."""
        element_bytes = max(self._table.spec.accumulator_element_bytes, 4)
        # A converted payload is staged in a buffer of aligned length.
        unit = limits.BLOCK_ALIGNMENT_ELEMENTS
        blocks, last = part.state.blocks, self._table.block_count - 1
        count = len(blocks) * self._table.spec.block_elements
        if blocks and blocks[-1] == last:  # all others are whole
            missing = self._table.spec.block_elements - self._table.block_length(last)
            count -= missing // unit * unit
        return count * element_bytes

    def _resize(self) -> None:
        bound = self._table.spec.gate_bytes or (
            self._step_bytes + max(self._step_bytes, limits.DEFAULT_GATE_EXTRA_BYTES)
        )
        self._room.resize(bound, self._step_bytes)

    def remove(self, part: RangeMachine) -> None:
        """The range is not here any more, nor what it held."""
        part.state.unstage_all()
        self._parts.remove(part)
        self._step_bytes -= self._bytes_of(part)
        self._resize()

    def admit(self, step: Step, byte_count: int, effects: list[Effect]) -> bool:
        """See `range_machine.Room`."""
        admission = self._room.admit(step, byte_count)
        for given in admission.given_back:
            for part in self._parts:
                part.give_back(given, effects)
            if given.rank not in self._senders:  # gone: it waits for no turn
                self._room.forget(given.rank)
        return admission.admitted

    def release(self, step: Step, byte_count: int) -> None:
        """See `range_machine.Room`."""
        self._room.release(step, byte_count)

    def add_sum(self, byte_count: int) -> None:
        """See `range_state.Room`."""
        self._room.add_sum(byte_count)

    def end_sum(self, byte_count: int) -> None:
        """See `range_state.Room`."""
        self._room.end_sum(byte_count)

    def heard(self, sender: Sender) -> None:
        """Remember where to send credit."""
        self._senders[sender.rank] = sender

    def forget(self, node: Node) -> None:
        """The worker has ended: it waits for no turn. Another may have its rank already."""
        sender = self._senders.get(node.rank)
        if sender is None or sender.incarnation <= node.incarnation:
            self._senders.pop(node.rank, None)
            self._room.forget(node.rank)

    def credits(self, out: list[Effect]) -> None:
        """Tell those whose turn has come."""
        for step in self._room.credit():
            sender = self._senders.get(step.rank)
            if sender is not None:
                reply = ReplyTo(sender, ReplyKind.CREDIT, self._table.table_id, RangeId(0), 0)
                out.append(reply)
