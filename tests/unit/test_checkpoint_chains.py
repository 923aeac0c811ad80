"""Checkpoints that refer to others: followed, judged, pruned and made full again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Manifest
from ps_runtime.checkpoint.compaction import compact
from ps_runtime.checkpoint.directory import CheckpointDirectory
from ps_runtime.checkpoint.part_file import StoredBlock
from ps_runtime.checkpoint.pruning import prune
from ps_runtime.checkpoint.reader import CheckpointReader, problems_of
from ps_runtime.checkpoint.store import CheckpointStore, resolve
from ps_runtime.system.disk import Disk, Payload
from scheduler.edge.checkpointing import write_manifest
from tests.unit.checkpoint_files import (
    CLUSTER_ID,
    COUNTERS,
    SPECS,
    WEIGHTS,
    Forgery,
    write_checkpoint,
)

FIRST, SECOND, THIRD, FOURTH = (f"0000000{number}-3fa9c1d2" for number in (1, 2, 3, 4))
FULL = "00000003-z-3fa9c1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint and two that refer to it; nobody changes them."""
    root = tmp_path_factory.mktemp("chain")
    store = CheckpointStore(str(root))
    for number, base in ((1, ""), (2, FIRST), (3, SECOND)):
        write_checkpoint(store.directory(number, CLUSTER_ID), number, base=base)
    return root


@pytest.fixture
def store(made: Path, tmp_path: Path) -> CheckpointStore:
    """A copy of them."""
    shutil.copytree(made, tmp_path / "root")
    return CheckpointStore(str(tmp_path / "root"))


Content = Mapping[tuple[str, int, str], bytes]


def content(directory: CheckpointDirectory) -> Content:
    with CheckpointReader(directory) as reader:
        return {
            (spec.name, block, tensor): bytes(reader.read(spec.name, block, tensor))
            for spec in SPECS
            for block in range(reader.tables[spec.name].block_count)
            for tensor in reader.block(spec.name, block).tensors
        }


def rewrite(store: CheckpointStore, name: str, **changes: Any) -> None:
    """Another manifest, sealed as it should be."""
    directory = store.named(name)
    path = directory.local_path("manifest.json")
    assert path is not None
    manifest = replace(directory.read_manifest(), **changes)
    path.unlink()
    directory.write_manifest(manifest)


def file_of(store: CheckpointStore, name: str, file: str) -> Path:
    path = store.named(name).local_path(file)
    assert path is not None
    return path


def test_what_is_referred_to_is_read_where_it_is(store: CheckpointStore) -> None:
    with store.open(THIRD) as reader:
        assert reader.manifest.bases == (FIRST,)
        assert reader.file_of(COUNTERS.name, 0) == "server-1.safetensors"
        assert reader.block(COUNTERS.name, 0).place == f"{FIRST}/server-1.safetensors"
        assert not reader.headers["server-2.safetensors"].tensors
    first, third = content(store.named(FIRST)), content(store.named(THIRD))
    same = {(name, block) for name, block, tensor in first
            if first[name, block, tensor] == third[name, block, tensor]}  # fmt: skip
    assert same == {(COUNTERS.name, 0), (WEIGHTS.name, 1)}
    read: list[int] = []
    assert problems_of(store.named(THIRD), read.append) == []
    manifest = store.named(THIRD).read_manifest()
    assert sum(read) == manifest.byte_count + manifest.referred_byte_count
    assert manifest.referred_block_count == 2
    assert manifest.referred_byte_count == 3 * 8 + 3 * 64 * 4


def test_a_base_that_is_gone_is_named_with_the_newest_good_one(store: CheckpointStore) -> None:
    write_checkpoint(store.directory(4, CLUSTER_ID), 4)
    store.named(FIRST).remove()
    with pytest.raises(
        InvalidCheckpoint,
        match=rf"{THIRD}/server-1.safetensors refers to {FIRST}/server-1.safetensors: "
        rf".*{FIRST} has no manifest.json.*{FOURTH} is good",
    ):
        store.open(THIRD)
    problems = problems_of(store.named(THIRD))
    assert [FIRST in problem for problem in problems] == [True, True], "one of each part"


