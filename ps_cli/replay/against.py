"""`pushpull replay --against`: compares the tables of an update log with a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.progress import Progress

from ps_cli.console.output import Output
from ps_cli.console.words import spans
from ps_cli.replay.turns import check_memory, go_to
from ps_core.errors import InvalidConfig, InvalidUpdateLog
from ps_core.keys import TableId
from ps_core.manifest import SavedTable
from ps_core.runs import words
from ps_core.tables.table import Table
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_server.replay.replayer import Replay, RowDifference, RunLog, differences

_SHOWN_SPAN_COUNT = 20
_SHOWN_PROBLEM_COUNT = 5


def compare(
    run: RunLog,
    tables: Sequence[Table],
    reader: CheckpointReader,
    output: Output,
    bars: Progress,
) -> int:
    """Print the differences; 1 if there is one, or tables cannot be compared."""
    are_different = []
    where = reader.directory.url
    named = next((table for table in tables if table.run), None)
    if named is not None:
        raise InvalidConfig(
            f"table '{named.spec.name}' is of {words(named.run)}, and checkpoints have tables of "
            "the run without a name only"
        )
    if not any(table.spec.name in reader.tables for table in tables):
        raise InvalidUpdateLog(f"{where} has none of the log's tables")
    for table in tables:
        if table.spec.name not in reader.tables:
            output.say(f"{table.spec.name}: it is not in {where}")
            are_different.append(True)
            continue
        comparison = _Comparison(run, table, reader, bars)
        problems = comparison.problems()
        for problem in problems:
            output.say(f"{table.spec.name}: {problem}")
        if not problems:
            output.say(f"{table.spec.name}: equal, bit for bit, {comparison.where}")
        are_different.append(bool(problems))
    return int(any(are_different))


class _Comparison:
    """One table of the log with that of the checkpoint.

    Attributes:
        where: up to where it is replayed, in words.
    """

    def __init__(self, run: RunLog, table: Table, reader: CheckpointReader, bars: Progress) -> None:
        self._replay = Replay(run, [table], by_clock=True)
        self._table = table
        self._saved: SavedTable = reader.manifest.table(table.spec.name)
        self._reader = reader
        self._bars = bars
        self._wanted: Mapping[tuple[TableId, int], int] | None = None
        self.where = f"at clock {self._saved.clock}"

    def problems(self) -> list[str]:
        """The differences, or the reasons that the tables cannot be compared."""
        table, saved = self._table, self._saved
        other = self._reader.tables[saved.name]
        if _layout(other) != _layout(table):
            here, there = table.spec.size_words, other.spec.size_words
            return [f"it is {here} in the log and {there} in the checkpoint, or cut otherwise"]
        torn = self._replay.torn_at(saved.clock)
        if torn and not saved.is_torn:
            return [f"cannot be compared at clock {saved.clock}: {torn}"]
        if saved.is_torn:
            noun = "block" if table.spec.rows is None else "partition"
            self.where = f"each {noun} at its version in the checkpoint"
            self._wanted = {
                (table.table_id, block): self._reader.block(saved.name, block).version
                for block in range(table.block_count)
            }
        task = self._bars.add_task(f"replaying {saved.name}", total=self._replay.change_count)
        try:
            if table.spec.rows is not None:
                return self._row_problems(partial(self._bars.advance, task))
            short = self._go(self._replay, partial(self._bars.advance, task))
            return _cut(short) or list(_differences(self._replay, table, self._reader))
        finally:
            self._bars.remove_task(task)

    def _go(self, replay: Replay, told: Callable[[int], object]) -> list[str]:
        """Replay up to the checkpoint; the blocks that are not there then."""
        if self._wanted is not None:
            problems = replay.go_to_versions(
                self._wanted, partial(self._is_found, replay), check_memory
            )
            told(replay.made_count)
            return problems
        go_to(replay, self._saved.clock, told)
        return []

    def _is_found(self, replay: Replay, table: Table, block: int) -> bool:
        """True if a block is as in the checkpoint; of rows, which have no edits, always."""
        return table.spec.rows is not None or not any(_subjects(replay, table, block, self._reader))

    def _row_problems(self, told: Callable[[int], object]) -> list[str]:
        """The problems of a table of rows, of which a range is in memory at a time."""
        found, short = _RowProblems(self._table), list[str]()
        reader, name = self._reader, self._table.spec.name
        for part in self._replay.by_range(self._table):
            short += self._go(part, told)
            for partition in part.blocks if not short else ():
                made, stored = part.block(self._table, partition), reader.block(name, partition)
                if made.version != stored.version:
                    found.versions.append(partition)
                tensors = {each: reader.read(name, partition, each) for each in stored.tensors}
                for difference in differences(dict(made.tensors), tensors):
                    found.add(partition, difference)
        return _cut(short) or list(found.words())


@dataclass(slots=True)
class _RowProblems:
    """The differences of a table's rows, by subject."""

    table: Table
    versions: list[int] = field(default_factory=list)
    found: dict[str, tuple[int, int, list[int]]] = field(default_factory=dict)

    def add(self, partition: int, difference: RowDifference) -> None:
        subject, more, first = difference
        count, first_id, partitions = self.found.get(subject, (0, first, []))
        self.found[subject] = count + more, min(first_id, first), [*partitions, partition]

    def words(self) -> Iterator[str]:
        of = f"of {self.table.block_count} partitions"
        if self.versions:
            yield f"counts of updates differ in {len(self.versions)} {of} {_listed(self.versions)}"
        for subject, (count, first_id, partitions) in self.found.items():
            yield (
                f"{count:,} {subject}, in {len(partitions)} {of} {_listed(partitions)}; the lowest "
                f"id is {first_id}"
            )


