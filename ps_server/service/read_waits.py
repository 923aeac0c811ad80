"""The time for which pulls of each worker waited in a server's ranges.

Rules:
    - Waits for steps are counted by table and worker, where the staleness bound moves. Time in
      which several pulls of a worker from a table are parked counts once.
    - A pull first waits for its worker's own step. So it waits for others only from when the worker
      was last heard in the range, if that is after the pull came.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.keys import NodeId, TableId
from ps_server.ranges.read_gate import WaitCause
from ps_server.ranges.server_machine import ServerMachine
from ps_server.service.range_read import RangeRead

_FOR_STEPS = (WaitCause.OWN_STEP, WaitCause.WORKERS)


class ReadWaits:
    """The time for which each worker's pulls were parked for others, where the bound moves."""

    def __init__(self, machine: ServerMachine) -> None:
        self._machine = machine
        self._tables: frozenset[TableId] = frozenset()
        self._waits_s: dict[tuple[TableId, NodeId], tuple[float, float]] = {}  # in all, until

    def observe(self, view: ClusterView) -> None:
        """Count for the view's tables; forget others, and workers that it does not have."""
        self._tables = frozenset(t.table_id for t in view.tables if t.consistency.moves)
        if self._waits_s:
            members = {node.node_id for node in view.nodes if node.state.is_member}
            for table_id, reader in list(self._waits_s):
                if table_id not in self._tables or reader not in members:
                    del self._waits_s[table_id, reader]

    def ended(self, read: RangeRead, cause: WaitCause, now_s: float) -> float:
        """Count a pull that is no longer parked, which first was for `cause`; in seconds."""
        place, session = read.place, read.terms.session
        part = self._machine.shards.get((place.table_id, place.range_id))
        if part is not None and place.table_id in self._tables and cause in _FOR_STEPS:
            worker = part.state.workers.get(session.incarnation)
            heard_s = read.parked_s if worker is None else worker.last_heard_s
            reader = place.table_id, NodeId(session.node_id)
            waited_s, until_s = self._waits_s.get(reader, (0.0, heard_s))
            more_s = max(0.0, now_s - max(read.parked_s, heard_s, until_s))
            self._waits_s[reader] = waited_s + more_s, now_s
        return now_s - read.parked_s

    def totals_ms(self) -> Iterator[tuple[TableId, NodeId, int]]:
        """(table, worker, milliseconds in all)."""
        waits = itertools.islice(self._waits_s.items(), limits.MAX_READ_WAIT_COUNT)
        for (table_id, reader), (waited_s, _) in waits:
            yield table_id, reader, round(waited_s * 1000)
