"""`pushpull checkpoint export --since`: the differences of a checkpoint from an earlier one of its
run, as a file that turns the export of the earlier one into that of the later one.

Rules of the file:
    - A table of rows NAME has three tensors: NAME/ids and NAME/rows of the rows that are new or
      have other values, in no order, and NAME/gone, the ids that only the earlier one has.
    - A tensor of a dense table is there, whole, if a bit of it differs or the earlier one has no
      such table; so is one that hybrid workers keep.
    - Its metadata have both checkpoints' directories: `since`, and `checkpoint`.

Partitions and blocks with the same checksums in both are not read. Of a table of rows, both
versions of a partition are in memory at a time; of a dense table, those of a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ps_cli.checkpoint.commands import opened
from ps_cli.checkpoint.export import chosen_tables, has_parameters, tables_with
from ps_cli.checkpoint.row_differences import (
    PartitionRows,
    RowCounts,
    compared,
    has_same_rows,
    row_count,
)
from ps_cli.checkpoint.workers_half import workers_halves
from ps_cli.console.output import Output
from ps_cli.console.spool import Spool
from ps_cli.console.tensor_file import Apart, TensorEntry, Written, write_tables
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.tables.elements import DType
from ps_core.tables.table import Table
from ps_runtime.checkpoint.directory import locate
from ps_runtime.checkpoint.part_file import VALUES
from ps_runtime.checkpoint.reader import CheckpointReader

_WITHOUT = "or export all of it, without --since"


def export_since(url: str, since: str, out: Path, prefix: str, output: Output) -> int:
    """Write what has changed in the tables of a checkpoint since an earlier one."""
    with opened(url, output) as later, _opened_earlier(since, output) as earlier:
        _check_order(earlier, later)
        halves = workers_halves(later, prefix)
        tables = chosen_tables(later, prefix, output, may_be_none=bool(halves))
        known = {t.spec.name: t for t in tables_with(earlier, prefix) if has_parameters(t)}
        _check_tables(earlier, later, tables, known)
        with Spool(out) as spool:
            beside, unchanged, lines = list[Written](), set[str](), list[str]()
            for table in tables:
                before = earlier if table.spec.name in known else None
                if table.spec.rows is not None:
                    changes = _changed_rows(before, later, table, spool)
                    beside += changes.written()
                    lines.append(changes.words)
                    continue
                same = set() if before is None else _same_tensors(before, later, table)
                count = len(table.spec.tensors)
                lines.append(f"{table.spec.name}: {count - len(same)} of {count} tensors differ")
                unchanged |= same
            if halves:
                with _with_remedy():
                    were = workers_halves(earlier, prefix)
                kept = [each for name, each in halves.items() if were.get(name) != each]
                lines.append(f"the workers' half: {len(kept)} of {len(halves)} tensors differ")
                beside += [(entry, [value]) for entry, value in kept]
            dense = [table for table in tables if table.spec.rows is None]
            notes = {"since": earlier.directory.name, "checkpoint": later.directory.name}
            count = write_tables(
                out, dense, partial(_block, later), beside, Apart(left_out=unchanged), notes
            )
        for line in lines:
            output.say(line)
        output.say(
            f"{out}: {count} tensors that turn the export of {earlier.directory.url} into that of "
            f"{later.directory.url}"
        )
    return 0


def _block(reader: CheckpointReader, table: Table, block: int) -> bytearray:
    return reader.read(table.spec.name, block)


# --- which two checkpoints


@contextlib.contextmanager
def _with_remedy() -> Iterator[None]:
    """Add to a fault of the earlier checkpoint what to do."""
    try:
        yield
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(
            f"{error.message}; expected --since of a good checkpoint, {_WITHOUT}"
        ) from error


def _opened_earlier(since: str, output: Output) -> CheckpointReader:
    with _with_remedy():
        reader = opened(since, output)
    if reader.directory.url != locate(since).url:
        reader.close()
        raise InvalidConfig(
            f"--since is {since}, a root, whose newest checkpoint is another one each time; "
            f"expected one checkpoint's directory, for example {reader.directory.url}"
        )
    return reader


def _check_order(earlier: CheckpointReader, later: CheckpointReader) -> None:
    """InvalidCheckpoint unless `later` is a checkpoint of the same run, or of one that went on from
    it, and no older.
    """
    was, now = earlier.manifest, later.manifest
    is_newer = was.number > now.number
    if was.timeline != now.timeline:  # numbers begin again under another root
        is_newer = not now.is_imported and now.timeline in was.lineage
        if not is_newer and (was.is_imported or was.timeline not in now.lineage):
            raise InvalidCheckpoint(
                f"{later.directory.url} is of another run than {earlier.directory.url}, which "
                f"--since names; expected one of the same run, or of a run that it went on from, "
                f"{_WITHOUT}"
            )
    if is_newer:
        raise InvalidCheckpoint(
            f"{earlier.directory.url}, which --since names, is newer than {later.directory.url}; "
            "expected them the other way round: export the newer one, --since the older one"
        )


def _check_tables(
    earlier: CheckpointReader,
    later: CheckpointReader,
    tables: list[Table],
    known: dict[str, Table],
) -> None:
    """InvalidCheckpoint if a table of the earlier one is missing, or has another layout."""
    left = dict(known)
    for table in tables:
        was = left.pop(table.spec.name, None)
        if was is not None and _layout(was) != _layout(table):
            words, now = _layout_words(was), _layout_words(table)
            but = " with other names or shapes" * (words == now)
            _refuse(
                f"table '{table.spec.name}' is {now} in {later.directory.url}, and {words}{but} in "
                f"{earlier.directory.url}"
            )
    for name in left:
        _refuse(f"table '{name}' of {earlier.directory.url} is not in {later.directory.url}")


def _refuse(reason: str) -> NoReturn:
    raise InvalidCheckpoint(f"{reason}; expected the same tables: give a later --since, {_WITHOUT}")


def _layout(table: Table) -> tuple[Any, ...]:
    spec = table.spec
    if spec.rows is not None:
        return spec.dtype, spec.element_count, spec.rows.partition_count, spec.rows.seed
    return spec.dtype, spec.element_count, spec.block_elements, spec.tensors


def _layout_words(table: Table) -> str:
    spec, count = table.spec, table.block_count
    if spec.rows is not None:
        return f"{spec.size_words} in {count} partitions with seed {spec.rows.seed}"
    return f"{spec.size_words} in {count} blocks and {len(spec.tensors)} tensors"


# --- what has changed


@dataclass(frozen=True, slots=True)
class _ChangedRows:
    """The difference of a table of rows: where each tensor's bytes are."""

    table: Table
    spool: Spool
    counts: RowCounts
    ids: list[slice] = field(default_factory=list)
    rows: list[slice] = field(default_factory=list)
    gone: list[slice] = field(default_factory=list)

    @property
    def words(self) -> str:
        """The counts, for people."""
        found = self.counts
        return (
            f"{self.table.spec.name}: {found.other + found.new:,} of {found.after:,} rows changed "
            f"({found.new:,} of them new), {found.gone:,} of {found.before:,} are gone"
        )

    def written(self) -> Iterator[Written]:
        """The tensors of the file."""
        spec, found = self.table.spec, self.counts
        dtype = "F64" if spec.dtype is DType.FLOAT64 else "F32"
        changed = found.other + found.new
        for name, kind, shape, places in (
            ("ids", "I64", (changed,), self.ids),
            ("rows", dtype, (changed, spec.element_count), self.rows),
            ("gone", "I64", (found.gone,), self.gone),
        ):
            entry = TensorEntry(f"{spec.name}/{name}", kind, shape)
            yield entry, self.spool.read(places)


