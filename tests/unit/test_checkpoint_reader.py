"""A checkpoint whose files are each whole, and do not make one; and what a URL stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.manifest import Manifest, SavedPart, SavedTable, SavedWorker
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec, TensorSpec
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_runtime.checkpoint.pruning import prune
from ps_runtime.checkpoint.reader import CheckpointReader, problems_of
from ps_runtime.checkpoint.store import CheckpointStore, resolve
from tests.unit.checkpoint_files import (
    CLUSTER_ID,
    manifest_of,
    spec_json,
    write_checkpoint,
    write_worker,
)

SPEC = TableSpec(
    name="t",
    dtype=DType.FLOAT32,
    element_count=130,
    optimizer=OptimizerSpec(OptimizerKind.SGD),
    block_elements=64,
    tensors=(TensorSpec("a", (100,), 0), TensorSpec("b", (30,), 100)),
).validated()
TABLE = SavedTable("t", spec_json(SPEC), "bsp", 9, False, 3)


@dataclass(frozen=True)
class Block:
    """A block of a part that is written."""

    number: int
    elements: int
    steps: tuple[int, ...] = (9,)
    dtype: str = "F32"
    state: int = 0


GOOD = (Block(0, 64), Block(1, 64, steps=(9, 8)), Block(2, 2, state=2))


def part(
    directory: CheckpointDirectory, file: str, blocks: Sequence[Block], number: int = 1
) -> SavedPart:
    path = directory.begin(file)
    writer = PartWriter(path, [PlannedTable("t", 9, ("values", "momentum_buffer"), 20)])
    width = {"F32": 4, "F64": 8}
    for block in blocks:
        content = bytes(block.elements * width[block.dtype])
        writer.append("t", block.number, "values", content, block.dtype)
        if block.state:
            writer.append("t", block.number, "momentum_buffer", bytes(4 * block.state))
        writer.note_block("t", block.number, 9, block.steps)
    written = writer.finish(number, CLUSTER_ID)
    directory.commit(file, path)
    return SavedPart(file, written.byte_count, written.header_sha256, {"t": len(blocks)})


Parts = Mapping[str, Sequence[Block]]


def write(folder: Path, parts: Parts, **changes: Any) -> CheckpointDirectory:
    directory = CheckpointStore(str(folder)).directory(1, CLUSTER_ID)
    directory.create()
    saved = tuple(part(directory, file, blocks) for file, blocks in parts.items())
    manifest = replace(manifest_of(1, saved), tables=(TABLE,))
    directory.write_manifest(replace(manifest, **changes))
    return directory


def assert_refused(directory: CheckpointDirectory, reason: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=reason):
        CheckpointReader(directory)
    assert any(reason in problem for problem in problems_of(directory))


def test_a_good_one_is_read(tmp_path: Path) -> None:
    directory = write(tmp_path, {"a": GOOD[:1], "b": GOOD[1:]})
    assert problems_of(directory) == []
    with CheckpointReader(directory) as reader:
        assert (reader.file_of("t", 0), reader.file_of("t", 2)) == ("a", "b")
        assert reader.block("t", 1).steps == (9, 8)
        assert reader.tensor("t", 1, "momentum_buffer") is None
        stored = reader.tensor("t", 2, "momentum_buffer")
        assert stored is not None
        assert stored.byte_count == 8
        assert reader.read("t", 2) == bytes(8)
        values = np.ones(64, np.float32)
        reader.read_block_into("t", 0, "values", values.data.cast("B"))
        assert not values.any()
        with pytest.raises(InvalidCheckpoint, match="table 't' has blocks 0 to 2; got 3"):
            reader.read("t", 3)
        with pytest.raises(InvalidCheckpoint, match="has no table 'u'"):
            reader.read("u", 0)
        with pytest.raises(InvalidCheckpoint, match="has no tensor 't/0/exp_avg'"):
            reader.read("t", 0, "exp_avg")


def test_a_twin_reads_the_same_from_files_of_its_own(tmp_path: Path) -> None:
    with CheckpointReader(write(tmp_path, {"a": GOOD[:1], "b": GOOD[1:]})) as reader:
        assert reader.read("t", 0) == bytes(256)
        with reader.twin() as twin:
            mine, its = reader._opened(reader._source("t", 0)), twin._opened(twin._source("t", 0))
            assert mine is not its
            assert mine.fileno() != its.fileno()
            assert twin.read("t", 0) == bytes(256)
            assert twin.read("t", 1) == bytes(256)
        assert its.closed
        assert reader.read("t", 0) == bytes(256)
        assert list(reader._open) == [reader._source("t", 0).url]


WRONG: list[tuple[Parts, str]] = [
    ({"a": GOOD[:2], "b": GOOD[1:2]}, "block 1 of table 't' is in a and in b; expected"),
    ({"a": (*GOOD[:2], Block(3, 2))}, "block 2 of table 't' is in no file"),
    ({"a": (*GOOD[:2], Block(2, 3))}, "a: tensor 't/2/values' is F32 of shape (3,); expected F32"),
    ({"a": (*GOOD[:2], Block(2, 2, dtype="F64"))}, "'t/2/values' is F64 of shape (2,); expected"),
    ({"a": (*GOOD[:2], Block(2, 2, state=1))}, "'t/2/momentum_buffer' is F32 of shape (1,)"),
    ({"a": (*GOOD[:2], Block(2, 2, steps=(1, 2)))}, "a: block 2 of 't' has 2 steps"),
]


@pytest.mark.parametrize(("parts", "reason"), WRONG)
def test_blocks_that_make_no_table_are_named(parts: Parts, reason: str, tmp_path: Path) -> None:
    directory = write(tmp_path, parts)
    with pytest.raises(InvalidCheckpoint) as caught:
        CheckpointReader(directory)
    assert reason in caught.value.message
    assert any(reason in problem for problem in problems_of(directory))


SPECS: list[tuple[dict[str, Any], str]] = [
    ({}, "the spec of table 't' is no TableSpec: dtype is unset"),
    ({"wheels": 4}, 'no field named "wheels"'),
    ({**spec_json(SPEC), "name": "u"}, "is of 'u' with 3 blocks; expected 't' with 3"),
    ({**spec_json(SPEC), "block_elements": 128}, "is of 't' with 2 blocks; expected 't' with 3"),
    ({**spec_json(SPEC), "element_count": "131"}, "its tensors have 130 elements"),
]


@pytest.mark.parametrize(("spec", "reason"), SPECS)
def test_a_spec_of_another_table_is_named(
    spec: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory = write(tmp_path, {"a": GOOD}, tables=(replace(TABLE, spec=spec),))
    assert_refused(directory, reason)


def test_a_part_with_other_counts_than_the_manifests_is_named(tmp_path: Path) -> None:
    directory = CheckpointStore(str(tmp_path)).directory(1, CLUSTER_ID)
    directory.create()
    saved = replace(part(directory, "a", GOOD[:2]), tables={"t": 3})
    directory.write_manifest(replace(manifest_of(1, (saved,)), tables=(TABLE,)))
    assert_refused(directory, "a: it has blocks {'t': 2}; the manifest says {'t': 3}")


def test_a_part_of_another_checkpoint_is_named_though_the_manifest_has_it(tmp_path: Path) -> None:
    directory = CheckpointStore(str(tmp_path)).directory(1, CLUSTER_ID)
    directory.create()
    saved = part(directory, "a", GOOD, number=2)
    directory.write_manifest(replace(manifest_of(1, (saved,)), tables=(TABLE,)))
    assert_refused(directory, f"a: it is of checkpoint 2 of cluster {CLUSTER_ID}; expected 1 of")


Change = Callable[[SavedWorker], SavedWorker]


@pytest.mark.parametrize(
    "change", [lambda saved: replace(saved, rank=1), lambda saved: replace(saved, clock=40)]
)
def test_another_workers_state_is_named(change: Change, tmp_path: Path) -> None:
    directory = CheckpointStore(str(tmp_path)).directory(1, CLUSTER_ID)
    directory.create()
    saved = change(write_worker(directory, 1))
    manifest = manifest_of(1, (part(directory, "a", GOOD),), (saved,))
    directory.write_manifest(replace(manifest, tables=(TABLE,)))
    reason = f"it is not of the worker of rank {saved.rank} at clock {saved.clock}"
    assert_refused(directory, reason)


def test_a_workers_part_is_read_and_a_lost_one_says_why(tmp_path: Path) -> None:
    directory = CheckpointStore(str(tmp_path)).directory(7, CLUSTER_ID)
    write_checkpoint(directory, 7)
    with CheckpointReader(directory) as reader:
        saved, lost = reader.manifest.workers
        header = reader.headers[saved.file]
        assert header.worker is not None
        assert header.worker.state == {"generators": {"torch": {"tensor": "torch"}}}
        assert reader.read_file(saved.file, "torch") == bytes(range(7, 23))
        assert lost.problem == "it was killed"


def test_a_root_stands_for_its_newest_good_one(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    with pytest.raises(InvalidCheckpoint, match="has no good checkpoint: there is none"):
        resolve(str(tmp_path))
    manifests = [write_checkpoint(store.directory(n, CLUSTER_ID), n) for n in (9, 10, 11)]
    (tmp_path / manifests[2].directory / "server-1.safetensors").write_bytes(b"")
    found = resolve(f"file://{tmp_path}/")
    with found.reader as reader:
        assert reader.manifest == manifests[1]
    assert ["server-1" in reason for reason in found.passed_over] == [True]
    good = store.newest_good()
    assert good is not None
    assert good.name == manifests[1].directory
    assert store.next_number() == 12
    states = [isinstance(found, Manifest) for _, found in store.entries()]
    assert states == [True, True, False]
    with pytest.raises(InvalidCheckpoint, match=f"; .*{manifests[1].directory} is good"):
        resolve(str(tmp_path / manifests[2].directory))
    with resolve(str(tmp_path / manifests[0].directory)).reader as reader:
        assert reader.manifest.number == 9


def test_a_copy_under_another_name_is_one_checkpoint(tmp_path: Path) -> None:
    manifest = write_checkpoint(CheckpointStore(str(tmp_path)).directory(1, CLUSTER_ID), 1)
    (tmp_path / manifest.directory).rename(tmp_path / "best")
    with resolve(str(tmp_path / "best")).reader as reader:
        assert reader.manifest == manifest


def test_what_is_no_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="URL is empty"):
        locate("")
    with pytest.raises(InvalidConfig, match="Protocol not known: nonsense"):
        CheckpointStore("nonsense://x")
    for lacking in ("github://a", "reference://", "dir://", "generic://x", "a\0b", "\ud800"):
        with pytest.raises(InvalidConfig):
            locate(lacking)
    with pytest.raises(InvalidConfig, match="keep is 0; expected at least 1"):
        prune(CheckpointStore(str(tmp_path)), 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidCheckpoint, match="cannot be made: Not a directory"):
        CheckpointStore(str(tmp_path / "file")).directory(1, "c").create()


def test_nothing_is_removed_where_nothing_is_good(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    store.directory(1, CLUSTER_ID).create()
    assert prune(store, 1) == []
    assert store.names() == ["00000001-3fa9c1d2"]
