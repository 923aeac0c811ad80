"""`pushpull replay --against`: compares the tables of an update log with a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ps_cli.checkpoint.commands import opened
from ps_cli.console.output import Output
from ps_cli.status.document import spans
from ps_core.errors import InvalidUpdateLog
from ps_core.manifest import SavedTable
from ps_core.tables.table import Table
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_server.replay.replayer import Replay, RunLog

_SHOWN_SPAN_COUNT = 20
_SHOWN_PROBLEM_COUNT = 5


def compare(run: RunLog, tables: Sequence[Table], url: str, output: Output) -> int:
    """Print the differences; 1 if there is one, or tables cannot be compared."""
    are_different = []
    with opened(url, output) as reader:
        where = reader.directory.url
        if not any(table.spec.name in reader.tables for table in tables):
            raise InvalidUpdateLog(f"{where} has none of the log's tables")
        for table in tables:
            if table.spec.name not in reader.tables:
                output.say(f"{table.spec.name}: it is not in {where}")
                are_different.append(True)
                continue
            saved = reader.manifest.table(table.spec.name)
            replay = Replay(run, [table], by_clock=True)
            how, problems = _go_to_checkpoint(replay, table, saved, reader)
            problems = problems or list(_differences(replay, table, reader))
            for problem in problems:
                output.say(f"{table.spec.name}: {problem}")
            if not problems:
                output.say(f"{table.spec.name}: equal, bit for bit, {how}")
            are_different.append(bool(problems))
    return int(any(are_different))


def _go_to_checkpoint(
    replay: Replay, table: Table, saved: SavedTable, reader: CheckpointReader
) -> tuple[str, list[str]]:
    """Replay up to the checkpoint; a phrase that says up to where, and the problems."""
    torn = replay.torn_at(saved.clock)
    if not torn and not saved.is_torn:
        replay.go_to(saved.clock)
        return f"at clock {saved.clock}", []
    if not saved.is_torn:
        return "", [f"cannot be compared at clock {saved.clock}: {torn}"]
    wanted = {
        (table.table_id, block): reader.block(saved.name, block).version
        for block in range(table.block_count)
    }
    problems = replay.go_to_versions(wanted)
    more = [f"{len(problems) - _SHOWN_PROBLEM_COUNT} more blocks"]
    cut = problems[:_SHOWN_PROBLEM_COUNT] + more * (len(problems) > _SHOWN_PROBLEM_COUNT)
    return "each block at its version in the checkpoint", cut


def _differences(replay: Replay, table: Table, reader: CheckpointReader) -> Iterator[str]:
    name = table.spec.name
    others: dict[str, list[int]] = {}
    for block in range(table.block_count):
        made, stored = replay.block(table, block), reader.block(name, block)
        if _steps(made.steps) != _steps(stored.steps):
            others.setdefault("counts of steps", []).append(block)
        if made.version != stored.version:
            others.setdefault("counts of updates", []).append(block)
        tensors = dict(made.tensors)
        for tensor in sorted({*tensors, *stored.tensors}):
            if tensor not in tensors or tensor not in stored.tensors:
                others.setdefault(f"{tensor} in one of them only", []).append(block)
            elif tensors[tensor] != reader.read(name, block, tensor):
                others.setdefault(tensor, []).append(block)
    for subject, blocks in others.items():
        found = spans(blocks)
        listed = ", ".join(found[:_SHOWN_SPAN_COUNT]) + ", ..." * (len(found) > _SHOWN_SPAN_COUNT)
        yield f"{subject} differ in {len(blocks)} of {table.block_count} blocks ({listed})"


def _steps(steps: Sequence[int]) -> tuple[int, ...]:
    return tuple(steps[:1]) if len(set(steps)) == 1 else tuple(steps)
