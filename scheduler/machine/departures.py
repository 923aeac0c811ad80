"""Decides whether a server that is stopping may leave now (SEMANTICS S8).

    asks --it has the only copy of a range-----> refused: it waits for the servers that catch up
    asks --others have all, by what is known---> refused: a view asks each for a sign of life
    asks --and all of these act on that view---> may leave
    asks --without replicas--------------------> a checkpoint is made, and it may leave
    ... --and has values of runs with a name---> refused: no checkpoint has them
    asks --its update log has the only copy----> a checkpoint is made if one can be; it may leave

Rules:
    - A holder counts if it acts on a view that was published after others held everything. The
      heartbeat of an older view, however late, may be the last one of a dead server, which the
      scheduler notices only a lease later.
    - The signs of life of all holders come within `_ROUND_BEATS` heartbeats, or another view asks
      for them again.
    - Without replicas no other server can take a range. A checkpoint has the values of the run
      without a name; where none can be made, a server leaves at once. Those of the other runs stay
      on it until these are removed, or its grace is over.
    - Values in the server's update log are not lost, but another release or processor cannot go on
      with them, and the disk may go. So a checkpoint is made first where all values are served; a
      server waits for no other server's return, and no failure of a checkpoint keeps it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ps_core.errors import Recovering, listed
from ps_core.keys import NodeId, RangeId
from scheduler.machine.configurations import Configurations
from scheduler.machine.state import ClusterSettings, ClusterState, DepartureAsked, Transition

_ROUND_BEATS = 2


class _Round(NamedTuple):
    """The view that asks for signs of life, and the moment of its publication."""

    view_number: int
    since_s: float


class Departures:
    """Servers that are stopping, and the holders that have shown a sign of life."""

    def __init__(
        self, settings: ClusterSettings, state: ClusterState, configurations: Configurations
    ) -> None:
        self._settings = settings
        self._state = state
        self._configurations = configurations
        self._rounds: dict[NodeId, _Round] = {}
        self.stopping: set[NodeId] = set()  # that were told to stop, and asked to leave
        self._acts_on: dict[NodeId, int] = {}

    def held_alone(self, node_id: NodeId, doubted: Collection[NodeId] = ()) -> tuple[RangeId, ...]:
        """Ranges that would be lost if the server left now and the doubted ones were dead."""
        finished = self._state.finished
        return () if finished else self._configurations.held_alone(node_id, doubted)

    def heard(self, node_id: NodeId, view_number: int) -> None:
        self._acts_on[node_id] = max(view_number, self._acts_on.get(node_id, 0))

    def refusal(self, node_id: NodeId, now_s: float) -> tuple[Recovering | None, list[Transition]]:
        """The refusal of a leave, or None; and the transition that asks for signs of life."""
        if self._settings.replica_count == 1:
            return None, []
        self.stopping.add(node_id)
        living = self._configurations.living - {node_id}
        alone = self.held_alone(node_id)
        if alone:
            self._rounds.pop(node_id, None)
            return self._refusal(node_id, f"has the only copy of {len(alone)} ranges: it waits for "
                                 f"{self._joiners(alone, living)}"), []  # fmt: skip
        asked = self._rounds.get(node_id)
        limit_s = _ROUND_BEATS * self._settings.heartbeat_interval_s
        if asked is None or now_s - asked.since_s > limit_s:
            asked = _Round(self._state.view_number + 1, now_s)
        doubted = [n for n in living if self._acts_on.get(n, 0) < asked.view_number]
        relied_on = self.held_alone(node_id, doubted)
        if not relied_on:
            self._rounds.pop(node_id, None)
            return None, []
        transitions: list[Transition] = []
        if self._rounds.get(node_id) != asked:
            self._rounds[node_id] = asked
            transitions.append(DepartureAsked(self._state.members[node_id].node))
        holders = {n for r in relied_on for n in self._state.ranges[r].in_sync} & set(doubted)
        words = " and ".join(f"server {holder}" for holder in sorted(holders))
        words += f", beside which nobody has {len(relied_on)} of its ranges"
        return self._refusal(node_id, f"waits for a sign of life of {words}"), transitions

    def ended(self, node_id: NodeId) -> None:
        self.stopping.discard(node_id)
        self._rounds.pop(node_id, None)
        self._acts_on.pop(node_id, None)

    def runs_held_alone(self, node_id: NodeId) -> list[str]:
        """Runs whose values would be lost if the server left now, the one without a name first."""
        return self._runs_of(self.held_alone(node_id))

    def runs_in_log_alone(self, node_id: NodeId) -> list[str]:
        """Runs whose values only the server's update log had if it left now."""
        if self._state.finished:
            return []
        return self._runs_of(self._configurations.in_log_alone(node_id))

    def _runs_of(self, range_ids: Collection[RangeId]) -> list[str]:
        alone = set(range_ids)
        if not alone:
            return []
        count = len(self._state.ranges)
        tables = self._state.tables.values()
        return sorted({t.run for t in tables if not alone.isdisjoint(t.blocks_by_range(count))})

    def only_in_servers(self, node_id: NodeId, runs: Sequence[str]) -> Recovering:
        """The refusal of a leave with the only copy of values of these runs, which have names."""
        names = listed([f"'{name}'" for name in runs], 3)
        return self._refusal(
            node_id,
            f"has the only copy of values of run {names}, which no checkpoint covers: save them "
            f"(ps.pull_model, from a reader of the run) and remove the run (pushpull runs remove "
            f"{runs[0]}) before its grace is over, or keep replicas",
        )

    def _joiners(self, alone: tuple[RangeId, ...], living: AbstractSet[NodeId]) -> str:
        joining = {n for range_id in alone for n in self._state.ranges[range_id].catching_up}
        awaited = [f"server {n}, which is being brought up to date" for n in
                   sorted(joining & living)]  # fmt: skip
        return " and ".join(awaited) or (
            f"another server to hold it ({len(living) + 1} of {self._settings.server_count} here)"
        )

    def _refusal(self, node_id: NodeId, words: str) -> Recovering:
        retry_s = self._settings.heartbeat_interval_s / 4
        return Recovering(f"server {node_id} {words}", retry_after_ms=max(1, round(retry_s * 1000)))
