"""Rounds of collective calls, at their host (SEMANTICS S17).

    a worker enters           -> its share is held; the round may end
    a worker has ended        -> the round may end
    another server is host    -> all is forgotten

Rules:
    - A round ends when all awaited workers are in it: those that the cluster was started for, come
      or not, unless their membership has ended; and late joiners, as soon as a worker in it is
      beyond the clock after which they joined.
    - Workers keep the newest round. A worker that enters at a new host says its last round, and no
      round ends there before all workers that may know of one have entered.
    - A share counts once: a worker that asks again for an ended round is given that round.
    - The share of a worker whose membership has ended does not count, unless its round has ended.

Invariants:
    COL-1  Two workers that are given a round of the same number, by whatever hosts, and are both
           members still, are given the same.
    COL-2  A worker's share is in one round at most.
"""

from __future__ import annotations

from ps_core import limits
from ps_core.cluster_view import ClusterView, Node
from ps_core.collective_calls import (
    Host,
    Round,
    Share,
    host_of,
    is_late_joiner,
    joined_after,
    workers_here,
)
from ps_core.errors import Fenced, StaleAssignment, listed
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId

_NAMED_COUNT = 8


class CollectiveRounds:
    """The rounds of collective calls that server `own` hosts."""

    def __init__(self, own: NodeId) -> None:
        self._own = own
        self._host: Host | None = None
        self._view: ClusterView | None = None
        self._workers: dict[int, Node] = {}
        self._shares: dict[Incarnation, Share] = {}
        self._heard: set[Incarnation] = set()
        self._last: Round | None = None

    def observe(self, view: ClusterView) -> None:
        host = host_of(view)
        if host != self._host:
            self._shares, self._heard, self._last, self._host = {}, set(), None, host
        self._view, self._workers = view, workers_here(view)
        here = {node.incarnation for node in self._workers.values()}
        self._heard &= here
        self._shares = {who: share for who, share in self._shares.items() if who in here}
        self._advance()

    def check_host(self, assignment_epoch: AssignmentEpoch) -> None:
        """Check that the caller means this host, at this epoch.

        Raises:
            StaleAssignment: collective calls meet elsewhere, or range 0 is at another epoch.
        """
        if self._host != (self._own, assignment_epoch):
            where = "nowhere" if self._host is None else f"at server {self._host.server}"
            raise StaleAssignment(
                f"collective calls meet {where}, as far as server {self._own} knows"
            )

    def enter(
        self, who: Incarnation, ended_round: int, last: Round | None, share: Share | None
    ) -> None:
        """Take a worker's last round, and its share of the next.

        Raises:
            Fenced: its membership has ended.
            StaleAssignment: it had a round that nobody has told this server of: it should.
        """
        self.check_here(who)
        if last is not None and last.number > self._number:  # another host ended it
            self._last = last
            for given in last.shares:
                self._shares.pop(given.incarnation, None)
        if ended_round > self._number:
            raise StaleAssignment(f"round {ended_round} is not known here; say what it was")
        self._heard.add(who)
        if share is not None and self.answer(who, ended_round) is None:
            self._shares.setdefault(who, share)
        self._advance()

    def answer(self, who: Incarnation, ended_round: int) -> Round | None:
        """The round that the worker is in and has not been given; None if there is none yet."""
        last = self._last
        return last if last is not None and last.number > ended_round and last.has(who) else None

    def check_here(self, who: Incarnation) -> None:
        """Raise Fenced for a worker that is no member of the run."""
        if not any(node.incarnation == who for node in self._workers.values()):
            raise Fenced("this worker's membership has ended: it is in no round any more")

    @property
    def _number(self) -> int:
        return 0 if self._last is None else self._last.number

    def missing(self) -> str:
        """Names the workers that the open round waits for."""
        return listed([self._words(rank) for rank in self._missing()], _NAMED_COUNT)

    def _words(self, rank: int) -> str:
        node = self._workers.get(rank)
        if node is None:
            return f"worker {rank}, which has not come yet"
        silent = "" if node.state.value == "alive" else ", and is silent"
        return f"worker {rank} (node {node.node_id}), which has not made the call{silent}"

    def _missing(self) -> list[int]:
        clock = max((share.clock for share in self._shares.values()), default=0)
        view = self._view
        if view is None:
            return []
        return [rank for rank in view.awaited_ranks if self._is_missing(view, rank, clock)]

    def _is_missing(self, view: ClusterView, rank: int, clock: int) -> bool:
        node = self._workers.get(rank)
        if node is None:
            return True
        if node.incarnation in self._shares:
            return False
        if not is_late_joiner(view, node) or node.incarnation not in self._heard:
            return True
        if self._last is not None and self._last.has(node.incarnation):
            return True  # it must be given that round before the round is forgotten
        joined = joined_after(view, node.incarnation)
        return joined is not None and clock > joined

    def _advance(self) -> None:
        if not self._shares or self._missing():
            return
        shares = tuple(sorted(self._shares.values(), key=lambda share: share.rank))
        self._last = _ended(self._number + 1, shares)
        self._shares = {}


def _ended(number: int, shares: tuple[Share, ...]) -> Round:
    byte_count = sum(share.byte_count for share in shares)
    if byte_count <= limits.MAX_COLLECTIVE_ROUND_BYTES:
        return Round(number, shares)
    problem = (
        f"what {len(shares)} workers gave has {byte_count} bytes; expected at most "
        f"{limits.MAX_COLLECTIVE_ROUND_BYTES}, since each is sent all of it. Give less, or push it "
        "to a table with Aggregate()"
    )
    bare = tuple(Share(share.rank, share.incarnation, share.call, share.clock) for share in shares)
    return Round(number, bare, problem)
