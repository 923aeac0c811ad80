"""`pushpull compare`: a training script under several consistency settings, one after the other.

Rules:
    - The runs share one cluster, which is emptied between them. After a run that failed, the next
      has another cluster.
    - The runs of a seed, one for each mode, follow each other, so that a disturbance of the machine
      disturbs all modes alike.
    - The report and its JSON are written after each run, so that they survive the tool. Each takes
      the place of the one before when it is complete; if it cannot be written, the runs go on.
    - A run that failed is in the report with its last message; the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import ps_worker
from ps_cli.compare.figures import ModeRow, figures_of, gradient_tables, mode_row, other_tables
from ps_cli.compare.modes import ComparedMode, modes_of
from ps_cli.compare.options import CompareOptions
from ps_cli.compare.records import WorkerRecord, read_records
from ps_cli.compare.report_document import (
    FAILED,
    FINISHED,
    STOPPED,
    ComparedRun,
    Comparison,
    document_of,
    missing_reports,
)
from ps_cli.compare.report_html import page_of
from ps_cli.compare.report_table import measure_text, table_of
from ps_cli.console.output import Output
from ps_cli.console.tensor_file import check_writable, replaced, writing
from ps_cli.train.exit_rules import FAILURE_EXIT_CODE, RunEnd
from ps_cli.train.train import SharedCluster, TrainRun, TrainSettings
from ps_core.errors import InvalidConfig
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import temporary_directory

SEED_PLACE = "{seed}"
"""Replaced by the run's seed in arguments of the script."""

STOP_EXIT_CODES = 128
"""Above it a signal ended a run, and ends the comparison."""

INTERRUPT_EXIT_CODE = 130


def comparison_of(options: CompareOptions) -> Comparison:
    """The comparison that the options ask for, on this machine.

    Raises:
        InvalidConfig: an option is wrong, or contradicts another.
    """
    modes, seeds = modes_of(options.modes), seeds_of(options.seeds)
    if len(set(seeds)) != len(seeds):
        raise InvalidConfig(f"the seeds {seeds} name one twice")
    for mode in modes:
        mode.check_fits(options.workers)
    if options.straggler:
        ps_worker.ComputeTime.parsed(options.straggler).check_fits(options.workers)
    if options.report.suffix == ".json":
        raise InvalidConfig(
            f"the report is {options.report}; expected another ending than .json, which is the "
            "ending of the file beside it"
        )
    return Comparison(
        script=str(options.script),
        arguments=tuple(options.script_arguments or ()),
        worker_count=options.workers,
        server_count=options.servers,
        compute=options.straggler,
        modes=tuple(map(str, modes)),
        began=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        environment=_environment(),
    )


