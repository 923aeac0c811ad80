"""Reasons why a step or a pull waits, for a person, and servers that are gone for good."""

from __future__ import annotations

from collections.abc import Sequence

from ps_core.cluster_view import ClusterView
from ps_core.consistency import Mode
from ps_core.errors import PushpullError
from ps_core.keys import NodeId
from ps_core.tables import Table
from ps_worker.transport.links import ServerLinks
from pushpull.v1 import parameters_pb2


def lost_server(view: ClusterView, links: ServerLinks, patience_s: float) -> str:
    """The reason why a server is lost: it has left, or could not be reached for `patience_s`; empty
    if none is.
    """
    for server in _primaries(view):
        link = links.find(server)
        if link is None:
            return f"server {server} has left the cluster"
        if link.trouble_s > patience_s:
            return link.trouble
    return ""


def pulls_wait_for(unanswered: Sequence[NodeId], links: ServerLinks, answer: str) -> str:
    """The reasons why pulls in flight are not done. Any thread.

    Args:
        unanswered: the servers that have not answered.
        links: to the servers.
        answer: the servers' last reason why a pull waits; empty: none.
    """
    servers = ", ".join(map(str, unanswered)) or "any server"
    return "; ".join([answer or f"no answer yet of server {servers}", *links.troubles()])


async def step_waits_for(
    view: ClusterView, links: ServerLinks, table: Table, clock: int, own_rank: int
) -> str:
    """The reasons why step `clock` of a table, of rank `own_rank`, is not committed. Asks the
    servers; `view` and `table` are the newest.
    """
    reasons = links.troubles()
    seen: dict[int, parameters_pb2.WorkerStats] = {}
    for server in _primaries(view):
        link = links.find(server)
        if link is None or link.trouble:
            continue
        try:
            stats = await link.range_stats(table.table_id)
        except PushpullError as error:
            reasons.append(f"server {server} does not answer: {error.message}")
            continue
        for worker in (worker for entry in stats.ranges for worker in entry.workers):
            slowest = seen.get(worker.rank)
            if slowest is None or worker.clock < slowest.clock:
                seen[worker.rank] = worker
    if table.consistency.mode is Mode.BSP:
        reasons += _absent_workers(seen, clock, view.awaited_ranks, own_rank)
    return "; ".join(reasons) or "the servers have not answered for all of it yet"


def _primaries(view: ClusterView) -> set[NodeId]:
    return {a.primary for a in view.ranges if a.primary is not None}


def _absent_workers(
    seen: dict[int, parameters_pb2.WorkerStats], clock: int, ranks: Sequence[int], own_rank: int
) -> list[str]:
    """The workers whose step is missing on some server, with their clocks."""
    absent = []
    for rank in ranks:
        worker = seen.get(rank)
        if rank == own_rank or (worker is not None and (worker.left or worker.clock >= clock)):
            continue
        if worker is None:
            absent.append(f"worker {rank} has not been heard of")
        else:
            heard_s = worker.last_heard_ms / 1000
            absent.append(
                f"worker {rank} is at clock {worker.clock}, last heard {heard_s:.1f} s ago"
            )
    return [f"step {clock} waits: " + ", ".join(absent)] if absent else []
