"""The table of a plan: its cells as text, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from ps_cli.compare.modes import ComparedMode
from ps_cli.compare.report_table import Cells, cells_table
from ps_cli.plan.options import PlanOptions
from ps_cli.plan.steps import PlannedStep

Steps = Mapping[ComparedMode, PlannedStep]

_HOUR_S = 3600


def table_of(options: PlanOptions, steps: Steps) -> Table:
    return cells_table(*head_and_cells(options, steps))


def head_and_cells(options: PlanOptions, steps: Steps) -> tuple[Cells, list[Cells]]:
    """Discarded steps have a column if a mode discards some, and the cost if there are prices."""
    head = ["mode", "step, s", "steps/s", "MB up", "MB down", "server MB in", "out"]
    head += ["busiest", "of the time"]
    cells = [_cells(mode, step) for mode, step in steps.items()]
    if any(step.discarded_share for step in steps.values()):
        head.append("discarded")
        for row, step in zip(cells, steps.values(), strict=True):
            row.append(f"{step.discarded_share:.0%}")
    if options.has_prices:
        head.append(f"{options.steps} steps cost")
        for row, step in zip(cells, steps.values(), strict=True):
            row.append(f"{cost_of(options, step):,.2f}")
    return head, cells


def cost_of(options: PlanOptions, step: PlannedStep) -> float:
    """The price of the cluster until as many steps have taken part in updates as are asked for of
    each worker.
    """
    hourly = options.workers * options.worker_price + options.servers * options.server_price
    return hourly * options.workers * options.steps / step.steps_per_s / _HOUR_S


def _cells(mode: ComparedMode, step: PlannedStep) -> Cells:
    moved = (
        step.pushed_bytes,
        step.pulled_bytes,
        step.server_in_bytes,
        step.server_out_bytes,
    )
    return [
        str(mode),
        f"{step.step_s:.4g}",
        f"{step.steps_per_s:.4g}",
        *(f"{each / 1e6:,.1f}" for each in moved),
        step.bottleneck,
        f"{step.busy[step.bottleneck]:.0%}",
    ]