def seeds_of(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InvalidConfig(
            f"seeds is '{text}'; expected whole numbers separated by commas"
        ) from None


def compare(options: CompareOptions) -> int:
    """Run everything, write the report, print the table.

    Returns:
        The exit code: 0 if every run finished, 1 if one failed or is not in the report, 128 + a
        signal that ended it.

    Raises:
        InvalidConfig: an option is wrong, or no report can be written, before the first run.
    """
    comparison = comparison_of(options)
    report = _Report(options, comparison)
    report.check()
    runs: list[ComparedRun] = []
    code = INTERRUPT_EXIT_CODE
    with Output(sys.stderr) as progress, contextlib.suppress(KeyboardInterrupt):
        # Before the first run and after the last, a signal is Python's KeyboardInterrupt.
        cluster = SharedCluster(progress, _shown_kinds(options))
        code = asyncio.run(_all_runs(options, report, cluster, runs))
    with Output() as output:
        output.print(table_of(comparison, _rows(comparison, runs)))
        for remark in missing_reports(runs):
            output.say(remark)
        files, lacking = (options.report, options.json_path), len(runs) - report.run_count
        if lacking:
            output.complain(
                f"{report.failure}; {files[0]} and {files[1]} lack {lacking} of {len(runs)} runs"
            )
            return code or FAILURE_EXIT_CODE
        if runs:
            output.say(f"report: {files[0]}, figures: {files[1]}")
    return code


def _shown_kinds(options: CompareOptions) -> frozenset[str]:
    return frozenset({"worker"} if options.verbose else ())


async def _all_runs(
    options: CompareOptions, report: _Report, cluster: SharedCluster, runs: list[ComparedRun]
) -> int:
    """Add each run to `runs` when it has ended, and return the exit code."""
    modes = report.comparison.modes
    plan = [(seed, mode) for seed in seeds_of(options.seeds) for mode in modes]
    try:
        for number, (seed, mode) in enumerate(plan, 1):
            title = f"run {number} of {len(plan)}: {mode}, seed {seed}"
            cluster.output.say(title)
            await cluster.renew()
            run, code = await _one_run(options, mode, seed, cluster)
            runs.append(run)
            cluster.output.say(f"{title}: {_outcome(run)}")
            report.write(runs, cluster.output)
            if code > STOP_EXIT_CODES:
                return code
    finally:
        await cluster.stop()
    return int(any(run.state == FAILED for run in runs))


async def _one_run(
    options: CompareOptions, mode: str, seed: int, cluster: SharedCluster
) -> tuple[ComparedRun, int]:
    """Train once; the run, and its exit code."""
    with temporary_directory("pushpull-compare-") as folder:
        settings = TrainSettings(
            script=options.script,
            arguments=tuple(
                word.replace(SEED_PLACE, str(seed)) for word in options.script_arguments or ()
            ),
            shape=ClusterShape(
                options.servers, options.workers, replica_count=1, min_in_sync=1, has_journal=True
            ),
            shown_kinds=_shown_kinds(options),
            environment={
                **ComparedMode.parsed(mode).environment,
                "PUSHPULL_COMPUTE": options.straggler,
                "PUSHPULL_RECORD": folder,
            },
        )
        ending = await TrainRun(settings, cluster.output, cluster).ending()
        records = read_records(Path(folder))
    state, message = _judged(ending, records, mode)
    return ComparedRun(mode, seed, state, message, figures_of(records)), ending.exit_code


def _judged(ending: RunEnd, records: Sequence[WorkerRecord], mode: str) -> tuple[str, str]:
    """The state of a run, and a message about it.

    A script whose tables all have other settings, its own or for want of a DistributedOptimizer
    that takes outer steps, was not trained under the mode: that is a failure. If some of them have,
    the message names them.
    """
    if ending.exit_code:
        return (STOPPED if ending.exit_code > STOP_EXIT_CODES else FAILED), ending.message
    others = other_tables(records, ComparedMode.parsed(mode))
    names = ", ".join(f"'{table.name}' is {table.mode}" for table in others[:3])
    remark = f"the script's own settings, or a table's: table {names}, not {mode}" * bool(others)
    cut = ", ".join(str(record.rank) for record in records if not record.is_whole)
    cut = f"the figures lack what worker {cut} did at the end: its record breaks off" if cut else ""
    if others and len(others) == len(gradient_tables(records)):
        return FAILED, (
            f"{remark}; expected a script without consistency= and codecs, or with the client's, "
            "tables of float32, and for outer steps a DistributedOptimizer"
        )
    if not any(record.steps or record.losses for record in records):
        return FAILED, (
            "no worker recorded a step; expected a script that trains with DistributedOptimizer, "
            "or reports its losses with client.report(loss=...)"
        )
    return FINISHED, "; ".join(filter(None, (remark, cut)))


def _outcome(run: ComparedRun) -> str:
    figures = run.figures
    if run.state != FINISHED:
        return run.message if run.message.startswith(run.state) else f"{run.state}: {run.message}"
    measures = "".join(f", {name} {measure_text(value)}" for name, value in figures.quality.items())
    remark = f"; {run.message}" if run.message else ""
    return f"{figures.step_count} steps in {figures.time_s:.1f} s, all workers{measures}{remark}"


def _rows(comparison: Comparison, runs: Sequence[ComparedRun]) -> list[ModeRow]:
    rows: list[ModeRow] = []
    for mode in comparison.modes:
        of_mode = [run for run in runs if run.mode == mode]
        finished = [run.figures for run in of_mode if run.state == FINISHED]
        first = rows[0] if rows else mode_row(mode, len(of_mode), finished, None)
        rows.append(mode_row(mode, len(of_mode), finished, first.time_s))
    return rows


class _Report:
    """The HTML file of a comparison and its JSON.

    Attributes:
        run_count: the runs that both files have; 0 until they are written, and earlier files stay.
        failure: the reason why they do not have all.
    """

    def __init__(self, options: CompareOptions, comparison: Comparison) -> None:
        self._page, self._figures = options.report, options.json_path
        self.comparison = comparison
        self.run_count = 0
        self.failure = ""

    def check(self) -> None:
        """Raise InvalidConfig if they cannot be written."""
        with writing(self._page):
            self._page.parent.mkdir(parents=True, exist_ok=True)
        for path in (self._figures, self._page):
            check_writable(path)

    def write(self, runs: Sequence[ComparedRun], output: Output) -> None:
        """Write both, or warn: the next call writes what this one could not."""
        rows = _rows(self.comparison, runs)
        text = json.dumps(document_of(self.comparison, runs, rows), indent=1) + "\n"
        page = page_of(self.comparison, runs, rows)
        try:
            for path, content in ((self._figures, text), (self._page, page)):
                with replaced(path) as file:
                    file.write(content.encode())
        except InvalidConfig as error:
            self.failure = error.message
            output.warn(f"{error.message}; the comparison goes on")
        else:
            self.run_count = len(runs)


def _environment() -> dict[str, str]:
    # Imported here, because other commands start without what benchmarks need.
    from ps_cli.bench.instruments.environment import environment

    return {
        name: "; ".join(value) if isinstance(value, list) else str(value)
        for name, value in environment().items()
        if value
    }