def damage(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_damage_in_a_base_is_found_where_it_matters(store: CheckpointStore) -> None:
    with store.open(THIRD) as reader:
        referred = reader.tensor(COUNTERS.name, 0, "values")
        assert referred is not None
    path = file_of(store, FIRST, "server-1.safetensors")
    damage(path, referred.begin)
    (problem,) = problems_of(store.named(THIRD))
    assert f"{FIRST}/server-1.safetensors: tensor '{COUNTERS.name}/0/values' is damaged" in problem
    with store.open(THIRD) as reader, pytest.raises(InvalidCheckpoint, match=rf"{FIRST}/server-1"):
        reader.read(COUNTERS.name, 0)
    damage(path, referred.begin)
    with store.open(FIRST) as reader:
        other = reader.tensor(WEIGHTS.name, 0, "values")
        assert other is not None
    damage(path, other.begin)
    assert problems_of(store.named(THIRD)) == [], "it has that block itself"
    assert len(problems_of(store.named(FIRST))) == 1
    damage(path, 20)
    with pytest.raises(InvalidCheckpoint, match=rf"{FIRST}/server-1.*its header's SHA-256"):
        store.open(THIRD)


Change = Callable[[CheckpointStore], object]
WRONG: list[tuple[Change, str]] = [
    (
        lambda s: rewrite(s, THIRD, bases=(SECOND,)),
        f"its manifest does not name {FIRST}, but {SECOND}",
    ),
    (
        lambda s: rewrite(s, THIRD, bases=(FIRST, SECOND)),
        f"nothing is in {SECOND}, which its manifest names",
    ),
    (lambda s: file_of(s, FIRST, "server-2.safetensors").unlink(), "No such file"),
]


@pytest.mark.parametrize(("change", "reason"), WRONG)
def test_a_base_that_is_another_is_refused(
    store: CheckpointStore, change: Change, reason: str
) -> None:
    change(store)
    with pytest.raises(InvalidCheckpoint) as caught:
        CheckpointReader(store.named(THIRD))
    assert reason in caught.value.message
    assert any(reason in problem for problem in problems_of(store.named(THIRD)))


def test_a_base_of_another_training_is_refused(store: CheckpointStore) -> None:
    """It has the right name and is whole; its values are others."""
    store.named(FIRST).remove()
    write_checkpoint(store.directory(1, CLUSTER_ID), 1, forged=Forgery(content=8))
    reason = f"{FIRST}/server-1.safetensors: the CRC-32 of block 0 of table '{COUNTERS.name}' is"
    with pytest.raises(InvalidCheckpoint, match=reason):
        store.open(THIRD)
    assert any(reason in problem for problem in problems_of(store.named(THIRD)))


Edit = Callable[[StoredBlock], StoredBlock]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: replace(b, version=40), "the version of block 0 of table .* is 41; expected 40"),
        (lambda b: replace(b, steps=(40,)), r"the steps of block 0 of table .* is \(41,\); expec"),
        (lambda b: replace(b, place=f"{SECOND}/server-1.safetensors"), "block 0 .* is not in it"),
    ],
)
def test_a_reference_to_something_else_is_refused(
    store: CheckpointStore, change: Edit, reason: str
) -> None:
    """Also to a reference: the bytes have to be where it leads."""
    forged = Forgery(referred=change)
    write_checkpoint(store.directory(4, CLUSTER_ID), 4, base=THIRD, forged=forged)
    bases = tuple(sorted({FIRST, SECOND} if "not in it" in reason else {FIRST}))
    rewrite(store, FOURTH, bases=bases)
    with pytest.raises(InvalidCheckpoint, match=reason):
        CheckpointReader(store.named(FOURTH))


def test_the_manifest_counts_what_is_referred_to(store: CheckpointStore) -> None:
    parts = store.named(THIRD).read_manifest().parts
    more = replace(parts[1], referred_byte_count=parts[1].referred_byte_count + 1)
    rewrite(store, THIRD, parts=(parts[0], more))
    reason = "server-2.safetensors: it refers to 1 blocks of 768 bytes; the manifest says 1 of 769"
    with pytest.raises(InvalidCheckpoint, match=reason):
        store.open(THIRD)
    assert any(reason in problem for problem in problems_of(store.named(THIRD)))


