"""A part of a checkpoint: written in any order, read by safetensors, refused if it is wrong."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ps_core.errors import InvalidCheckpoint, InvariantViolation
from ps_core.manifest import MAX_PLACE_CHARACTERS
from ps_runtime.checkpoint.part_file import (
    PartHeader,
    StoredBlock,
    StoredWorker,
    read_header,
    read_into,
    read_tensor,
)
from ps_runtime.checkpoint.part_writer import (
    PartWriter,
    PlannedTable,
    WorkerTensor,
    WrittenPart,
    write_worker_part,
)
from ps_runtime.system.disk import Disk, Payload

PLANNED = (PlannedTable("model/0", 3, ("values", "exp_avg")), PlannedTable("wide", 1, ("values",)))


def write(path: Path) -> WrittenPart:
    """Two blocks of one table out of order, the second without a state, and one of another."""
    writer = PartWriter(path, PLANNED)
    writer.append("model/0", 17, "exp_avg", np.full(3, 0.5, np.float32).data)
    writer.append("wide", 0, "values", np.arange(2, dtype=np.float64).data, "F64")
    writer.append("model/0", 17, "values", np.arange(3, dtype=np.float32).data)
    writer.append("model/0", 4, "values", np.ones((2, 2), np.float32).data)
    writer.note_block("model/0", 17, 41, [41, 40, 0])
    writer.note_block("model/0", 4, 0, [0])
    writer.note_block("wide", 0, 7, [7])
    return writer.finish(12, "3fa9c1d27b60a5e4")


def header_of(path: Path) -> PartHeader:
    with path.open("rb") as file:
        return read_header(file, str(path))


def test_safetensors_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    written = write(path)
    assert path.stat().st_size == written.byte_count
    with safe_open(path, framework="numpy") as opened:
        assert set(opened.keys()) == {
            "model/0/17/values", "model/0/17/exp_avg", "model/0/4/values", "wide/0/values",
        }  # fmt: skip
        np.testing.assert_array_equal(opened.get_tensor("model/0/17/values"), [0, 1, 2])
        assert opened.get_tensor("wide/0/values").dtype == np.float64
        said = json.loads(opened.metadata()["pushpull"])
    assert said["checkpoint"] == 12
    assert said["blocks"]["model/0"]["17"]["steps"] == [41, 40, 0]


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    written = write(path)
    start = path.read_bytes()
    end = 8 + int.from_bytes(start[:8], "little")
    assert hashlib.sha256(start[:end]).hexdigest() == written.header_sha256
    assert end % 8 == 0
    with path.open("rb", buffering=0) as file:
        header = read_header(file, "here", written.byte_count, written.header_sha256)
        assert (header.checkpoint, header.cluster_id, header.worker) == (
            12, "3fa9c1d27b60a5e4", None,
        )  # fmt: skip
        block = header.blocks["model/0", 17]
        assert (block.version, block.steps, set(block.tensors)) == (
            41, (41, 40, 0), {"values", "exp_avg"},
        )  # fmt: skip
        assert header.block_counts == {"model/0": 2, "wide": 1}
        values = np.zeros(3, np.float32)
        read_into(file, header, "model/0/17/values", values.data.cast("B"))
        assert values.tolist() == [0, 1, 2]
        taken = read_tensor(file, header, "model/0/4/values")
        assert np.frombuffer(taken, np.float32).tolist() == [1] * 4
        with pytest.raises(InvalidCheckpoint, match="it has no tensor 'model/0/5/values'"):
            read_tensor(file, header, "model/0/5/values")
        with pytest.raises(InvalidCheckpoint, match="has 12 bytes; expected 11"):
            read_into(file, header, "model/0/17/values", memoryview(bytearray(11)))


class _SlowFirst(Disk):
    """Holds the first write of a tensor until another thread has tried to write behind it."""

    def __init__(self, fails: bool = False) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self._fails = fails

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        if not self.has_begun.is_set():
            self.has_begun.set()
            assert self.may_end.wait(30)
            if self._fails:
                raise OSError("the disk is gone")
        super().write(descriptor, payload, offset)


@pytest.mark.parametrize("end", ["whole", "fails", "aborted"])
def test_pieces_of_a_tensor_are_written_in_their_order(tmp_path: Path, end: str) -> None:
    disk, path = _SlowFirst(fails=end == "fails"), tmp_path / "part"
    writer = PartWriter(path, PLANNED, disk)
    whole = np.arange(12, dtype=np.float32)
    ended: list[str] = []

    def append(begin: int) -> None:
        piece = whole[begin : begin + 4].data
        try:
            writer.append("wide", 0, "values", piece, place=(4 * begin, 48))
            ended.append(f"{begin} written")
        except (InvalidCheckpoint, InvariantViolation) as error:
            ended.append(f"{begin}: {error}")

    threads = [threading.Thread(target=append, args=(begin,)) for begin in (0, 8, 4)]
    threads[0].start()
    assert disk.has_begun.wait(30)
    for thread in threads[1:]:
        thread.start()
    if end == "aborted":
        threads.append(threading.Thread(target=writer.abort))
        threads[-1].start()
        for thread in threads[1:3]:  # these wait for no piece that will not come
            thread.join(30)
        assert len(ended) == 2
    disk.may_end.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if end == "whole":
        assert ended == ["0 written", "4 written", "8 written"]
        writer.note_block("wide", 0, 1, [1])
        written = writer.finish(1, "3fa9c1d27b60a5e4")
        with path.open("rb", buffering=0) as file:
            header = read_header(file, "here", written.byte_count, written.header_sha256)
            assert bytes(read_tensor(file, header, "wide/0/values")) == whole.tobytes()
    else:
        assert len(ended) == 3
        assert [each for each in ended if each.endswith(" written")] == (
            ["0 written"] if end == "aborted" else []
        )


ELSEWHERE = StoredBlock(7, (7, 6), {"values": 5, "exp_avg": 6}, "00000011-3fa9c1d2/server-1-8812.x")


def test_a_block_may_be_in_another_file(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    writer = PartWriter(path, PLANNED)
    writer.append("wide", 0, "values", np.arange(2, dtype=np.float64).data, "F64")
    writer.note_block("wide", 0, 7, [7])
    writer.refer("model/0", 4, ELSEWHERE)
    written = writer.finish(12, "c")
    header = header_of(path)
    assert dict(header.blocks) == dict(written.blocks)
    assert header.referred == {("model/0", 4): ELSEWHERE}
    assert header.block_counts == {"model/0": 1, "wide": 1}
    assert list(header.tensors) == ["wide/0/values"]
    with safe_open(path, framework="numpy") as opened:
        assert list(opened.keys()) == ["wide/0/values"]


def test_a_part_may_have_no_tensor_at_all(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    writer = PartWriter(path, PLANNED)
    writer.refer("model/0", 4, ELSEWHERE)
    written = writer.finish(12, "c")
    assert header_of(path).byte_count == written.byte_count
    with safe_open(path, framework="numpy") as opened:
        assert list(opened.keys()) == []


def test_a_reference_that_is_none_is_a_bug_of_ours(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "part", PLANNED)
    with pytest.raises(InvariantViolation, match="'model/0/4' is in ''"):
        writer.refer("model/0", 4, replace(ELSEWHERE, place=""))
    writer.refer("model/0", 4, ELSEWHERE)
    with pytest.raises(InvariantViolation, match="'model/0/4' is referred to twice"):
        writer.refer("model/0", 4, ELSEWHERE)
    writer.append("model/0", 4, "values", bytes(4))
    writer.note_block("model/0", 4, 1, [1])
    with pytest.raises(InvariantViolation, match="'model/0/4' is here and elsewhere"):
        writer.finish(1, "c")


def test_threads_append_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    blocks = 64
    writer = PartWriter(path, [PlannedTable("t", 4 * blocks, ("values",))])

    def append(first: int) -> None:
        for block in range(first, first + blocks):
            writer.append("t", block, "values", np.full(1000 + block, block, np.float32).data)
            writer.note_block("t", block, block, [block])

    threads = [threading.Thread(target=append, args=(i * blocks,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.finish(1, "c")
    header = header_of(path)
    with path.open("rb") as file:
        for block in range(4 * blocks):
            values = np.frombuffer(read_tensor(file, header, f"t/{block}/values"), np.float32)
            assert values.shape == (1000 + block,)
            assert (values == block).all()


LARGEST = 2**64 - 1
EMOJI = "\U0001f600"


def fill(path: Path, names: list[str], tensors: tuple[str, ...], step_count: int) -> None:
    """As many blocks as were planned, with the largest numbers that there are."""
    planned = [PlannedTable(name, 2, tensors, 2 * step_count) for name in names]
    writer = PartWriter(path, planned)
    for name in names:
        for block in (LARGEST, LARGEST - 1):
            for tensor in tensors:
                writer.append(name, block, tensor, bytes(8), "F64")
            writer.note_block(name, block, LARGEST, [LARGEST] * step_count)
    cluster_id = EMOJI * 200
    writer.finish(LARGEST, cluster_id)
    referring = PartWriter(path.with_name("referring"), planned)
    place = f"{'1' * 30}-3fa9c1d2/{'x' * 200}"
    assert len(place) == MAX_PLACE_CHARACTERS
    crcs = dict.fromkeys(tensors, 2**32 - 1)
    for name in names:
        for block in (LARGEST, LARGEST - 1):
            stored = StoredBlock(LARGEST, (LARGEST,) * step_count, crcs, place)
            referring.refer(name, block, stored)
    with pytest.raises(InvariantViolation, match="is in"):
        referring.refer(names[0], 0, replace(ELSEWHERE, place=f"{place}x"))
    referring.finish(LARGEST, cluster_id)
    header = header_of(path)
    assert (header.cluster_id, set(header.block_counts)) == (cluster_id, set(names))


NAMES = st.text(min_size=1, max_size=20)


@pytest.mark.slow
@given(
    names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    slots=st.lists(NAMES.filter(lambda n: n != "values"), max_size=3, unique=True),
)
def test_the_room_for_the_header_is_always_enough(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], slots: list[str]
) -> None:
    """Whatever people call things."""
    path = tmp_path_factory.getbasetemp() / "room.safetensors"
    fill(path, names, ("values", *slots), 2)


@pytest.mark.parametrize("name", ["t", '"' * 200, "\\" * 200, "\0" * 200, EMOJI * 50])
@pytest.mark.parametrize("step_count", [1, 400])
def test_long_names_and_many_steps_have_room(tmp_path: Path, name: str, step_count: int) -> None:
    """Names are escaped once, and twice in the metadata; a block may have hundreds of segments."""
    fill(tmp_path / "part", [name], ("values", *(f"{name}{slot}" for slot in range(8))), step_count)


def test_what_was_not_planned_is_a_bug_of_ours(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "part", [PlannedTable("t", 1, ("values",))])
    for block in range(100):
        writer.append("t", block, "values", bytes(4))
        writer.note_block("t", block, 1, [1])
    with pytest.raises(InvariantViolation, match="PF-3"):
        writer.finish(1, "c")
    writer.abort()
    writer.abort()
    assert not (tmp_path / "part").exists()


def test_misuse_is_a_bug_of_ours(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "part", PLANNED)
    with pytest.raises(InvariantViolation, match="PF-1"):
        writer.append("wide", 0, "values", bytes(7))
    writer.append("wide", 0, "values", bytes(8), "F64")
    with pytest.raises(InvariantViolation, match="'wide/0/values' is there twice"):
        writer.append("wide", 0, "values", bytes(8), "F64")
    with pytest.raises(InvariantViolation, match="'wide/0' lacks its note or its tensors"):
        writer.finish(1, "c")
    writer.note_block("wide", 0, 1, [1])
    with pytest.raises(InvariantViolation, match="noted twice"):
        writer.note_block("wide", 0, 1, [1])
    writer.append("model/0", 1, "exp_avg", bytes(4))
    writer.note_block("model/0", 1, 1, [1])
    with pytest.raises(InvariantViolation, match="has no values"):
        writer.finish(1, "c")
    writer.append("model/0", 1, "values", bytes(4))
    writer.finish(1, "c")
    with pytest.raises(InvariantViolation, match="is closed"):
        writer.append("model/0", 2, "values", bytes(4))
    writer.abort()
    assert (tmp_path / "part").exists()


class FullDisk(Disk):
    """Takes `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        if offset + len(payload) > self.room:
            raise OSError(28, "No space left on device")
        super().write(descriptor, payload, offset)


def test_a_full_disk_is_named_and_the_part_cannot_be_finished(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "part", PLANNED, FullDisk(100))
    with pytest.raises(InvalidCheckpoint, match="part cannot be written: No space left on device"):
        writer.append("wide", 0, "values", bytes(800), "F64")
    with pytest.raises(InvalidCheckpoint, match="a write was broken off; it cannot be finished"):
        writer.finish(1, "c")
    writer.abort()
    assert list(tmp_path.iterdir()) == []


class SlowDisk(Disk):
    """A write lasts until the file is closed under it, if it is, and says so."""

    def __init__(self) -> None:
        self.began, self.closed = threading.Event(), threading.Event()
        self.was_closed: list[bool] = []

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        self.began.set()
        self.was_closed.append(self.closed.wait(0.2))
        super().write(descriptor, payload, offset)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self.closed.set()


@pytest.mark.parametrize(
    ("event", "function"), [("c_return", "crc32"), ("return", "__exit__")], ids=["sum", "lock"]
)
def test_ctrl_c_leaves_no_write_under_way(tmp_path: Path, event: str, function: str) -> None:
    """Behind the checksum, and where the lock is given back: `abort` would wait for ever."""
    writer = PartWriter(tmp_path / "part.safetensors", PLANNED)

    def look(frame: FrameType, found: str, called: Any) -> None:
        name = called.__name__ if found.startswith("c_") else frame.f_code.co_name
        if (found, name) == (event, function):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        with pytest.raises(KeyboardInterrupt):
            writer.append("model/0", 0, "values", np.ones(3, np.float32).data)
    finally:
        sys.setprofile(None)
    abort = threading.Thread(target=writer.abort, daemon=True)
    abort.start()
    abort.join(5.0)
    assert not abort.is_alive()
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_closed_under_a_write(tmp_path: Path) -> None:
    """What is opened next may get its descriptor."""
    disk = SlowDisk()
    writer = PartWriter(tmp_path / "part", PLANNED, disk)
    append = threading.Thread(target=writer.append, args=("wide", 0, "values", bytes(8), "F64"))
    append.start()
    assert disk.began.wait(20)
    writer.abort()
    append.join()
    assert disk.was_closed == [False]
    assert disk.closed.is_set()
    with pytest.raises(InvariantViolation, match="is closed"):
        writer.append("wide", 1, "values", bytes(8), "F64")
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_safetensors_would_not_read_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="safetensors takes 100000000: expected fewer blo"):
        PartWriter(tmp_path / "part", [PlannedTable("t", 1_000_000, ("values",))])
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="nowhere/part cannot be written: No such file"):
        PartWriter(tmp_path / "nowhere" / "part", PLANNED)


def test_a_workers_part(tmp_path: Path) -> None:
    path = tmp_path / "worker"
    state = {"optimizer": {"0": {"tensor": "m"}}, "epoch": 3}
    tensors = {
        "bytes": WorkerTensor("U8", (3,), b"abc"),
        "m": WorkerTensor("F64", (2, 2), np.eye(2).tobytes()),
        "none": WorkerTensor("F32", (0, 7), np.zeros((0, 7), np.float32).data),
    }
    written = write_worker_part(path, (12, "c"), StoredWorker(3, 41, state), tensors)
    with path.open("rb") as file:
        header = read_header(file, "here", written.byte_count, written.header_sha256)
        assert header.worker is not None
        assert (header.worker.rank, header.worker.clock, header.worker.state) == (3, 41, state)
        assert read_tensor(file, header, "bytes") == b"abc"
        assert header.tensors["m"].shape == (2, 2)
    with safe_open(path, framework="numpy") as opened:
        np.testing.assert_array_equal(opened.get_tensor("m"), np.eye(2))
    with pytest.raises(InvalidCheckpoint, match="state is no JSON"):
        write_worker_part(path, (12, "c"), StoredWorker(3, 41, {1, 2}), {})


Header = dict[str, Any]


@dataclass
class Forged:
    """A part's header and the metadata in it."""

    header: Header
    said: Header


Change = Callable[[Forged], object]


def forged(change: Change = lambda _: None, tail: bytes = b"") -> bytes:
    """A part of two tensors of 8 bytes each, with `change` done to its header and metadata."""
    crcs = {"values": zlib.crc32(bytes(8)), "exp_avg": zlib.crc32(bytes(8))}
    said: Header = {
        "version": 1, "checkpoint": 1, "cluster_id": "c",
        "blocks": {"t": {"0": {"version": 1, "steps": [1], "crc32": crcs}}},
    }  # fmt: skip
    header: Header = {
        "t/0/values": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "t/0/exp_avg": {"dtype": "F64", "shape": [1], "data_offsets": [8, 16]},
    }
    change(Forged(header, said))
    header.setdefault("__metadata__", {"pushpull": json.dumps(said)})
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16) + tail


WRONG: list[tuple[Change, str]] = [
    (lambda f: f.header.update(__metadata__={}), "no 'pushpull'; expected a checkpoint's"),
    (lambda f: f.header.update(__metadata__={"pushpull": "x"}), "metadata 'pushpull' is not JSON"),
    (
        lambda f: f.header.update(__metadata__={"pushpull": "[]"}),
        r"is \[\]; expected a JSON object",
    ),
    (lambda f: f.said.update(version=2), "its metadata is of version 2; expected 1"),
    (lambda f: f.said.update(checkpoint="1"), "checkpoint is '1'; expected a number from 0 up"),
    (lambda f: f.said.update(cluster_id=1), "cluster_id is 1; expected a string"),
    (lambda f: f.said.update(blocks=[]), r"blocks is \[\]; expected a JSON object"),
    (lambda f: f.said["blocks"]["t"].update({"01": {}}), "block 01 of 't' has no number"),
    (
        lambda f: f.said["blocks"]["t"]["0"].update(steps=1),
        "steps of block 0 of 't' is 1; expected",
    ),
    (lambda f: f.said["blocks"]["t"]["0"].update(steps=[-1]), r"is \[-1\]; expected a list of num"),
    (lambda f: f.said["blocks"]["t"]["0"].update(version=-1), "version is -1; expected a number"),
    (
        lambda f: f.said["blocks"]["t"]["0"].pop("crc32"),
        "crc32 of block 0 of 't' is None; expected",
    ),
    (lambda f: f.said["blocks"]["t"]["0"]["crc32"].pop("values"), "has no checksum of its values"),
    (lambda f: f.said["blocks"]["t"]["0"]["crc32"].update(values=2**32), "expected 32 bits"),
    (
        lambda f: f.said["blocks"]["t"]["0"]["crc32"].pop("exp_avg"),
        "tensor 't/0/exp_avg' without i",
    ),
    (lambda f: f.header.pop("t/0/exp_avg"), "a checksum 't/0/exp_avg' without its tensor"),
    (lambda f: f.said.pop("blocks"), "rank is None; expected a number"),
    (
        lambda f: f.header.update({"t/0/values": []}),
        r"tensor 't/0/values' is \[\]; expected a JSON",
    ),
    (lambda f: f.header["t/0/values"].update(dtype="F33"), "is of 'F33'; expected F32 or F64"),
    (lambda f: f.header["t/0/values"].update(dtype=[]), r"is of \[\]; expected F32 or F64"),
    (lambda f: f.said["blocks"]["t"]["0"].update(size=1), "block 0 of 't' has a field 'size'"),
    (
        lambda f: f.said["blocks"]["t"]["0"].update({"in": "00000001-c/part"}),
        "it has a tensor 't/0/(values|exp_avg)' without its checksum",
    ),
    *(
        (
            lambda f, place=place: f.said["blocks"]["t"]["0"].update({"in": place}),
            "block 0 of 't' is in .*; expected a checkpoint's directory, a slash and the plain",
        )
        for place in (
            None,
            "",
            "part",
            "../part",
            "00000001-c",
            "00000001-c/../../x",
            "00000001-c/a/b",
            "/00000001-c/part",
            "00000001-c/manifest.json",
            "00000001-c/" + 300 * "x",
        )
    ),
    (
        lambda f: f.header["t/0/values"].update(shape=[3]),
        "has 8 bytes; expected 12 for F32 of shape",
    ),
    (lambda f: f.header["t/0/values"].update(shape=[True, 2]), "the shape of 't/0/values' is"),
    (lambda f: f.header["t/0/values"].update(shape=[1] * 65), "has 65 dimensions"),
    (
        lambda f: f.header["t/0/values"].update(data_offsets=[8, 0]),
        r"are \(8, 0\); expected \[begin",
    ),
    (lambda f: f.header["t/0/values"].update(data_offsets=[16, 24]), "within the 16 bytes of data"),
    (
        lambda f: f.header["t/0/values"].update(data_offsets=[0]),
        r"are \(0,\); expected \[begin, end",
    ),
    (lambda f: f.header["t/0/values"].update(data_offsets=[4, 12]), "leaves a hole before it"),
    (
        lambda f: f.header["t/0/exp_avg"].update(data_offsets=[4, 12]),
        "overlaps another: it begins at",
    ),
]


@pytest.mark.parametrize(("change", "reason"), WRONG)
def test_a_header_that_is_wrong_is_refused(change: Change, reason: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=reason) as caught:
        read_header(io.BytesIO(forged(change)), "here/part")
    assert caught.value.message.startswith("here/part: ")


def test_a_forged_one_without_a_change_is_read() -> None:
    header = read_header(io.BytesIO(forged()), "here/part")
    assert header.block_counts == {"t": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it has 0 bytes; expected a safetensors file"),
        (b"1234567", "it has 7 bytes; expected a safetensors file"),
        ((2**63).to_bytes(8, "little"), "its header would have 9223372036854775808 bytes"),
        ((3).to_bytes(8, "little") + b"{}", "its header would have 3 bytes; expected at most 2"),
        ((2).to_bytes(8, "little") + b"[]", r"its header is \[\]; expected a JSON object"),
        ((2).to_bytes(8, "little") + b"{]", "its header is not JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "its header is not JSON"),
        ((90_000).to_bytes(8, "little") + b"[" * 90_000, "its header is not JSON"),
        (forged(tail=b"x"), "its tensors end at byte .*; the file has"),
    ],
)
def test_what_is_no_part_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=reason):
        read_header(io.BytesIO(content), "here")


def test_what_the_manifest_says_otherwise_is_refused() -> None:
    content = forged()
    with pytest.raises(InvalidCheckpoint, match=f"has {len(content)} bytes; the manifest says 3"):
        read_header(io.BytesIO(content), "here", 3)
    with pytest.raises(InvalidCheckpoint, match=r"SHA-256 is [0-9a-f]{64}; the manifest says 00"):
        read_header(io.BytesIO(content), "here", len(content), "00" * 32)


def test_a_damaged_tensor_is_named() -> None:
    content = bytearray(forged())
    header = read_header(io.BytesIO(content), "here")
    content[-1] ^= 1
    assert read_tensor(io.BytesIO(content), header, "t/0/values") == bytes(8)
    with pytest.raises(InvalidCheckpoint, match="here: tensor 't/0/exp_avg' is damaged: its CRC"):
        read_tensor(io.BytesIO(content), header, "t/0/exp_avg")
    with pytest.raises(InvalidCheckpoint, match="'t/0/exp_avg' ends after 7 of 8 bytes"):
        read_tensor(io.BytesIO(content[:-1]), header, "t/0/exp_avg")
