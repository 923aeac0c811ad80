"""`pushpull compare`: a training script under several consistency settings, one after the other.

Rules:
    - The runs share one cluster, which is emptied between them. After a run that failed, the next
      has another cluster.
    - The runs of a seed, one for each mode, follow each other, so that a disturbance of the machine
      disturbs all modes alike.
    - The report and its JSON are written after each run, so that they survive the tool.
    - A run that failed is in the report with its last message; the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ps_worker
from ps_cli.compare.figures import (
    ModeRow,
    figures_of,
    gradient_tables,
    median_time_s,
    mode_row,
    other_consistency,
)
from ps_cli.compare.options import CompareOptions
from ps_cli.compare.records import WorkerRecord, read_records
from ps_cli.compare.report_document import (
    FAILED,
    FINISHED,
    STOPPED,
    Comparison,
    Run,
    document_of,
    missing_reports,
)
from ps_cli.compare.report_html import page_of
from ps_cli.compare.report_table import measure_text, table_of
from ps_cli.console.output import Output
from ps_cli.train.exit_rules import RunEnd
from ps_cli.train.train import SharedCluster, TrainRun, TrainSettings
from ps_core.consistency import Mode, parsed
from ps_core.errors import InvalidConfig
from ps_runtime.launch.cluster_shape import ClusterShape

SEED_PLACE = "{seed}"
"""Replaced by the run's seed in arguments of the script."""

STOP_EXIT_CODES = 128
"""Above it a signal ended a run, and ends the comparison."""

INTERRUPT_EXIT_CODE = 130


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """The script, its settings and the report.

    Attributes:
        arguments: the script's own; `{seed}` in them is the run's seed.
        modes: as `modes_of` gives them.
        seeds: every mode runs once with each.
        compute: emulated computation, as in the worker's setting `compute`.
        report: the HTML file; the JSON file is beside it.
        shown_kinds: the kinds of role whose lines are shown.
    """

    script: Path
    arguments: tuple[str, ...]
    modes: tuple[str, ...]
    seeds: tuple[int, ...]
    worker_count: int
    server_count: int
    compute: str
    report: Path
    shown_kinds: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.seeds:
            raise InvalidConfig("there are no seeds; expected at least one")
        if len(set(self.seeds)) != len(self.seeds):
            raise InvalidConfig(f"the seeds {self.seeds} name one twice")
        for mode in self.modes:
            backup_count = parsed(mode).backup_workers
            if backup_count >= self.worker_count:
                raise InvalidConfig(
                    f"'{mode}' has {backup_count} backup workers of {self.worker_count} workers; "
                    "expected fewer"
                )
        if self.compute:
            ps_worker.ComputeTime.parsed(self.compute).check_fits(self.worker_count)
        if self.report.suffix == ".json":
            raise InvalidConfig(
                f"the report is {self.report}; expected another ending than .json, which is the "
                "ending of the file beside it"
            )

    @property
    def json_path(self) -> Path:
        return self.report.with_suffix(".json")


def modes_of(text: str) -> tuple[str, ...]:
    """The modes of a list separated by commas, each in its canonical form.

    A mode itself may have commas (`bsp:backup=1,grace=5ms`): a word that does not begin with a
    mode's name belongs to the mode before it.

    Raises:
        InvalidConfig: one of them is no mode, or comes twice.
    """
    names = {mode.value for mode in Mode}
    words: list[str] = []
    for word in (word.strip() for word in text.split(",")):
        is_option = "=" in word or word.lower() == "adaptive"
        if words and is_option and word.partition(":")[0].lower() not in names:
            words[-1] += f",{word}"
        else:
            words.append(word)
    modes = tuple(str(parsed(word).as_requested) for word in words)
    for mode in modes:
        if modes.count(mode) > 1:
            raise InvalidConfig(f"the modes {text} have '{mode}' twice; expected each once")
    return modes


def settings_of(options: CompareOptions) -> CompareSettings:
    """
    Raises:
        InvalidConfig: an option is wrong; the message names it.
    """
    return CompareSettings(
        script=options.script,
        arguments=tuple(options.script_arguments or ()),
        modes=modes_of(options.modes),
        seeds=seeds_of(options.seeds),
        worker_count=options.workers,
        server_count=options.servers,
        compute=options.straggler,
        report=options.report,
        shown_kinds=frozenset({"worker"}) if options.verbose else frozenset(),
    )


def seeds_of(text: str) -> tuple[int, ...]:
    """The seeds of a list separated by commas.

    Raises:
        InvalidConfig: one of them is no whole number.
    """
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InvalidConfig(
            f"seeds is '{text}'; expected whole numbers separated by commas"
        ) from None


def compare(settings: CompareSettings) -> int:
    """Run everything, write the report, print the table.

    Returns:
        The exit code: 0 if every run finished, 1 if one failed, 128 + the number of the signal that
        ended it.

    Blocking: until all runs have ended.

    Raises:
        InvalidConfig: the report cannot be written.
    """
    comparison = Comparison(
        script=str(settings.script),
        arguments=settings.arguments,
        worker_count=settings.worker_count,
        server_count=settings.server_count,
        compute=settings.compute,
        modes=settings.modes,
        began=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        environment=_environment(),
    )
    runs: list[Run] = []
    code = INTERRUPT_EXIT_CODE
    with Output(sys.stderr) as progress, contextlib.suppress(KeyboardInterrupt):
        # Before the first run and after the last, a signal is Python's KeyboardInterrupt.
        host = RunHost(progress, SharedCluster(progress, settings.shown_kinds))
        code = asyncio.run(_all_runs(settings, comparison, host, runs))
    with Output() as output:
        output.print(table_of(comparison, _rows(comparison, runs)))
        for remark in missing_reports(runs):
            output.say(remark)
        output.say(f"report: {settings.report}, figures: {settings.json_path}")
    return code


