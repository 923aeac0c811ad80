"""`pushpull plan`: simulate a cluster under several modes, and show what limits each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ps_worker
from ps_cli.compare.modes import modes_of
from ps_cli.console.output import Output
from ps_cli.console.tensor_file import check_writable, replaced
from ps_cli.plan.cluster import PlannedCluster
from ps_cli.plan.costs import REFERENCE, Costs, costs_of
from ps_cli.plan.options import MEASURED_BYTES, PlanOptions
from ps_cli.plan.page import page_of
from ps_cli.plan.steps import planned_step
from ps_cli.plan.table import table_of
from ps_core.errors import InvalidConfig
from ps_core.tables.elements import DType
from ps_runtime.system.process_end import unwound_by_sigterm

_BITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def plan(options: PlanOptions, output: Output) -> int:
    """Print the table of a plan, and write its page if one is asked for; or measure, or check.

    Returns:
        The exit code, 0.

    Raises:
        InvalidConfig: an option is wrong, or a file cannot be read or written. What was measured
            is on standard output then.
    """
    _check_alone(options)
    for path in filter(None, (options.measure, options.report)):
        check_writable(path)
    if options.measure is not None:
        # Imported here, because a plan alone starts without what benchmarks need.
        from ps_cli.bench.measurements.step_costs import step_costs

        with unwound_by_sigterm():
            text = json.dumps(step_costs(MEASURED_BYTES, output.say), indent=1) + "\n"
        try:
            _write(options.measure, text)
        except InvalidConfig:
            output.say(text)
            raise
        return 0
    costs = costs_from(options)
    if options.check:
        from ps_cli.plan.check import check

        with unwound_by_sigterm():
            check(costs, output)
        return 0
    planned = cluster_of(options)
    modes = modes_of(options.modes)
    for mode in modes:
        mode.check_fits(options.workers)
    steps = {mode: planned_step(planned, mode, costs) for mode in modes}
    output.print(table_of(options, steps))
    for remark in planned.remarks:
        output.say(remark)
    output.say(f"costs of the processor: {costs.machine}")
    if options.report is not None:
        _write(options.report, page_of(options, planned, costs, steps))
        output.say(f"report: {options.report}")
    return 0


def _check_alone(options: PlanOptions) -> None:
    """Refuse what neither --measure nor --check reads."""
    if options.measure is not None:
        asked, useful = "--measure", {"measure"}
    elif options.check:
        asked, useful = "--check", {"check", "costs"}
    else:
        return
    useless = [option for option in options.given if option not in useful]
    if useless:
        remedy = "without it" if asked == "--measure" else "with nothing but --costs"
        raise InvalidConfig(
            f"{useless[0].replace('_', '-')} is given with {asked}, which plans nothing of yours; "
            f"expected {asked} {remedy}"
        )


def _write(path: Path, text: str) -> None:
    with replaced(path) as file:
        file.write(text.encode())


def cluster_of(options: PlanOptions) -> PlannedCluster:
    """The cluster that the options describe; InvalidConfig if one is wrong or missing."""
    for option, example in (("model", "7e9"), ("compute", "300ms")):
        if not getattr(options, option):
            raise InvalidConfig(f"{option} is not given; expected --{option}, such as {example}")
    if options.gpu and not options.one_host:
        raise InvalidConfig(
            "gpu is given without --one-host; expected both, since a worker with a host of its own "
            "computes in --compute whatever it computes on"
        )
    dtypes = [dtype.value for dtype in _DTYPES]
    if options.dtype not in dtypes:
        raise InvalidConfig(f"dtype is '{options.dtype}'; expected one of {', '.join(dtypes)}")
    planned = PlannedCluster(
        worker_count=options.workers,
        server_count=options.servers,
        bytes_per_s=bytes_per_s_of(options.bandwidth),
        latency_s=0.0 if options.one_host else seconds_of("latency", options.latency),
        element_count=count_of("model", options.model),
        dtype=DType(options.dtype),
        optimizer=options.optimizer,
        compute=ps_worker.ComputeTime.parsed(options.compute),
        backward_share=options.backward,
        replica_count=options.replicas,
        host_cores=options.one_host,
        has_gpus=options.gpu,
    )
    return planned.validated()


def costs_from(options: PlanOptions) -> Costs:
    """The costs of the file of --costs, else those of the reference machine."""
    if options.costs is None:
        return REFERENCE
    try:
        text = options.costs.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the costs {options.costs} cannot be read: {error}") from error
    return costs_of(text, str(options.costs))


# --- numbers with units, as options have them


def bytes_per_s_of(text: str) -> float:
    """A bandwidth such as 25Gbit; InvalidConfig if it is none."""
    found = _number(text, _BITS)
    if not found:
        raise InvalidConfig(
            f"bandwidth is '{text}'; expected a number above 0 with Gbit, Mbit or kbit (a second), "
            "such as 25Gbit"
        )
    return found / 8


def seconds_of(option: str, text: str) -> float:
    """A duration such as 100us; InvalidConfig if it is none."""
    found = _number(text, _SECONDS)
    if found is None:
        raise InvalidConfig(
            f"{option} is '{text}'; expected a number of 0 or more with us, ms or s, such as 100us"
        )
    return found


def count_of(option: str, text: str) -> int:
    """A whole number, perhaps written as 7e9; InvalidConfig if it is none, or below 1."""
    found = _number(text, {"": 1.0})
    if not found or found != int(found):
        raise InvalidConfig(
            f"{option} is '{text}'; expected a whole number above 0, such as 7e9 or 350e6"
        )
    return int(found)


def _number(text: str, units: dict[str, float]) -> float | None:
    """The number in the base unit; None if it has another unit, or is negative or not finite."""
    word = text.strip().lower()
    unit = next((unit for unit in units if word.endswith(unit)), None)
    if unit is None:
        return None
    try:
        found = float(word.removesuffix(unit)) * units[unit]
    except ValueError:
        return None
    return found if math.isfinite(found) and found >= 0 else None
