"""The runs of a cluster, as `pushpull runs list` and `pushpull status` show them."""

from __future__ import annotations

from typing import TypedDict

from ps_core.cluster_view import ClusterView, NodeState, Role
from ps_core.runs import Run, words


class RunEntry(TypedDict):
    """One run; the run without a name has an empty one. `state` is "waiting" (for workers that
    have not joined), "running", "over" or "removed".
    """

    name: str
    state: str
    worker_count: int
    alive_count: int
    table_count: int


def run_entries(view: ClusterView) -> list[RunEntry]:
    """The runs of a cluster; the one without a name comes first, if it is used."""
    used = [run for run in ("",) if view.of_run(run).tables or _workers(view, run) or not view.runs]
    named = {run.name: run for run in view.runs}
    return [_entry(view, named.get(name, Run(name, view.worker_count))) for name in (*used, *named)]


def _workers(view: ClusterView, run: str) -> dict[int, NodeState]:
    """The state of the newest worker of each rank of a run."""
    nodes = view.of_run(run).nodes
    return {node.rank: node.state for node in nodes if node.role is Role.WORKER}


def _entry(view: ClusterView, run: Run) -> RunEntry:
    own, workers = view.of_run(run.name), _workers(view, run.name)
    have_come = all(rank in workers for rank in range(own.worker_count))
    state = "running" if have_come else "waiting"
    if run.has_ended or (have_come and all(each is NodeState.LEFT for each in workers.values())):
        state = "removed" if run.is_removed else "over"
    return RunEntry(
        name=run.name,
        state=state,
        worker_count=own.worker_count,
        alive_count=sum(each.is_member for each in workers.values()),
        table_count=len(own.tables),
    )


def run_line(entry: RunEntry) -> str:
    counts = f"{entry['alive_count']} of {entry['worker_count']} workers"
    return f"{words(entry['name'])}: {entry['state']}, {counts}, {entry['table_count']} tables"