@dataclass(frozen=True, slots=True)
class RunHost:
    """The output and the cluster of all runs."""

    progress: Output
    cluster: SharedCluster


async def _all_runs(
    settings: CompareSettings, comparison: Comparison, host: RunHost, runs: list[Run]
) -> int:
    """Add each run to `runs` when it has ended, and return the exit code."""
    _write(settings, comparison, runs)  # fails before the first run if it cannot be written
    plan = [(seed, mode) for seed in settings.seeds for mode in settings.modes]
    try:
        for number, (seed, mode) in enumerate(plan, 1):
            title = f"run {number} of {len(plan)}: {mode}, seed {seed}"
            host.progress.say(title)
            await host.cluster.renew()
            run, code = await _one_run(settings, mode, seed, host)
            runs.append(run)
            _write(settings, comparison, runs)
            host.progress.say(f"{title}: {_outcome(run)}")
            if code > STOP_EXIT_CODES:
                return code
    finally:
        await host.cluster.stop()
    return int(any(run.state == FAILED for run in runs))


async def _one_run(
    settings: CompareSettings, mode: str, seed: int, host: RunHost
) -> tuple[Run, int]:
    """Train once; the run, and its exit code."""
    with tempfile.TemporaryDirectory(prefix="pushpull-compare-") as folder:
        trained = TrainSettings(
            script=settings.script,
            arguments=tuple(word.replace(SEED_PLACE, str(seed)) for word in settings.arguments),
            shape=ClusterShape(
                settings.server_count,
                settings.worker_count,
                replica_count=1,
                min_in_sync=1,
                has_journal=True,
            ),
            shown_kinds=settings.shown_kinds,
            environment={
                "PUSHPULL_CONSISTENCY": mode,
                "PUSHPULL_COMPUTE": settings.compute,
                "PUSHPULL_RECORD": folder,
            },
        )
        ending = await TrainRun(trained, host.progress, host.cluster).ending()
        records = read_records(Path(folder))
    state, message = _judged(ending, records, mode)
    return Run(mode, seed, state, message, figures_of(records)), ending.exit_code


def _judged(ending: RunEnd, records: Sequence[WorkerRecord], mode: str) -> tuple[str, str]:
    """The state of a run, and a message about it.

    A script that sets the consistency of all its tables was not trained under the mode: that is a
    failure. If it sets that of some, the message names them.
    """
    if ending.exit_code:
        return (STOPPED if ending.exit_code > STOP_EXIT_CODES else FAILED), ending.message
    others = other_consistency(records, mode)
    remark = ""
    if others:
        names = ", ".join(f"'{table.name}' is {table.consistency}" for table in others[:3])
        remark = f"the script fixes a consistency of its own: table {names}, not {mode}"
    if others and len(others) == len(gradient_tables(records)):
        return FAILED, (
            f"{remark}; expected a script without consistency=, or with the client's `consistency`"
        )
    if not any(record.steps or record.losses for record in records):
        return FAILED, (
            "no worker recorded a step; expected a script that trains with DistributedOptimizer, "
            "or reports its losses with client.report(loss=...)"
        )
    return FINISHED, remark


def _outcome(run: Run) -> str:
    figures = run.figures
    if run.state != FINISHED:
        return run.message if run.message.startswith(run.state) else f"{run.state}: {run.message}"
    measures = "".join(f", {name} {measure_text(value)}" for name, value in figures.quality.items())
    remark = f"; {run.message}" if run.message else ""
    return f"{figures.step_count} steps in {figures.time_s:.1f} s, all workers{measures}{remark}"


def _rows(comparison: Comparison, runs: Sequence[Run]) -> list[ModeRow]:
    rows: list[ModeRow] = []
    first_time_s: float | None = None
    for number, mode in enumerate(comparison.modes):
        of_mode = [run for run in runs if run.mode == mode]
        finished = [run.figures for run in of_mode if run.state == FINISHED]
        if number == 0:
            first_time_s = median_time_s(finished)
        rows.append(mode_row(mode, len(of_mode), finished, first_time_s))
    return rows


def _write(settings: CompareSettings, comparison: Comparison, runs: Sequence[Run]) -> None:
    rows = _rows(comparison, runs)
    document = document_of(comparison, runs, rows)
    try:
        settings.report.parent.mkdir(parents=True, exist_ok=True)
        settings.json_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        settings.report.write_text(page_of(comparison, runs, rows), encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"the report {settings.report} cannot be written: {error}") from error


def _environment() -> dict[str, str]:
    # Imported here, because other commands start without what benchmarks need.
    from ps_cli.bench.instruments.environment import environment

    return {
        name: "; ".join(value) if isinstance(value, list) else str(value)
        for name, value in environment().items()
        if value
    }
