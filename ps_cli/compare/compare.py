"""`pushpull compare`: a training script under several consistency settings, one after the other.

Rules:
    - The runs have one cluster, one after the other: it begins anew for each, with nothing of the
      run before. Where a run failed, the next has another cluster.
    - The runs of a repeat, one a mode, follow each other, so that what disturbs the machine for a
      while disturbs all modes alike.
    - The report and its JSON are written anew after each run: whatever ends the tool, what has been
      measured is there.
    - A run that failed is in the report with what it said last; the others go on.
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
from ps_cli.console.exit_rules import RunEnd
from ps_cli.console.output import Output
from ps_cli.train.train import SharedCluster, TrainRun, TrainSettings
from ps_core.consistency import Mode, parsed
from ps_core.errors import InvalidConfig

SEED_PLACE = "{seed}"
"""In an argument of the script: the repeat's seed stands there in each run."""

STOP_EXIT_CODES = 128
"""Codes above it say that a signal ended a run: then the comparison ends, too."""

INTERRUPT_EXIT_CODE = 130


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """What to compare.

    Attributes:
        script: the training script.
        arguments: its own; `{seed}` in them is the repeat's seed.
        modes: as `modes_of` gives them.
        seeds: one repeat each.
        worker_count: of each run.
        server_count: of each run.
        compute: emulated computation, as the setting `compute` has it; empty emulates none.
        report: where the HTML goes; the JSON goes beside it.
        shown_kinds: the kinds of role whose lines are shown while it runs.
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
        """Where the figures go for a program."""
        return self.report.with_suffix(".json")


def modes_of(text: str) -> tuple[str, ...]:
    """The modes of a list with commas, each as `pushpull` writes it.

    A comma also stands inside a mode (`bsp:backup=1,grace=5ms`): what names no mode belongs to the
    one before.

    Raises:
        InvalidConfig: one of them is none, or is there twice.
    """
    names = {mode.value for mode in Mode}
    words: list[str] = []
    for word in (word.strip() for word in text.split(",")):
        is_part = "=" in word or word.lower() == "adaptive"
        if words and is_part and word.partition(":")[0].lower() not in names:
            words[-1] += f",{word}"
        else:
            words.append(word)
    modes = tuple(str(parsed(word).begun) for word in words)
    for mode in modes:
        if modes.count(mode) > 1:
            raise InvalidConfig(f"the modes {text} have '{mode}' twice; expected each once")
    return modes


def settings_of(options: CompareOptions) -> CompareSettings:
    """What the command line asks for, checked.

    Raises:
        InvalidConfig: naming the option, what came and what was expected.
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
    """The seeds of a list with commas.

    Raises:
        InvalidConfig: one of them is no whole number.
    """
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InvalidConfig(f"seeds is '{text}'; expected whole numbers with commas") from None


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
        # Before the first run and after the last nobody catches signals but Python itself.
        code = asyncio.run(_all_runs(settings, comparison, TrainOn.begun(progress, settings), runs))
    with Output() as output:
        output.print(table_of(comparison, _rows(comparison, runs)))
        for remark in missing_reports(runs):
            output.say(remark)
        output.say(f"report: {settings.report}, figures: {settings.json_path}")
    return code


@dataclass(frozen=True, slots=True)
class TrainOn:
    """Where runs say what they do, and the cluster that they have."""

    progress: Output
    kept: SharedCluster

    @classmethod
    def begun(cls, progress: Output, settings: CompareSettings) -> TrainOn:
        """No run has begun yet, and no cluster has been started."""
        return cls(progress, SharedCluster(progress, settings.shown_kinds))


async def _all_runs(
    settings: CompareSettings, comparison: Comparison, where: TrainOn, runs: list[Run]
) -> int:
    """All of them, each added to `runs` when it has ended; the exit code."""
    _write(settings, comparison, runs)  # where nothing can be written, nothing need be trained
    plan = [(seed, mode) for seed in settings.seeds for mode in settings.modes]
    try:
        for number, (seed, mode) in enumerate(plan, 1):
            where.progress.say(f"run {number} of {len(plan)}: {mode}, seed {seed}")
            await where.kept.renew()
            run, code = await _one_run(settings, mode, seed, where)
            runs.append(run)
            _write(settings, comparison, runs)
            outcome = _outcome(run)
            where.progress.say(f"run {number} of {len(plan)}: {mode}, seed {seed}: {outcome}")
            if code > STOP_EXIT_CODES:
                return code
    finally:
        await where.kept.stop()
    return int(any(run.state == FAILED for run in runs))


async def _one_run(
    settings: CompareSettings, mode: str, seed: int, where: TrainOn
) -> tuple[Run, int]:
    """One run, and the exit code that it would be."""
    with tempfile.TemporaryDirectory(prefix="pushpull-compare-") as folder:
        trained = TrainSettings(
            script=settings.script,
            arguments=tuple(word.replace(SEED_PLACE, str(seed)) for word in settings.arguments),
            worker_count=settings.worker_count,
            server_count=settings.server_count,
            shown_kinds=settings.shown_kinds,
            environment={
                "PUSHPULL_CONSISTENCY": mode,
                "PUSHPULL_COMPUTE": settings.compute,
                "PUSHPULL_RECORD": folder,
            },
        )
        ending = await TrainRun(trained, where.progress, where.kept).ending()
        records = read_records(Path(folder))
    state, message = _judged(ending, records, mode)
    return Run(mode, seed, state, message, figures_of(records)), ending.exit_code


def _judged(ending: RunEnd, records: Sequence[WorkerRecord], mode: str) -> tuple[str, str]:
    """What a run was, and what there is to say of it.

    A script that fixes the consistency of all its tables has not been trained under the mode; one
    that fixes that of some may have its reasons, which a remark leaves to the reader.
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
    # Here, so that the other commands start without what the benchmarks need.
    from ps_cli.bench.instruments.environment import environment

    return {
        name: "; ".join(value) if isinstance(value, list) else str(value)
        for name, value in environment().items()
        if value
    }
