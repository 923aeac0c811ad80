"""`pushpull replay`: the versions of an update log, and its tables at one of them."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskProgressColumn

from ps_cli.checkpoint.commands import opened, progress_bars
from ps_cli.console.output import Output
from ps_cli.console.spool import Spool, SpooledRows
from ps_cli.console.tensor_file import Written, check_writable, replaced, write_tables
from ps_cli.replay.against import compare
from ps_cli.replay.options import EVERY, ReplayOptions
from ps_cli.replay.plot import plot_of
from ps_cli.replay.turns import go_to, reading
from ps_cli.replay.view import VersionRow, document_of, view_of
from ps_core.errors import InvalidConfig, InvalidUpdateLog, TableNotFound
from ps_core.runs import words
from ps_core.tables.table import Table
from ps_server.replay.replayer import (
    History,
    Replay,
    RunLog,
    Version,
    has_parameters,
    kernel_fingerprint,
    read_run,
)

_SHOWN_COUNT = 40
"""Versions that are shown by default; the first and the last are among them."""

Loss = Callable[[dict[str, torch.Tensor]], float]


def replay(options: ReplayOptions, output: Output) -> int:
    """Run the command; 1 if the log differs from the checkpoint of --against."""
    _check(options)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a server
    try:
        return _replayed(options, output)
    finally:
        torch.set_num_threads(before)


def _replayed(options: ReplayOptions, output: Output) -> int:
    loss = _evaluator(options.evaluate) if options.evaluate else None
    with contextlib.ExitStack() as stack:
        reader = None
        if options.against:
            reader = stack.enter_context(opened(options.against, output))
        bars = stack.enter_context(progress_bars(output, TaskProgressColumn()))
        task = bars.add_task("reading", total=None)
        run = read_run(
            options.directory,
            reading(lambda done, total: bars.update(task, completed=done, total=total)),
            partial(_is_chosen, options.table),
        )
        bars.remove_task(task)
        tables = _chosen(run, options.table)
        notes = [*_notes(run, tables, options.table)]
        for note in notes:
            output.complain(note)
        if reader is not None:
            return compare(run, tables, reader, output, bars)
        replayer = Replay(run, tables, by_clock=options.clock is not None)
        if options.export is not None:
            return _export(options.export, replayer, options, output, bars)
        shown = _shown(replayer.history.versions, options)
        rows = list(_rows(replayer, shown, loss, bars))
    _show(replayer, rows, notes, options, output)
    return 0


def _check(options: ReplayOptions) -> None:
    is_alone = options.export is not None or bool(options.against)
    shows = options.json_path or options.plot or options.evaluate or options.every or options.last
    if is_alone and (shows or options.first is not None or options.to is not None):
        raise InvalidConfig("--export and --against show no versions; give them alone")
    if options.export is not None and options.against:
        raise InvalidConfig("--export and --against: give one of them")
    if (options.at is not None or options.clock is not None) and options.export is None:
        raise InvalidConfig("--at and --clock say which version --export writes")
    if options.at is not None and options.clock is not None:
        raise InvalidConfig("--at and --clock: give one of them")
    document, plot = options.json_path, options.plot
    if document is not None and plot is not None and document.resolve() == plot.resolve():
        raise InvalidConfig(f"--json and --plot are both {document}; expected two files")
    for path in filter(None, (document, plot, options.export)):
        check_writable(path)


# --- the log


def _is_chosen(pattern: str, table: Table) -> bool:
    return table.title == pattern or fnmatch.fnmatchcase(table.title, pattern)


def _chosen(run: RunLog, pattern: str) -> list[Table]:
    found = [
        table
        for table in run.tables.values()
        if has_parameters(table) and _is_chosen(pattern, table)
    ]
    if not found:
        there = ", ".join(f"'{name}'" for name in run.tables) or "no table"
        raise TableNotFound(f"no table with parameters is '{pattern}'; the log has {there}")
    if pattern == EVERY:  # of several runs those of the one without a name, as in checkpoints
        found = [table for table in found if not table.run] or found
    runs = sorted({words(table.run) for table in found})
    if len(runs) > 1:
        raise InvalidConfig(
            f"'{pattern}' matches tables of {' and of '.join(runs)}; expected those of one run, as "
            "--table 'nightly:*' for the run 'nightly'"
        )
    return found


def _notes(run: RunLog, tables: Sequence[Table], pattern: str) -> Iterator[str]:
    yield from run.notes_on(tables)
    others = {table.run for table in run.tables.values()} - {table.run for table in tables}
    if pattern == EVERY and others:
        yield f"{', '.join(map(words, sorted(others)))}: its tables are left out without --table"
    kernels = run.kernel_fingerprints - {kernel_fingerprint()}
    if kernels:
        yield (
            f"made with other kernels ({', '.join(sorted(kernels))}) than this machine's "
            f"({kernel_fingerprint()}): the last bits may differ"
        )


# --- versions


def _shown(versions: Sequence[Version], options: ReplayOptions) -> list[Version]:
    low = options.first or 0
    high = options.to if options.to is not None else versions[-1].number
    inside = [version for version in versions if low <= version.number <= high]
    if options.last:
        inside = inside[-options.last :]
    if not inside:
        raise InvalidConfig(f"no version is from {low} to {high}; {_extent(versions)}")
    every = options.every or -(-len(inside) // _SHOWN_COUNT)
    shown = [v for index, v in enumerate(inside) if not index % every]
    return shown if shown[-1] is inside[-1] else [*shown, inside[-1]]


def _extent(versions: Sequence[Version]) -> str:
    return f"the log has versions {versions[0].number} to {versions[-1].number}"


def _rows(
    replayer: Replay, shown: Sequence[Version], loss: Loss | None, bars: Progress
) -> Iterator[VersionRow]:
    replayer.watch(shown)
    task = bars.add_task("replaying", total=replayer.change_count)
    for version in shown:
        go_to(replayer, version.position, partial(bars.advance, task))
        found = None if loss is None else loss(replayer.tensors())
        norms = replayer.gradient_norm(version), replayer.parameter_norm()
        yield VersionRow(version, *norms, replayer.row_count, found)
    bars.remove_task(task)


def _show(
    replayer: Replay,
    rows: Sequence[VersionRow],
    notes: Sequence[str],
    options: ReplayOptions,
    output: Output,
) -> None:
    history = replayer.history
    names = ", ".join(table.spec.name for table in replayer.tables)
    output.say(f"{options.directory}: {names}; {_extent(history.versions)}")
    output.print(view_of(rows, is_by_clock=history.is_by_clock))
    for line in _ends(replayer, history):
        output.say(line)
    files: dict[Path, str] = {}
    if options.json_path is not None:
        document = document_of(rows, replayer, notes)
        files[options.json_path] = json.dumps(document, indent=1) + "\n"
    if options.plot is not None:
        files[options.plot] = plot_of(rows, names)
    for path, text in files.items():
        with replaced(path) as file:
            file.write(text.encode())
        output.say(f"{path}: {len(rows)} versions")


def _ends(replayer: Replay, history: History) -> Iterator[str]:
    """The lines after the versions."""
    if history.unfinished:
        clocks = sorted({clock for clock, _ in history.unfinished})
        yield (
            f"{len(history.unfinished)} more steps, of clocks {clocks[0]} to {clocks[-1]}, are not "
            "in every range, and are no versions"
        )
    if history.lost_count:
        yield f"{history.lost_count} clocks are in no log, and are no versions"
    late = next((t for t in replayer.tables if t.table_id == history.late_table), None)
    if late is not None:
        remedy = ": --table with the others shows them" * (len(replayer.tables) > 1)
        yield (
            f"{history.earlier_count:,} steps came before table '{late.title}' had its initial "
            f"values, and are no versions{remedy}"
        )
    if replayer.checked_count:
        yield f"equal, bit for bit, to {replayer.checked_count} snapshots in the log"


# --- one version


def _export(
    out: Path, replayer: Replay, options: ReplayOptions, output: Output, bars: Progress
) -> int:
    position, name = _wanted(replayer, options)
    task = bars.add_task("replaying", total=replayer.change_count)
    dense = replayer.only([table for table in replayer.tables if table.spec.rows is None])

    def read(table: Table, block: int) -> bytes:
        return bytes(dense.block(table, block).tensors[0][1])

    beside: list[Written] = []
    row_count = 0
    with Spool(out) as spool:
        go_to(dense, position, partial(bars.advance, task))
        for table in replayer.tables:
            if table.spec.rows is None:
                continue
            spooled = SpooledRows(table, spool)
            for part in replayer.by_range(table):
                go_to(part, position, partial(bars.advance, task))
                for partition in part.blocks:
                    for ids, rows in part.rows(table, partition):
                        spooled.add(partition, ids, rows)
            beside += spooled.written()
            row_count += spooled.count
        count = write_tables(out, dense.tables, read, beside)
    rows_of_it = f" and {row_count:,} rows" if beside else ""
    output.say(f"{out}: {count} tensors{rows_of_it} at {name}")
    return 0


def _wanted(replayer: Replay, options: ReplayOptions) -> tuple[int, str]:
    if options.clock is not None:
        problem = replayer.torn_at(options.clock)
        if problem:
            raise InvalidUpdateLog(
                f"the tables were never at clock {options.clock}: {problem}; --at takes any version"
            )
        return options.clock, f"clock {options.clock}"
    versions = replayer.history.versions
    number = versions[-1].number if options.at is None else options.at
    version = next((version for version in versions if version.number == number), None)
    if version is None:
        raise InvalidConfig(f"there is no version {number}; {_extent(versions)}")
    when = datetime.fromtimestamp(version.time_s, UTC).isoformat(timespec="milliseconds")
    return version.position, f"version {number}, clock {version.clock}, of {when}"


def _evaluator(given: str) -> Loss:
    """The function MODULE:FUNCTION, or FILE.py:FUNCTION."""
    module_name, _, name = given.rpartition(":")
    if not module_name or not name:
        raise InvalidConfig(
            f"--evaluate is '{given}'; expected MODULE:FUNCTION or FILE.py:FUNCTION"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = _file(Path(module_name)) if module_name.endswith(".py") else None
        found: Any = getattr(module or importlib.import_module(module_name), name)
    except (ImportError, OSError, AttributeError) as error:
        raise InvalidConfig(f"--evaluate is '{given}': {error}") from error
    if not callable(found):
        raise InvalidConfig(f"--evaluate is '{given}', which cannot be called")

    def loss(tensors: dict[str, torch.Tensor]) -> float:
        value = found(tensors)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # the last: a tensor of several elements
            what = type(value).__name__
            raise InvalidConfig(
                f"--evaluate '{given}' returned a {what}; expected a number"
            ) from None

    return loss


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