def test_what_a_kept_one_needs_is_kept(store: CheckpointStore) -> None:
    before = content(store.named(THIRD))
    assert prune(store, 2) == []
    assert prune(store, 1) == [SECOND]
    assert store.names() == [FIRST, THIRD]
    assert content(store.named(THIRD)) == before
    assert prune(store, 1) == []
    write_checkpoint(store.directory(4, CLUSTER_ID), 4)
    assert prune(store, 1) == [FIRST, THIRD]


def test_what_a_running_cluster_began_from_stays_with_what_it_needs(
    store: CheckpointStore,
) -> None:
    write_checkpoint(store.directory(4, CLUSTER_ID), 4)
    assert prune(store, 1, source=THIRD) == [SECOND]
    assert prune(store, 1, source="00000009-elsewhere") == [FIRST, THIRD]


def test_a_bad_one_keeps_nothing(store: CheckpointStore) -> None:
    write_checkpoint(store.directory(4, CLUSTER_ID), 4)
    file_of(store, THIRD, "server-1.safetensors").unlink()
    assert prune(store, 1) == [FIRST, SECOND, THIRD]


class Order(Disk):
    """Notes which directories lose their manifests."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def remove(self, path: Path) -> None:
        super().remove(path)
        if path.name == "manifest.json":
            self.removed.append(path.parent.name)


def test_what_refers_goes_before_what_is_referred_to(store: CheckpointStore) -> None:
    write_checkpoint(store.directory(4, CLUSTER_ID), 4)
    disk = Order()
    prune(CheckpointStore(store.location, disk), 1)
    assert disk.removed == [THIRD, SECOND, FIRST]


class RemovedBeside(Disk):
    """Another process removes the same checkpoints, each a little earlier."""

    def sync_directory(self, path: Path) -> None:
        shutil.rmtree(path)
        super().sync_directory(path)


def test_two_that_remove_the_same_checkpoints_at_once_both_succeed(store: CheckpointStore) -> None:
    """As an operator and a running cluster do."""
    write_checkpoint(store.directory(4, CLUSTER_ID), 4)
    beside = CheckpointStore(store.url, RemovedBeside())
    assert prune(beside, 1) == [FIRST, SECOND, THIRD]
    assert store.names() == [FOURTH]


def test_compacting_makes_a_full_one_of_the_same_content(store: CheckpointStore) -> None:
    before = content(store.named(THIRD))
    with store.open(THIRD) as reader:
        made = compact(store, reader)
        source = reader.manifest
    assert made.directory == FULL
    assert made.reason == f"compacted from {THIRD}: every 100 steps"
    assert (made.is_full, made.referred_block_count) == (True, 0)
    assert (made.tables, made.timeline, made.created) == (
        source.tables, source.timeline, source.created,
    )  # fmt: skip
    assert content(store.named(FULL)) == before
    with store.open(FULL) as reader, store.open(THIRD) as other:
        file = "worker-0-7.safetensors"
        ours, theirs = reader.headers[file], other.headers[file]
        assert ours.worker == theirs.worker
        for name in theirs.tensors:
            assert reader.read_file(file, name) == other.read_file(file, name)
        assert reader.manifest.workers[1].problem == "it was killed"
        for key, block in other.headers["server-2.safetensors"].blocks.items():
            assert reader.block(*key) == replace(block, place="")
    assert prune(store, 1) == [FIRST, SECOND, THIRD]
    with resolve(str(store.url)).reader as reader:
        assert problems_of(reader.directory) == []


def test_the_clusters_own_next_one_is_newer_than_a_compacted_one(store: CheckpointStore) -> None:
    with store.open(THIRD) as reader:
        compact(store, reader)
    with resolve(str(store.url)).reader as reader:
        assert reader.directory.name == FULL
    write_checkpoint(store.directory(4, CLUSTER_ID), 4, base=THIRD)
    with resolve(str(store.url)).reader as reader:
        assert reader.directory.name == FOURTH
    refused = pytest.raises(InvalidCheckpoint, match=f"{FULL} is a checkpoint; expected a new dir")
    with store.open(THIRD) as reader, refused:
        compact(store, reader)
    assert problems_of(store.named(FULL)) == []


def test_what_is_damaged_is_not_compacted(store: CheckpointStore) -> None:
    with store.open(THIRD) as reader:
        stored = reader.tensor(COUNTERS.name, 0, "values")
        assert stored is not None
        damage(file_of(store, FIRST, "server-1.safetensors"), stored.begin)
        with pytest.raises(InvalidCheckpoint, match=rf"{FIRST}/server-1.*is damaged"):
            compact(store, reader)
    assert store.names() == [FIRST, SECOND, THIRD]


class Flips(Disk):
    """Writes one bit otherwise."""

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        content = bytearray(payload)
        if len(content) == 64 * 4:
            content[7] ^= 1
        super().write(descriptor, content, offset)


def test_what_was_written_wrong_does_not_come_to_be(store: CheckpointStore) -> None:
    refused = pytest.raises(InvalidCheckpoint, match=f"not good: .*{FULL}/server-1.*is damaged")
    with store.open(THIRD) as reader, refused:
        compact(store, reader, Flips())
    assert store.names() == [FIRST, SECOND, THIRD]


class Interrupted(Disk):
    """Ctrl-C comes while it writes."""

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        super().write(descriptor, payload, offset)
        raise KeyboardInterrupt


def test_a_compaction_that_is_interrupted_leaves_nothing(store: CheckpointStore) -> None:
    with store.open(THIRD) as reader, pytest.raises(KeyboardInterrupt):
        compact(store, reader, Interrupted())
    assert store.names() == [FIRST, SECOND, THIRD]


class Beside(Disk):
    """Somebody does something else when the first piece is written; then Ctrl-C may come."""

    def __init__(self, does: Callable[[], None], *, is_interrupted: bool) -> None:
        self._does, self._is_interrupted = [does], is_interrupted

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        super().write(descriptor, payload, offset)
        while self._does:
            self._does.pop()()
            if self._is_interrupted:
                raise KeyboardInterrupt


def test_of_two_compactions_at_once_the_second_is_refused(store: CheckpointStore) -> None:
    """Its end would else remove what the first has completed."""

    def again() -> None:
        refused = pytest.raises(InvalidCheckpoint, match=f"{FULL} is being written by another")
        with store.open(THIRD) as reader, refused:
            compact(store, reader)

    with store.open(THIRD) as reader:
        compact(store, reader, Beside(again, is_interrupted=False))
    assert problems_of(store.named(FULL)) == []


def test_a_compaction_removes_nothing_that_another_has_completed_elsewhere() -> None:
    """On an object store, which has no locks; the second is done when the first is interrupted."""
    store = CheckpointStore("memory://compacted/by/two")
    for number, base in ((1, ""), (2, FIRST), (3, SECOND)):
        write_checkpoint(store.directory(number, CLUSTER_ID), number, base=base)

    def again() -> None:
        with store.open(THIRD) as reader:
            compact(store, reader)

    with store.open(THIRD) as reader, pytest.raises(KeyboardInterrupt):
        compact(store, reader, Beside(again, is_interrupted=True))
    assert problems_of(store.named(FULL)) == []


def test_no_manifest_is_written_beside_a_base_that_is_gone(store: CheckpointStore) -> None:
    directory = store.named(THIRD)
    manifest: Manifest = directory.read_manifest()
    file_of(store, THIRD, "manifest.json").unlink()
    store.named(FIRST).remove()
    with pytest.raises(InvalidCheckpoint, match=f"{THIRD} refers to {FIRST}, which is gone; the"):
        write_manifest(directory.url, manifest)
    assert not directory.has_manifest()


def test_a_row_on_an_object_store() -> None:
    store = CheckpointStore("memory://rows/of/a/run")
    for number, base in ((1, ""), (2, FIRST), (3, SECOND)):
        write_checkpoint(store.directory(number, CLUSTER_ID), number, base=base)
    before = content(store.named(THIRD))
    assert prune(store, 1) == [SECOND]
    assert content(store.named(THIRD)) == before
    with store.open(THIRD) as reader:
        compact(store, reader)
    assert prune(store, 1) == [FIRST, THIRD]
    assert content(store.named(FULL)) == before
    store.named(FULL).remove()
