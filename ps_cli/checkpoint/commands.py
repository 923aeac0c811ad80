"""Commands of `pushpull checkpoint` that work on files: list, show, verify, prune, compact, diff.

A URL is that of one checkpoint, or of a root with several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ps_cli.console.output import Output
from ps_cli.console.words import size, spans
from ps_core.errors import InvalidCheckpoint, listed
from ps_core.manifest import Manifest, number_of, to_json
from ps_runtime.checkpoint.compaction import compact
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.pruning import prune
from ps_runtime.checkpoint.reader import CheckpointReader, problems_of
from ps_runtime.checkpoint.store import CheckpointStore, resolve

_SHOWN_SPAN_COUNT = 20
"""The most spans of differing blocks that are named."""


def list_checkpoints(url: str, output: Output) -> int:
    store = CheckpointStore(url)
    entries = store.entries()
    if not entries:
        output.say(f"no checkpoint is under {store.url}")
        return 0
    view = Table(box=None, pad_edge=False, header_style="dim")
    view.add_column("checkpoint", no_wrap=True)
    view.add_column("created", no_wrap=True)
    view.add_column("clock", justify="right", no_wrap=True)
    view.add_column("size", justify="right", no_wrap=True)
    view.add_column("reason")
    view.add_column("state", overflow="fold")
    for name, found in entries:
        if isinstance(found, Manifest):
            figures = (found.created, _clocks(found), size(found.byte_count))
            view.add_row(name, *figures, found.reason, f"good{_needs(found)}")
        else:
            view.add_row(name, "", "", "", "", found.message.replace(f"{store.url}/", ""))
    output.print(view)
    return 0


def show_checkpoint(url: str, output: Output, *, as_json: bool) -> int:
    with opened(url, output) as reader:
        manifest = reader.manifest
        if as_json:
            output.say(to_json(manifest))
            return 0
        output.say(reader.directory.url)
        by = f" by cluster {manifest.cluster_id} of {manifest.worker_count} workers"
        output.say(
            f"made {manifest.created}{by * (not manifest.is_imported)}: "
            f"{manifest.reason or 'no reason given'}; {size(manifest.byte_count)}"
        )
        if not manifest.is_full:
            output.say(
                f"refers to {manifest.referred_block_count} blocks of "
                f"{size(manifest.referred_byte_count)} in {', '.join(manifest.bases)}"
            )
        for saved in manifest.tables:
            spec = reader.tables[saved.name].spec
            torn = ", torn: each range at a moment of its own" * saved.is_torn
            trained = f"{spec.optimizer.label}, {saved.consistency}, clock {saved.clock}{torn}"
            output.say(
                f"table {saved.name}: {spec.size_words} in {saved.block_count} blocks, "
                f"{'any optimizer' if manifest.is_imported else trained}"
            )
        for part in manifest.parts:
            blocks, referred = sum(part.tables.values()), part.referred_block_count
            more = f", {referred} of them elsewhere ({size(part.referred_byte_count)})"
            more *= bool(referred)
            output.say(f"part {part.file}: {size(part.byte_count)}, {blocks} blocks{more}")
        for worker in manifest.workers:
            state = f"{worker.file}, {size(worker.byte_count)}" if worker.file else "no state"
            if worker.problem:
                state = f"its state is lost: {worker.problem}"
            output.say(f"worker {worker.rank}: clock {worker.clock}, {state}")
        for data_set in manifest.data_sets:
            done_count = data_set.issued_count - len(data_set.open_shards)
            output.say(
                f"data '{data_set.spec.name}': pass {data_set.pass_number}, {done_count} of "
                f"{data_set.spec.shard_count} shards done"
            )
    return 0


def verify_checkpoints(url: str, output: Output) -> int:
    """Read a checkpoint, or all under a root, and print the problems; 1 if there is one."""
    location = locate(url)
    one = CheckpointDirectory(location)
    if number_of(location.name) is not None or one.has_manifest():
        found = [one]
    else:
        store = CheckpointStore(location)
        found = [store.named(name) for name in store.names()]
        if not found:
            raise InvalidCheckpoint(f"no checkpoint is under {store.url}")
    are_bad = [_verify(directory, output, is_one=len(found) == 1) for directory in found]
    return int(any(are_bad))


def _verify(directory: CheckpointDirectory, output: Output, *, is_one: bool) -> bool:
    try:
        is_complete = is_one or directory.has_manifest()
    except InvalidCheckpoint as error:
        output.complain(error.message)
        return True
    if not is_complete:
        output.say(f"{directory.url}: not completed, passed over")
        return False
    try:
        manifest = directory.read_manifest()
        byte_count = manifest.byte_count + manifest.referred_byte_count
    except InvalidCheckpoint:
        byte_count = 0
    with progress_bars(output, DownloadColumn()) as progress:
        task = progress.add_task(directory.name, total=byte_count)
        problems = problems_of(directory, lambda count: progress.advance(task, count))
    if problems and not is_one and _is_removed(directory):
        output.say(f"{directory.url}: removed while it was read, passed over")
        return False
    for problem in problems:
        output.complain(problem)
    if not problems:
        output.say(f"{directory.url}: good, {size(byte_count)} read")
    return bool(problems)


def _is_removed(directory: CheckpointDirectory) -> bool:
    """True if a checkpoint is none any more: its manifest goes first."""
    try:
        return not directory.has_manifest()
    except InvalidCheckpoint:
        return False


def progress_bars(output: Output, count: ProgressColumn) -> Progress:
    """Bars with a count of what is done, on a terminal only; they vanish at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    return Progress(*columns, disable=not output.is_terminal, transient=True)


