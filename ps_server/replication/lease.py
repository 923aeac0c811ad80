"""The lease of a range: backups grant to its primary that it alone serves (SEMANTICS S8).

    primary --beat, sent at t--> backup
       ^                           |
       +-------- granted ----------+     the primary may serve before t + lease_s,
                                         this backup, promoted, not before its answer + lease_s

Rules:
    - A primary may serve while each of its backups has granted a beat that was sent less than
      `lease_s` ago. Without backups nobody else can be made primary, and it needs no lease.
    - A backup that was promoted grants no more, and it serves when its last grant has run out:
      counted from its answer by its own clock, and by any that is slower by `MAX_DRIFT`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ps_core.keys import NodeId

MAX_DRIFT = 0.05
"""Clocks of two servers may run apart by this share of the time that passes."""


class HeldLease:
    """A primary's end: the times at which beats that were granted were sent, by backup."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._sent_s: dict[NodeId, float] = {}

    def granted(self, backup: NodeId, sent_s: float) -> None:
        """The backup answered the beat that was sent at `sent_s`."""
        self._sent_s[backup] = max(sent_s, self._sent_s.get(backup, -math.inf))

    def holds(self, backups: Iterable[NodeId], now_s: float) -> bool:
        """True while the grants of all these backups last."""
        since_s = min((self._sent_s.get(b, -math.inf) for b in backups), default=math.inf)
        return now_s < since_s + self._lease_s

    def exclude(self, backup: NodeId) -> None:
        """Forget the grants of a backup that counts no more."""
        self._sent_s.pop(backup, None)

    def clear(self) -> None:
        """Forget all grants: another server was made primary since."""
        self._sent_s.clear()


class GrantedLease:
    """A backup's end: the time at which it last granted a beat."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._answered_s = -math.inf

    def grant(self, now_s: float) -> None:
        """Answer a beat now."""
        self._answered_s = max(self._answered_s, now_s)

    def take_over(self, before: GrantedLease) -> None:
        """Count the grants of `before`, which this server gave as well."""
        self._answered_s = before._answered_s

    @property
    def ends_s(self) -> float:
        """Time from which nobody can hold a lease that was granted here."""
        return self._answered_s + self._lease_s * (1.0 + MAX_DRIFT)
