"""Decides when records, beats and requests go to which servers; the streams carry them.

    record decided --sent--> on its way --acknowledged--> gone
                               |  stream broke, refused, or no progress for half a lease
                               +--sent again

A stream begins with every record that its server has not acknowledged: those that an earlier stream
took may have arrived, or not, or arrive yet. Nothing is sent again while a range makes progress, or
while the stream has not taken what it was given.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from ps_core.cluster_view import BackupRequest
from ps_core.keys import NodeId, RangeId
from ps_server.replication.messages import Beat, LogRecord
from ps_server.replication.peer_queues import PeerQueues
from ps_server.replication.range_roles import Replication

BEATS_A_LEASE = 10
_RESEND_LEASES = 0.5
"""Without progress in a range for this share of a lease, its unacknowledged records are sent again:
the backup may have got them before it knew that it was to take them."""


class Beats(NamedTuple):
    """Beats by receiver, and requests to the scheduler; streams to the `useless` are to end."""

    beats: Mapping[NodeId, Beat]
    useless: Sequence[NodeId]
    backup_requests: Sequence[BackupRequest]


class PeerPacing:
    """The pacing of one server's replication."""

    def __init__(self, replication: Replication, lease_s: float, queues: PeerQueues[Any]) -> None:
        self._replication = replication
        self._lease_s = lease_s
        self._queues = queues
        self._beat_s = 0.0
        # The first record of a range that a server has not acknowledged, and since when.
        self._unacknowledged: dict[tuple[NodeId, RangeId], tuple[int, float]] = {}

    def renewed(self) -> list[tuple[NodeId, LogRecord]]:
        """Records to send again after a view: servers that saw a range's new epoch before this one
        have refused records that named the old one.
        """
        resends = self._replication.resends(self._replication.all_holders)
        renewed = self._replication.renewed
        return [(peer, record) for peer, record in resends if record.range_id in renewed]

    def first_granted(
        self, peer: NodeId, range_ids: Container[RangeId]
    ) -> list[tuple[NodeId, LogRecord]]:
        """Records to send to a server that follows this one in these ranges from now on: it may
        have refused them before it had the view.
        """
        resends = self._replication.resends({peer})
        return [(peer, record) for peer, record in resends if record.range_id in range_ids]

    def opened(self, peer: NodeId) -> list[tuple[NodeId, LogRecord]]:
        """Records that a new stream to the server begins with."""
        self._replication.lost(peer)
        self._unacknowledged = {
            key: first for key, first in self._unacknowledged.items() if key[0] != peer
        }
        return list(self._replication.resends({peer}))

    def late(self, now_s: float) -> list[tuple[NodeId, LogRecord]]:
        """Records to send again. To be called at least ten times a lease."""
        self._queues.look()
        self._replication.sending(self._queues.busy, self._queues.moving, now_s)
        resends: dict[tuple[NodeId, RangeId], list[LogRecord]] = {}
        for peer, record in self._replication.resends(self._replication.all_holders):
            resends.setdefault((peer, record.range_id), []).append(record)
        idle = {peer for peer, _ in resends if self._queues.is_idle(peer)}
        unacknowledged: dict[tuple[NodeId, RangeId], tuple[int, float]] = {}
        found: list[tuple[NodeId, LogRecord]] = []
        for key, records in resends.items():
            number = records[0].number
            before, since_s = self._unacknowledged.get(key, (number, now_s))
            since_s = since_s if before == number else now_s
            is_late = now_s > since_s + _RESEND_LEASES * self._lease_s
            if is_late and key[0] in idle:
                since_s = now_s
                found += [(key[0], record) for record in records]
            unacknowledged[key] = number, since_s
        self._unacknowledged = unacknowledged
        return found

    def hurry(self) -> None:
        """Make beats due now: the scheduler should hear at once who backs up no more."""
        self._beat_s = -math.inf

    def beats(self, now_s: float) -> Beats | None:
        """Beats and requests, if they are due."""
        if now_s < self._beat_s + self._lease_s / BEATS_A_LEASE:
            return None
        self._beat_s = now_s
        replication = self._replication
        useless = self._queues.useless(replication.all_holders)
        return Beats(replication.beats(now_s), useless, replication.backup_requests(now_s))