def prune_checkpoints(url: str, keep: int, output: Output) -> int:
    store = CheckpointStore(url)
    for name in prune(store, keep):
        output.say(f"removed {name}")
    output.say(f"{len(store.names())} left under {store.url}")
    return 0


def diff_checkpoints(first: str, second: str, output: Output) -> int:
    """Print the differences of two checkpoints; 1 if there is one."""
    with opened(first, output) as left, opened(second, output) as right:
        output.say(f"from {left.directory.url} to {right.directory.url}")
        differs = False
        for name in sorted(left.tables.keys() | right.tables.keys()):
            for line in _table_differences(left, right, name):
                differs = True
                output.say(f"{name}: {line}")
    if not differs:
        output.say("the same tables")
    return int(differs)


def opened(url: str, output: Output) -> CheckpointReader:
    """The checkpoint at a URL, or the newest good one under it; prints newer ones that are bad."""
    resolved = resolve(url)
    for problem in resolved.passed_over:
        output.complain(f"passed over: {problem}")
    return resolved.reader


def compact_checkpoint(url: str, output: Output) -> int:
    """Write the checkpoint at a URL as a full one, and print its directory."""
    with opened(url, output) as reader:
        if reader.manifest.is_full:
            output.say(f"{reader.directory.url} is a full one; nothing is written")
            return 0
        store = CheckpointStore(reader.directory.location.parent)
        made = compact(store, reader)
        output.say(f"{store.named(made.directory).url} ({size(made.byte_count)})")
    return 0


def _needs(manifest: Manifest) -> str:
    """The numbers of the checkpoints that an incremental one needs, and the bytes in them."""
    if manifest.is_full:
        return ""
    numbers = ", ".join(str(number_of(base)) for base in manifest.bases)
    return f", needs {size(manifest.referred_byte_count)} of {numbers}"


def _clocks(manifest: Manifest) -> str:
    clocks = sorted({table.clock for table in manifest.tables})
    if len(clocks) < 2:
        return "".join(map(str, clocks))
    return f"{clocks[0]}-{clocks[-1]}"


