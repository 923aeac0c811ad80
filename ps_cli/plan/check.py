"""A plan against reality: clusters on this machine, and the steps that are planned for them."""

from __future__ import annotations

from dataclasses import dataclass

import ps_worker
from ps_cli.bench.measurements.step_costs import emulated_steps
from ps_cli.compare.modes import ComparedMode, modes_of
from ps_cli.compare.report_table import cells_table
from ps_cli.console.output import Output
from ps_cli.plan.cluster import FLOAT32_BYTES, PlannedCluster
from ps_cli.plan.costs import Costs
from ps_cli.plan.options import MEASURED_BYTES
from ps_cli.plan.steps import planned_step
from ps_core.tables.elements import DType
from ps_runtime.system.capacity import usable_core_count

WORKER_COUNTS = (1, 2, 4)
MODES = "bsp,asp,bsp+int8,asp+int8,bsp+outer:4"
COMPUTE = "100ms"
BACKWARD_SHARE = 0.67


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """Seconds of a step, planned and measured, and the share of the processor that others used."""

    worker_count: int
    mode: ComparedMode
    planned_s: float
    measured_s: float
    others_share: float

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return self.planned_s / self.measured_s - 1


def check(costs: Costs, output: Output) -> list[CheckedStep]:
    """Train an emulated model of 64 MiB on clusters of one server, and print both times.

    Args:
        costs: of this machine.
        output: gets a line for each cluster, and the table.

    Blocking: for a few minutes.
    """
    found = []
    for count in WORKER_COUNTS:
        output.say(f"{count} workers of {max(WORKER_COUNTS)}: training")
        found += _checked(count, modes_of(MODES), costs)
    output.print(
        cells_table(
            ["workers", "mode", "measured, ms", "planned, ms", "error", "others' processor"],
            [
                [
                    str(each.worker_count),
                    str(each.mode),
                    f"{each.measured_s * 1000:.0f}",
                    f"{each.planned_s * 1000:.0f}",
                    f"{each.error:+.0%}",
                    f"{each.others_share:.0%}",
                ]
                for each in found
            ],
        )
    )
    return found


def _checked(count: int, modes: tuple[ComparedMode, ...], costs: Costs) -> list[CheckedStep]:
    cluster = PlannedCluster(
        worker_count=count,
        server_count=1,
        bytes_per_s=1.0,  # unused on one host
        latency_s=0.0,
        element_count=MEASURED_BYTES // FLOAT32_BYTES,
        dtype=DType.FLOAT32,
        optimizer="sgd",
        compute=ps_worker.ComputeTime.parsed(COMPUTE),
        backward_share=BACKWARD_SHARE,
        host_cores=usable_core_count(),
        has_gpus=True,  # an emulated computation is a sleep, which takes no core
    )
    settings = [
        (str(mode.consistency), mode.push_codec, mode.pull_codec, mode.outer_steps)
        for mode in modes
    ]
    measured = emulated_steps(count, MEASURED_BYTES, COMPUTE, BACKWARD_SHARE, settings)
    return [
        CheckedStep(count, mode, planned_step(cluster, mode, costs).step_s, *found)
        for mode, found in zip(modes, measured, strict=True)
    ]
