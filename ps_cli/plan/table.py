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
    head = ["mode", "step, s", "steps/s", "MB up", "MB down", "server MB in", "out"]
    head += ["busiest", "of the time"]
    if options.has_prices:
        head.append(f"{options.steps} steps cost")
    return head, [_cells(options, mode, step) for mode, step in steps.items()]


def cost_of(options: PlanOptions, step_s: float) -> float:
    """The price of the cluster for the steps of each worker that are asked for."""
    hourly = options.workers * options.worker_price + options.servers * options.server_price
    return hourly * options.steps * step_s / _HOUR_S


def _cells(options: PlanOptions, mode: ComparedMode, step: PlannedStep) -> Cells:
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
        *([f"{cost_of(options, step.step_s):,.2f}"] if options.has_prices else []),
    ]