def _table_differences(left: CheckpointReader, right: CheckpointReader, name: str) -> Iterator[str]:
    if name not in left.tables or name not in right.tables:
        yield f"only in {(left if name in left.tables else right).directory.url}"
        return
    one, other = left.manifest.table(name), right.manifest.table(name)
    for field in ("clock", "consistency"):
        before, after = getattr(one, field), getattr(other, field)
        if before != after:
            yield f"{field} {before} -> {after}"
    was, now = _flat(one.spec), _flat(other.spec)
    for field in sorted(was.keys() | now.keys()):
        if was.get(field) != now.get(field):
            yield f"spec {field} {was.get(field, 'unset')} -> {now.get(field, 'unset')}"
    specs = (left.tables[name].spec, right.tables[name].spec)
    if len({(spec.element_count, spec.block_elements, spec.dtype) for spec in specs}) > 1:
        yield "its blocks differ in size or type, and are not compared"
    elif len({spec.rows and (spec.rows.partition_count, spec.rows.seed) for spec in specs}) > 1:
        yield "its rows are spread over other partitions, and are not compared"
    elif specs[0].rows is not None:
        yield from _row_differences(left, right, name)
    else:
        yield from _block_differences(left, right, name)


def _row_differences(left: CheckpointReader, right: CheckpointReader, name: str) -> Iterator[str]:
    # Imported here, because list and verify run in images without numpy.
    from ps_cli.checkpoint.row_differences import (
        PartitionRows,
        RowCounts,
        compared,
        has_same_rows,
        row_count,
    )

    table, partitions = left.tables[name], []
    rows = RowCounts(row_count(left, table), row_count(right, table))
    for partition in range(table.block_count):
        ours, theirs = (reader.block(name, partition).crc32s for reader in (left, right))
        if ours != theirs:
            partitions.append(partition)
        if not has_same_rows(left, right, name, partition):
            read = (PartitionRows.read(reader, table, partition) for reader in (left, right))
            rows.add(compared(*read))
    if partitions:
        yield (
            f"{len(partitions)} of {table.block_count} partitions differ in rows or their state "
            f"({listed(spans(partitions), _SHOWN_SPAN_COUNT)}): of {rows.before:,} rows "
            f"{rows.other:,} have other values and {rows.gone:,} are gone; {rows.new:,} are new"
        )


def _block_differences(left: CheckpointReader, right: CheckpointReader, name: str) -> Iterator[str]:
    blocks, steps = set[int](), []
    largest: dict[str, float] = {}
    for block in range(left.tables[name].block_count):
        one, other = left.block(name, block), right.block(name, block)
        if one.steps != other.steps:
            steps.append(block)
        for tensor in sorted({*one.tensors, *other.tensors}):
            distance = _distance(left, right, (name, block, tensor))
            if distance is not None:
                blocks.add(block)
                known = largest.get(tensor, 0.0)
                largest[tensor] = max(known, distance, key=lambda far: (math.isnan(far), far))
    if steps:
        yield f"other step numbers in blocks {listed(spans(steps), _SHOWN_SPAN_COUNT)}"
    count, which = left.tables[name].block_count, listed(spans(blocks), _SHOWN_SPAN_COUNT)
    if blocks:
        by = ", ".join(f"{tensor} by up to {value:.6g}" for tensor, value in largest.items())
        yield f"{len(blocks)} of {count} blocks differ ({which}): {by}"


def _distance(
    left: CheckpointReader, right: CheckpointReader, place: tuple[str, int, str]
) -> float | None:
    """The largest difference of two tensors' elements; None if their bytes are the same.

    It is infinite if one tensor is missing, or they have other shapes, and NaN if an element is.
    """
    one, other = left.tensor(*place), right.tensor(*place)
    if one is None or other is None:
        return float("inf")
    if left.fingerprint(*place) == right.fingerprint(*place):
        return None
    if one.shape != other.shape:
        return float("inf")
    import numpy as np  # imported here, because list and verify run in images without numpy

    element = np.dtype("<f8" if one.dtype == "F64" else "<f4")
    ours, theirs = (
        np.frombuffer(reader.read(*place), element).astype(np.float64) for reader in (left, right)
    )
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(ours - theirs)))


def _flat(value: Any, path: str = "") -> dict[str, object]:
    """The leaves of a JSON value, by their paths."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {path: value}
    found: dict[str, object] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{path}.{name}" if path else str(name))
    return found
