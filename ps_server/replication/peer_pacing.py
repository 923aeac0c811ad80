"""When records, beats and requests go to other servers, and to which: the streams only carry them.

    record decided --sent--> on its way --acknowledged--> gone
                               |  stream broke, refused, or nothing got on for half a lease
                               +--sent again

Rules:
    - A stream that opens begins with all that its server is not known to have: what an earlier one
      was given may have come or not, or come yet.
    - Range by range: what a server says of others tells nothing. One that gets on is waited for;
      nothing is sent again by a stream that has not taken what it was given.
    - Ten beats a lease; what waits for servers that hold nothing of this one is dropped then.

What it deliberately does not do: know streams (`PeerQueues` say what they took), or values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ps_core.cluster_view import BackupRequest
from ps_core.keys import NodeId, RangeId
from ps_server.replication.messages import Beat, LogRecord
from ps_server.replication.peer_queues import PeerQueues
from ps_server.replication.range_roles import Replication

BEATS_A_LEASE = 10
_RESEND_LEASES = 0.5
"""A backup that has got on with nothing of a range for so long is sent all of it again that it is
not known to have: it may have got it before it knew that it was to take it."""


class Beats(NamedTuple):
    """What is due ten times a lease: beats, by receiver, and what the scheduler is to be asked for.
    The streams to the `useless` are to be ended, with what waits for them.
    """

    beats: Mapping[NodeId, Beat]
    useless: Sequence[NodeId]
    backup_requests: Sequence[BackupRequest]


class _Lack(NamedTuple):
    """The first record of a range that a server is not known to have, and since when that is so."""

    number: int
    since_s: float


class PeerPacing:
    """The pacing of one server.

    Args:
        replication: of that server.
        lease_s: of the cluster.
        queues: what waits for the streams to others.
    """

    def __init__(self, replication: Replication, lease_s: float, queues: PeerQueues[Any]) -> None:
        self._replication = replication
        self._lease_s = lease_s
        self._queues = queues
        self._beat_s = 0.0
        self._lacks: dict[tuple[NodeId, RangeId], _Lack] = {}

    def renewed(self) -> list[tuple[NodeId, LogRecord]]:
        """A view was observed: whoever saw a range's new epoch before this server has refused what
        still named the old one.
        """
        ranges, replication = self._replication.renewed, self._replication
        resends = replication.resends(replication.all_holders)
        return [(peer, record) for peer, record in resends if record.range_id in ranges]

    def opened(self, peer: NodeId) -> list[tuple[NodeId, LogRecord]]:
        """A stream to the server is there; nothing of what was sent before may have come."""
        self._replication.lost(peer)
        self._lacks = {key: lack for key, lack in self._lacks.items() if key[0] != peer}
        return list(self._replication.resends({peer}))

    def late(self, now_s: float) -> list[tuple[NodeId, LogRecord]]:
        """What is to be sent again. To be called ten times a lease at least."""
        self._queues.look()
        self._replication.sending(self._queues.busy, now_s)
        lacking: dict[tuple[NodeId, RangeId], list[LogRecord]] = {}
        for peer, record in self._replication.resends(self._replication.all_holders):
            lacking.setdefault((peer, record.range_id), []).append(record)
        idle = {peer for peer, _ in lacking if self._queues.is_idle(peer)}
        lacks: dict[tuple[NodeId, RangeId], _Lack] = {}
        found: list[tuple[NodeId, LogRecord]] = []
        for key, records in lacking.items():
            before, number = self._lacks.get(key), records[0].number
            since_s = now_s if before is None or before.number != number else before.since_s
            is_late = now_s > since_s + _RESEND_LEASES * self._lease_s
            if is_late and key[0] in idle:
                since_s = now_s
                found += [(key[0], record) for record in records]
            lacks[key] = _Lack(number, since_s)
        self._lacks = lacks
        return found

    def hurry(self) -> None:
        """Beats are due now: the scheduler should not wait to hear who backs up no more."""
        self._beat_s = -math.inf

    def beats(self, now_s: float) -> Beats | None:
        """What is due; None: not yet."""
        if now_s < self._beat_s + self._lease_s / BEATS_A_LEASE:
            return None
        self._beat_s = now_s
        replication = self._replication
        useless = self._queues.useless(replication.all_holders)
        return Beats(replication.beats(now_s), useless, replication.backup_requests(now_s))
