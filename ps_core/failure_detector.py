"""Failure detector: nodes that were not heard within the lease.

Rules:
    - Time is an argument, in seconds of one clock that never goes back and counts suspended time;
      only the observer's own clock is used, and only for arrivals that it saw itself.
    - A node is silent when nothing was heard from it for longer than the lease, until it is heard.
    - Time in which the observer itself was paused does not count, because heartbeats may lie unread
      in its own queue. After a gap between two looks that is longer than half a lease, every node
      gets a fresh lease.
    - The lease is fixed, unlike a phi-accrual detector's, because the protocol counts on it.

Invariants:
    FD-1  A node heard at t is not reported silent by a look at or before t + lease.
    FD-2  Each silence is reported once, and each end of one once.
    FD-3  Looks that come at least every half lease report a silence within a lease and one look.
"""

from __future__ import annotations

from collections.abc import Iterator

from ps_core.errors import check
from ps_core.keys import NodeId


class FailureDetector:
    """Tracks when each node was last heard."""

    __slots__ = ("_fresh_since_s", "_last_heard_s", "_last_look_s", "_lease_s", "_silent")

    def __init__(self, lease_s: float, now_s: float) -> None:
        """An empty detector; `lease_s` is above 0."""
        check(lease_s > 0, "FD-1", f"lease is {lease_s} s")
        self._lease_s = lease_s
        self._last_look_s = now_s
        self._fresh_since_s = now_s
        self._last_heard_s: dict[NodeId, float] = {}
        self._silent: set[NodeId] = set()

    def __contains__(self, node_id: NodeId) -> bool:
        return node_id in self._last_heard_s

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._last_heard_s)

    def heard(self, node_id: NodeId, now_s: float) -> bool:
        """Note a sign of life of a node, new or known; True if it ends a reported silence."""
        self._last_heard_s[node_id] = max(now_s, self._last_heard_s.get(node_id, now_s))
        if node_id not in self._silent:
            return False
        self._silent.discard(node_id)
        return True

    def expect(self, node_id: NodeId, now_s: float, *, is_silent: bool) -> None:
        """Watch a node that an earlier observer knew; it gets a lease from now on."""
        self._last_heard_s[node_id] = now_s
        if is_silent:
            self._silent.add(node_id)

    def forget(self, node_id: NodeId) -> None:
        """Stop watching a node; no effect on an unknown one."""
        self._last_heard_s.pop(node_id, None)
        self._silent.discard(node_id)

    def look(self, now_s: float) -> tuple[NodeId, ...]:
        """Nodes that fell silent since the last look, by id."""
        if now_s - self._last_look_s > self._lease_s / 2:
            self._fresh_since_s = now_s
        self._last_look_s = max(now_s, self._last_look_s)
        found = tuple(
            sorted(
                node_id
                for node_id, heard_s in self._last_heard_s.items()
                if node_id not in self._silent
                and now_s - max(heard_s, self._fresh_since_s) > self._lease_s
            )
        )
        self._silent.update(found)
        return found

    def renew(self, now_s: float) -> None:
        """Count silence from now on: the observer was cut off before, and heard nobody."""
        self._fresh_since_s = now_s

    def silence_s(self, node_id: NodeId, now_s: float) -> float:
        """Seconds of quiet that count, without the observer's pauses; 0 for an unwatched node."""
        heard_s = max(self._last_heard_s.get(node_id, now_s), self._fresh_since_s)
        return max(0.0, now_s - heard_s)

    def quiet_s(self, node_id: NodeId, now_s: float) -> float:
        """Seconds since the node was last heard; 0 for a node that is not watched."""
        return max(0.0, now_s - self._last_heard_s.get(node_id, now_s))
