"""A checkpoint that was cut off at any point, or changed in any byte, is never taken for good."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import MANIFEST_FILE
from ps_runtime.checkpoint.compaction import compact
from ps_runtime.checkpoint.pruning import prune
from ps_runtime.checkpoint.reader import problems_of
from ps_runtime.checkpoint.store import CheckpointStore, resolve
from tests.examples import examples
from tests.unit.checkpoint_files import CLUSTER_ID, write_checkpoint
from tests.unit.power_cut import Operation, RecordingDisk, restart_after

pytestmark = pytest.mark.slow

Recorded = tuple[Path, list[Operation], list[tuple[int, int]]]
"""The root, what was done there, and after how many operations which number was complete."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A full checkpoint, two that refer to it, one that is made full, another; and prunings."""
    root, disk = tmp_path_factory.mktemp("recorded"), RecordingDisk()
    store = CheckpointStore(str(root), disk)
    ends = []
    first, second, third, fourth = (store.directory(n, CLUSTER_ID).name for n in (1, 2, 3, 4))
    for number, base, removed in (
        (1, "", []), (2, first, []), (3, second, [second]), (4, "", [first, third]),
        (5, fourth, []),
    ):  # fmt: skip
        write_checkpoint(store.directory(number, CLUSTER_ID), number, disk, base)
        ends.append((number, len(disk.operations)))
        assert prune(store, 1) == removed
    with store.open(store.directory(5, CLUSTER_ID).name) as reader:
        compact(store, reader, disk)
    assert len(prune(store, 1)) == 2
    return root, disk.operations, ends


def judge(root: Path, *, least: int) -> None:
    """What can be opened is whole, and it is not older than what was complete."""
    store = CheckpointStore(str(root))
    opened = []
    for name in store.names():
        try:
            reader = store.open(name)
        except InvalidCheckpoint:
            assert not store.named(name).has_manifest(), f"{name} has a manifest, and is torn"
            continue
        with reader:
            assert problems_of(reader.directory) == []
            opened.append(reader.manifest.number)
    if least:
        assert opened, "no checkpoint is left"
        assert max(opened) >= least
        with resolve(str(root)).reader as newest:
            assert newest.manifest.number == max(opened)


def complete_after(count: int, ends: list[tuple[int, int]]) -> int:
    """The newest checkpoint whose writing had returned by then."""
    return max((number for number, end in ends if end <= count), default=0)


@pytest.mark.thorough
@pytest.mark.parametrize("survival", [0.0, 1.0])
def test_a_cut_after_every_operation(recorded: Recorded, survival: float, tmp_path: Path) -> None:
    root, operations, ends = recorded
    for count in range(len(operations) + 1):
        into = tmp_path / str(count)
        restart_after(operations[:count], root, 0, survival, into)
        judge(into, least=complete_after(count, ends))


@pytest.mark.thorough
@settings(max_examples=examples(150))
@given(
    chosen=st.floats(0, 1), seed=st.integers(0, 2**32), survival=st.sampled_from([0.3, 0.7, 0.9])
)
def test_a_cut_that_leaves_any_part_of_what_was_not_synced(
    recorded: Recorded, chosen: float, seed: int, survival: float
) -> None:
    root, operations, ends = recorded
    count = round(chosen * len(operations))
    with tempfile.TemporaryDirectory() as folder:
        restart_after(operations[:count], root, seed, survival, Path(folder))
        judge(Path(folder), least=complete_after(count, ends))


class CutOff(BaseException):
    """The process is gone: nothing may catch it."""


class CutStore(MemoryFileSystem):  # type: ignore[misc]
    """An object store that a process loses after `left` changes."""

    protocol = "cutstore"
    store: dict[str, Any] = {}  # noqa: RUF012 - as fsspec has it
    pseudo_dirs = [""]  # noqa: RUF012
    left = 10**9

    def _count(self) -> None:
        if CutStore.left == 0:
            raise CutOff
        CutStore.left -= 1

    def put_file(self, *arguments: Any, **options: Any) -> None:
        self._count()
        super().put_file(*arguments, **options)

    def pipe_file(self, *arguments: Any, **options: Any) -> None:
        self._count()
        super().pipe_file(*arguments, **options)

    def rm_file(self, path: str) -> None:
        self._count()
        super().rm_file(path)


@pytest.fixture
def cut_store() -> Iterator[CheckpointStore]:
    fsspec.register_implementation("cutstore", CutStore, clobber=True)
    CutStore.store.clear()
    CutStore.left = 10**9
    yield CheckpointStore("cutstore://bucket/root")
    CutStore.left = 10**9


@pytest.mark.parametrize("count", range(9))
def test_an_object_store_whose_writer_is_gone_after_any_change(
    cut_store: CheckpointStore, count: int
) -> None:
    """Three parts and a manifest are uploaded; then the older one's four files go."""
    write_checkpoint(cut_store.directory(1, CLUSTER_ID), 1)
    CutStore.left = count
    if count < 8:
        with pytest.raises(CutOff):
            write_and_prune(cut_store)
    else:
        write_and_prune(cut_store)
    CutStore.left = 10**9
    again = CheckpointStore("cutstore://bucket/root")
    good = again.newest_good()
    assert good is not None
    assert good.name == again.directory(1 if count < 4 else 2, CLUSTER_ID).name
    assert problems_of(good) == []
    # Four uploads; then one file of the older goes with each change, the manifest first.
    states = [isinstance(found, InvalidCheckpoint) for _, found in again.entries()]
    expected = {4: [False, False], 8: [False]}
    assert states == expected.get(count, [False, True] if count < 4 else [True, False])


