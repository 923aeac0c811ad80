"""Who has not been heard within the lease: a clock-free detector.

Rules:
    - Time is an argument, in seconds of one clock that never goes back and counts suspended time;
      only the observer's own clock is used, and only for arrivals that it saw itself.
    - A node is silent when nothing was heard from it for longer than the lease; hearing it again
      ends the silence at once.
    - An observer that was itself paused judges nobody by the time that it slept: heartbeats may lie
      unread in its own queue. After a gap between two looks that is longer than half a lease, every
      node gets a fresh lease.

Invariants:
    FD-1  A node heard at t is not reported silent by a look at or before t + lease.
    FD-2  Each silence is reported once, and each end of one once.
    FD-3  Looks that come at least every half lease report a silence within a lease and one look.

What it deliberately does not do: decide what a silence means, guess why (a phi-accrual detector
adapts to jitter; a fixed lease is what the rest of the protocol is written against), or know roles.
"""

from __future__ import annotations

from collections.abc import Iterator

from ps_core.errors import check
from ps_core.keys import NodeId


class FailureDetector:
    """Tracks when each node was last heard."""

    __slots__ = ("_fresh_since_s", "_last_heard_s", "_last_look_s", "_lease_s", "_silent")

    def __init__(self, lease_s: float, now_s: float) -> None:
        """An empty detector.

        Args:
            lease_s: how long a node may be quiet, in seconds; above 0.
            now_s: the present, in seconds of the caller's clock.
        """
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
        """Note a sign of life; a node not known yet is watched from now on.

        Returns:
            Whether this ended a silence that `look` had reported.
        """
        self._last_heard_s[node_id] = max(now_s, self._last_heard_s.get(node_id, now_s))
        if node_id not in self._silent:
            return False
        self._silent.discard(node_id)
        return True

    def expect(self, node_id: NodeId, now_s: float, *, is_silent: bool) -> None:
        """Watch a node that an observer before this one knew, as `is_silent` says. It was not heard
        by this one, and has a lease from now on.
        """
        self._last_heard_s[node_id] = now_s
        if is_silent:
            self._silent.add(node_id)

    def forget(self, node_id: NodeId) -> None:
        """Stop watching a node; one that is not watched is no error."""
        self._last_heard_s.pop(node_id, None)
        self._silent.discard(node_id)

    def look(self, now_s: float) -> tuple[NodeId, ...]:
        """The nodes that fell silent since the last look, by id."""
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

    def is_silent(self, node_id: NodeId) -> bool:
        """Whether a look has reported the node silent and it was not heard since."""
        return node_id in self._silent

    def silence_s(self, node_id: NodeId, now_s: float) -> float:
        """Seconds of quiet that count against the node: none of those in which the observer itself
        was paused; 0 for one that is not watched.
        """
        heard_s = max(self._last_heard_s.get(node_id, now_s), self._fresh_since_s)
        return max(0.0, now_s - heard_s)

    def quiet_s(self, node_id: NodeId, now_s: float) -> float:
        """Seconds since the node was last heard; 0 for one that is not watched."""
        return max(0.0, now_s - self._last_heard_s.get(node_id, now_s))
