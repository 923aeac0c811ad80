"""`pushpull plan`: simulate a cluster under several modes, and show what limits each."""

from __future__ import annotations

import json
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
from ps_cli.plan.units import bytes_per_s_of, count_of, seconds_of
from ps_core.errors import InvalidConfig
from ps_core.tables.elements import DType
from ps_runtime.system.process_end import unwound_by_sigterm

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
    except OSError as error:
        raise InvalidConfig(f"the costs {options.costs} cannot be read: {error}") from error
    return costs_of(text, str(options.costs))
