"""Decides whether a server that was told to stop may leave now (SEMANTICS S8).

    asks --it alone has something------------------> refused: it waits for who shall have it
    asks --others have all, as far as is known-----> refused: it waits for a sign of life of each
    asks --and all of these were heard since-------> may leave

Rules:
    - A holder counts that lives and was heard after all was held elsewhere: a heartbeat from before
      may be the last one, and a lease passes before anybody knows.
    - The signs of life of all holders come within `_ROUND_BEATS` heartbeats, or are waited for
      anew: so what a departure counts on is never older.
    - Without replicas no other server can hold anything: nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet

from ps_core.errors import Recovering
from ps_core.keys import NodeId, RangeId
from scheduler.machine.configurations import Configurations
from scheduler.machine.state import ClusterSettings, ClusterState

_ROUND_BEATS = 2


class Departures:
    """Servers that were told to stop, and since when others have all that they hold.

    Args:
        settings: the cluster's.
        state: the cluster's, which is only read.
        configurations: who holds what.
        quiet_s: for how long a server has not been heard, at a time.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        state: ClusterState,
        configurations: Configurations,
        quiet_s: Callable[[NodeId, float], float],
    ) -> None:
        self._settings = settings
        self._state = state
        self._configurations = configurations
        self._quiet_s = quiet_s
        self._since_s: dict[NodeId, float] = {}

    def held_alone(self, node_id: NodeId, doubted: Collection[NodeId] = ()) -> tuple[RangeId, ...]:
        """The ranges that would be lost if the server left now, and those in doubt were dead; none
        once the work is done.
        """
        finished = self._state.finished
        return () if finished else self._configurations.held_alone(node_id, doubted)

    def check(self, node_id: NodeId, now_s: float) -> None:
        """Refuse a server that would leave with the only copy of a range.

        Raises:
            Recovering: naming who is waited for.
        """
        if self._settings.replica_count == 1:
            return
        living = self._configurations.living - {node_id}
        alone = self.held_alone(node_id)
        if alone:
            self._since_s.pop(node_id, None)
            raise self._refusal(node_id, f"has the only copy of {len(alone)} ranges: it waits for "
                                f"{self._joiners(alone, living)}")  # fmt: skip
        doubted = self._unheard(node_id, living, now_s)
        relied_on = self.held_alone(node_id, doubted)
        if relied_on:
            holders = {n for r in relied_on for n in self._state.ranges[r].in_sync} & set(doubted)
            words = " and ".join(f"server {holder}" for holder in sorted(holders))
            raise self._refusal(node_id, f"waits for a sign of life of {words}, beside which "
                                f"nobody has {len(relied_on)} of its ranges")  # fmt: skip
        self._since_s.pop(node_id, None)

    def ended(self, node_id: NodeId) -> None:
        """The server has left."""
        self._since_s.pop(node_id, None)

    def _unheard(self, node_id: NodeId, living: AbstractSet[NodeId], now_s: float) -> list[NodeId]:
        """Who was not heard since others have all that the server holds."""
        since_s = self._since_s.get(node_id)
        if since_s is None or now_s - since_s > _ROUND_BEATS * self._settings.heartbeat_interval_s:
            since_s = self._since_s[node_id] = now_s
        return [n for n in living if self._quiet_s(n, now_s) >= now_s - since_s]

    def _joiners(self, alone: tuple[RangeId, ...], living: AbstractSet[NodeId]) -> str:
        joining = {n for range_id in alone for n in self._state.ranges[range_id].joining}
        awaited = [f"server {n}, which is being brought up to date" for n in
                   sorted(joining & living)]  # fmt: skip
        return " and ".join(awaited) or (
            f"another server to hold it ({len(living) + 1} of {self._settings.server_count} here)"
        )

    def _refusal(self, node_id: NodeId, words: str) -> Recovering:
        retry_s = self._settings.heartbeat_interval_s / 4
        return Recovering(f"server {node_id} {words}", retry_after_ms=max(1, round(retry_s * 1000)))
