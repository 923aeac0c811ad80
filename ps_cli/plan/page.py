"""The page of a plan: its table, busy resources, and curves over workers, servers, bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ps_cli.compare.modes import ComparedMode
from ps_cli.console.page import Plot, page
from ps_cli.console.svg import (
    PALETTE,
    Bar,
    LegendEntry,
    Line,
    colour,
    dashes,
    line_chart,
    stacked_bars,
)
from ps_cli.plan.cluster import MOST_NODES, PlannedCluster
from ps_cli.plan.costs import Costs
from ps_cli.plan.options import PlanOptions
from ps_cli.plan.steps import planned_step
from ps_cli.plan.table import Steps, head_and_cells

_FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Points of a curve, in multiples of what is planned."""

Step = Callable[[PlannedCluster, ComparedMode], float]


def page_of(options: PlanOptions, planned: PlannedCluster, costs: Costs, steps: Steps) -> str:
    """The page; simulates the points of the curves."""
    head, cells = head_and_cells(options, steps)
    return page(
        "ps_cli.plan",
        "plan.html.j2",
        title=f"pushpull plan: {options.workers} workers, {options.servers} servers",
        command=options.command,
        machine=f"Costs of the processor: {costs.machine}",
        head=head,
        cells=cells,
        plots=[_shares(steps), *_curves(planned, list(steps), costs)],
    )


def _shares(steps: Steps) -> Plot:
    title = "The time that each resource is busy"
    resources = next(iter(steps.values())).busy
    legend = tuple(LegendEntry(name, PALETTE[n]) for n, name in enumerate(resources))
    bars = [
        Bar(str(mode), name, tuple(share if name == other else 0.0 for other in resources))
        for mode, step in steps.items()
        for name, share in step.busy.items()
    ]
    return Plot(title, stacked_bars(title, "of the time", legend, bars), legend)


def _curves(planned: PlannedCluster, modes: Sequence[ComparedMode], costs: Costs) -> Iterator[Plot]:
    backup_count = max(mode.consistency.backup_workers for mode in modes)
    fewest_workers = max(planned.compute.rank, backup_count) + 1
    axes: dict[str, dict[float, PlannedCluster]] = {
        "workers": {
            count: replace(planned, worker_count=count)
            for count in _around(planned.worker_count, fewest_workers)
        },
        "servers": {
            count: replace(planned, server_count=count)
            for count in _around(planned.server_count, planned.replica_count)
        },
    }
    if not planned.host_cores:
        axes["bandwidth, Gbit/s"] = {
            rate * 8 / 1e9: replace(planned, bytes_per_s=rate)
            for rate in (factor * planned.bytes_per_s for factor in _FACTORS)
        }
    legend = tuple(LegendEntry(str(mode), colour(n), dashes(n)) for n, mode in enumerate(modes))
    for axis, clusters in axes.items():
        title = f"Step time over {axis.partition(',')[0]}"
        lines = [
            Line(
                str(mode),
                style,
                tuple((x, planned_step(each, mode, costs).step_s) for x, each in clusters.items()),
            )
            for style, mode in enumerate(modes)
        ]
        yield Plot(title, line_chart(title, axis, "seconds of a step", lines), legend)


def _around(count: int, fewest: int) -> list[int]:
    """Counts around this one, each once."""
    return sorted({min(MOST_NODES, max(fewest, round(factor * count))) for factor in _FACTORS})
