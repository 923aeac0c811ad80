"""How long each worker's reads were parked for other workers, of tables whose bound moves.

Rules:
    - Time in which several reads of a worker are parked counts once.
    - Until its own step has taken effect a read waits for that: so it waits for others from when
      its worker was last heard in that range, if that is after it came.

What it deliberately does not do: look at tables whose bound is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ps_core import limits
from ps_core.cluster_view import ClusterView, Session
from ps_core.keys import NodeId, TableId
from ps_server.ranges.events import Place
from ps_server.ranges.read_gate import WaitCause
from ps_server.ranges.server_machine import ServerMachine

_FOR_STEPS = (WaitCause.OWN_STEP, WaitCause.WORKERS)


class ParkedRead(Protocol):
    """A read of a session, parked since `parked_s`."""

    place: Place
    session: Session
    parked_s: float


class ReadWaits:
    """The waits of the workers that read from one server.

    Args:
        machine: the server's.
    """

    def __init__(self, machine: ServerMachine) -> None:
        self._machine = machine
        self._tables: frozenset[TableId] = frozenset()
        self._waited_s: dict[tuple[TableId, NodeId], float] = {}
        self._until_s: dict[tuple[TableId, NodeId], float] = {}

    def observe(self, view: ClusterView) -> None:
        """Listen to the tables of the newest view; forget tables and workers that it has not."""
        self._tables = frozenset(t.table_id for t in view.tables if t.consistency.moves)
        if self._waited_s:
            members = {node.node_id for node in view.nodes if node.state.is_member}
            for place in list(self._waited_s):
                if place[0] not in self._tables or place[1] not in members:
                    del self._waited_s[place], self._until_s[place]

    def ended(self, read: ParkedRead, cause: WaitCause, now_s: float) -> float:
        """A read is parked no more, which at first it was for `cause`. For how long, in seconds."""
        place, session = read.place, read.session
        part = self._machine.parts.get((place.table_id, place.range_id))
        if part is not None and place.table_id in self._tables and cause in _FOR_STEPS:
            reader = part.state.workers.get(session.incarnation)
            heard_s = read.parked_s if reader is None else reader.last_heard_s
            since_s = max(read.parked_s, heard_s)
            self._add((place.table_id, NodeId(session.node_id)), since_s, now_s)
        return now_s - read.parked_s

    def _add(self, place: tuple[TableId, NodeId], since_s: float, now_s: float) -> None:
        from_s = max(since_s, self._until_s.get(place, since_s))
        self._waited_s[place] = self._waited_s.get(place, 0.0) + max(0.0, now_s - from_s)
        self._until_s[place] = now_s

    def totals_ms(self) -> Iterator[tuple[TableId, NodeId, int]]:
        """Table, worker, and how long in all."""
        for number, ((table_id, reader), waited_s) in enumerate(self._waited_s.items()):
            if number == limits.MAX_READ_WAIT_COUNT:
                return
            yield table_id, reader, round(waited_s * 1000)