def write_and_prune(store: CheckpointStore) -> None:
    write_checkpoint(store.directory(2, CLUSTER_ID), 2)
    prune(store, 1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with checkpoints 1 and 2, which nobody changes."""
    root = tmp_path_factory.mktemp("pair")
    store = CheckpointStore(str(root))
    for number in (1, 2):
        write_checkpoint(store.directory(number, CLUSTER_ID), number)
    return root


FILES = ("server-1.safetensors", "server-2.safetensors", "worker-0-7.safetensors", MANIFEST_FILE)


class Copied:
    """A copy of `pair`, to be damaged."""

    def __init__(self, pair: Path, folder: str) -> None:
        self.root = Path(folder) / "root"
        shutil.copytree(pair, self.root)
        self.store = CheckpointStore(str(self.root))
        self.newest = self.store.directory(2, CLUSTER_ID)

    def file(self, name: str) -> Path:
        path = self.newest.local_path(name)
        assert path is not None
        return path

    def assert_refused(self, file: str, header_bytes: int) -> None:
        """`verify` names the file; opening does too, where what opening reads was damaged."""
        problems = problems_of(self.newest)
        assert problems
        assert file in problems[0]
        if header_bytes:
            with pytest.raises(InvalidCheckpoint, match=f"{file}.*00000001-3fa9c1d2 is good"):
                self.store.open(self.newest.name)
            resolved = resolve(str(self.root))
            with resolved.reader as reader:
                assert reader.manifest.number == 1
            assert file in resolved.passed_over[0]


def header_bytes_of(content: bytes, name: str) -> int:
    """What is read of a file when its checkpoint is opened."""
    return len(content) if name == MANIFEST_FILE else 8 + int.from_bytes(content[:8], "little")


def with_bit_over(content: bytes, name: str, place: float, bit: int) -> tuple[bytes, int]:
    """The content with one bit the other way, and where; no manifest that says the same, as one in
    which 1e-08 has become 1E-08.
    """
    index = int(place * len(content))
    changed = content[:index] + bytes((content[index] ^ 1 << bit,)) + content[index + 1 :]
    if name == MANIFEST_FILE:
        with contextlib.suppress(ValueError):
            assume(json.loads(changed) != json.loads(content))
    return changed, index


@pytest.mark.thorough
@settings(max_examples=examples(300))
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_fell_over_is_found(pair: Path, name: str, place: float, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copied = Copied(pair, folder)
        content = copied.file(name).read_bytes()
        read = header_bytes_of(content, name)
        changed, index = with_bit_over(content, name, place, bit)
        copied.file(name).write_bytes(changed)
        copied.assert_refused(name, header_bytes=int(index < read))


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose checkpoint 2 refers to 1, and no other file of 1 than these."""
    root = tmp_path_factory.mktemp("row")
    store = CheckpointStore(str(root))
    first = store.directory(1, CLUSTER_ID)
    write_checkpoint(first, 1)
    write_checkpoint(store.directory(2, CLUSTER_ID), 2, base=first.name)
    return root


ROW = [(2, name) for name in FILES] + [(1, FILES[0]), (1, FILES[1]), (1, MANIFEST_FILE)]


@pytest.mark.thorough
@settings(max_examples=examples(150))
@given(file=st.sampled_from(ROW), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_fell_over_is_found_in_what_is_referred_to(
    row: Path, file: tuple[int, str], place: float, bit: int
) -> None:
    """In a tensor of the base it matters only to whom it belongs."""
    with tempfile.TemporaryDirectory() as folder:
        copied, (number, name) = Copied(row, folder), file
        path = copied.store.directory(number, CLUSTER_ID).local_path(name)
        assert path is not None
        content = path.read_bytes()
        read = header_bytes_of(content, name)
        with copied.store.open(copied.newest.name) as reader:
            taken = [
                reader.tensor("model/0/float32", 1, "values"),
                reader.tensor("model/0/float32", 1, "exp_avg"),
                reader.tensor("model/0/float32", 1, "exp_avg_sq"),
            ]
        changed, index = with_bit_over(content, name, place, bit)
        path.write_bytes(changed)
        problems = problems_of(copied.newest)
        is_read = index < read
        if number == 2 or is_read:
            assert any(f"{path.parent.name}/{name}" in problem for problem in problems)
        elif name == FILES[1]:
            ends = [(each.begin, each.end) for each in taken if each is not None]
            assert bool(problems) == any(begin <= index < end for begin, end in ends)
        if is_read:
            with pytest.raises(InvalidCheckpoint, match=name):
                copied.store.open(copied.newest.name)


@pytest.mark.thorough
@settings(max_examples=examples(150))
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), more=st.binary())
def test_a_file_of_another_length_is_found(
    pair: Path, name: str, place: float, more: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copied = Copied(pair, folder)
        content = copied.file(name).read_bytes()
        cut = content[: int(place * len(content))]
        copied.file(name).write_bytes(cut + more if len(cut + more) != len(content) else cut)
        copied.assert_refused(name, header_bytes=1)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint_is_found(pair: Path, name: str, tmp_path: Path) -> None:
    copied = Copied(pair, str(tmp_path))
    other = copied.store.directory(1, CLUSTER_ID).local_path(name)
    assert other is not None
    shutil.copyfile(other, copied.file(name))
    if name == MANIFEST_FILE:
        with pytest.raises(InvalidCheckpoint, match="it is the manifest of checkpoint 00000001-"):
            copied.store.open(copied.newest.name)
    else:
        assert copied.file(name).stat().st_size == other.stat().st_size
        copied.assert_refused(name, header_bytes=1)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_gone_is_named(pair: Path, name: str, tmp_path: Path) -> None:
    copied = Copied(pair, str(tmp_path))
    copied.file(name).unlink()
    copied.assert_refused(name, header_bytes=1)