def _layout(table: Table) -> tuple[object, ...]:
    spec = table.spec
    if spec.rows is not None:
        return spec.dtype, spec.element_count, spec.rows.partition_count, spec.rows.seed
    return spec.dtype, spec.element_count, table.block_count, spec.block_elements


def _cut(problems: list[str]) -> list[str]:
    more = [f"{len(problems) - _SHOWN_PROBLEM_COUNT} more"]
    return problems[:_SHOWN_PROBLEM_COUNT] + more * (len(problems) > _SHOWN_PROBLEM_COUNT)


def _differences(replay: Replay, table: Table, reader: CheckpointReader) -> Iterator[str]:
    others: dict[str, list[int]] = {}
    for block in range(table.block_count):
        for subject in _subjects(replay, table, block, reader):
            others.setdefault(subject, []).append(block)
    for subject, blocks in others.items():
        yield f"{subject} differ in {len(blocks)} of {table.block_count} blocks {_listed(blocks)}"


def _subjects(replay: Replay, table: Table, block: int, reader: CheckpointReader) -> Iterator[str]:
    """The differences of a block."""
    name = table.spec.name
    made, stored = replay.block(table, block), reader.block(name, block)
    if _steps(made.steps) != _steps(stored.steps):
        yield "counts of steps"
    if made.version != stored.version:
        yield "counts of updates"
    tensors = dict(made.tensors)
    for tensor in sorted({*tensors, *stored.tensors}):
        if tensor not in tensors or tensor not in stored.tensors:
            yield f"{tensor} in one of them only"
        elif tensors[tensor] != reader.read(name, block, tensor):
            yield tensor


def _listed(blocks: Sequence[int]) -> str:
    found = spans(blocks)
    more = ", ..." * (len(found) > _SHOWN_SPAN_COUNT)
    return f"({', '.join(found[:_SHOWN_SPAN_COUNT])}{more})"


def _steps(steps: Sequence[int]) -> tuple[int, ...]:
    return tuple(steps[:1]) if len(set(steps)) == 1 else tuple(steps)