def _changed_rows(
    before: CheckpointReader | None, after: CheckpointReader, table: Table, spool: Spool
) -> _ChangedRows:
    """Compare the rows of a table; None: there was no such table."""
    was = 0
    if before is not None:
        with _with_remedy():
            was = row_count(before, table)
    found = _ChangedRows(table, spool, RowCounts(was, row_count(after, table)))
    for partition in range(table.block_count):
        known = PartitionRows.none(table)
        if before is not None:
            if has_same_rows(before, after, table.spec.name, partition):
                continue
            with _with_remedy():
                known = PartitionRows.read(before, table, partition)
        now = PartitionRows.read(after, table, partition)
        difference = compared(known, now)
        found.counts.add(difference)
        for some in now.pieces(len(difference.changed)):
            places = difference.changed[some]
            found.ids.append(spool.put(now.ids[places]))
            found.rows.append(spool.put(now.bits[places]))
        found.gone.append(spool.put(difference.gone))
    return found


def _same_tensors(before: CheckpointReader, after: CheckpointReader, table: Table) -> set[str]:
    """The names of a dense table's tensors that are the same, bit by bit."""
    name, width = table.spec.name, table.spec.accumulator_element_bytes
    same = set(range(len(table.spec.tensors)))
    for block in range(table.block_count):
        segments = [each for each in table.segments(block) if each.tensor in same]
        was_print, now_print = (each.fingerprint(name, block, VALUES) for each in (before, after))
        if not segments or was_print == now_print:
            continue
        with _with_remedy():
            was = before.read(name, block)
        now = after.read(name, block)
        for each in segments:
            own = slice(each.begin * width, each.end * width)
            if was[own] != now[own]:
                same.discard(each.tensor)
    return {table.spec.tensors[index].name for index in same}
