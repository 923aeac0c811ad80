"""A worker's own state in its file: as the page has it, refused with the file and the reason."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from ps_core.change import Checkpoint
from ps_core.cluster_view import Role, Session
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.keys import Incarnation, NodeId
from ps_core.manifest import SavedWorker
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_file import ELEMENT_BYTES, MAX_HEADER_BYTES
from ps_worker.checkpoint.saved_states import RestoredStates, copied, encoded, states_of
from ps_worker.checkpoint.state_codec import TENSOR_DTYPES
from tests.unit.checkpoint_files import SPECS, write_checkpoint
from tests.unit.worker_files import CLUSTER, Found, from_file, to_file

STATE: dict[str, Any] = {
    "scheduler": {"milestones": Counter({3: 1}), "last": -0.0},
    "order": np.arange(5),
    "average": {"weight": torch.arange(6, dtype=torch.bfloat16), "none": torch.empty(0, 3)},
}


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "worker-0-8817.safetensors"
    to_file(path, STATE)
    return path


def test_a_part_is_as_the_page_has_it(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"what was here before" * 1000)
    written = to_file(path, STATE)
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + header_bytes]
    assert written.byte_count == len(raw)
    assert written.header_sha256 == hashlib.sha256(raw[: 8 + header_bytes]).hexdigest()
    words = json.loads(json.loads(header)["__metadata__"]["pushpull"])
    names = {"order", "average.weight", "average.none"}
    assert words.keys() == {
        "version", "checkpoint", "cluster_id", "rank", "clock", "state", "crc32",
    }  # fmt: skip
    assert (words["version"], words["checkpoint"], words["cluster_id"]) == (1, 12, CLUSTER)
    assert words["crc32"].keys() == json.loads(header).keys() - {"__metadata__"} == names
    assert words["crc32"]["average.none"] == 0


def test_safetensors_reads_it(part: Path) -> None:
    found = safetensors.torch.load_file(part)
    assert torch.equal(found["average.weight"], STATE["average"]["weight"])


def test_a_part_comes_back_and_is_its_readers_own(part: Path) -> None:
    found = from_file(part)
    assert found == Found(2, 41, 12, CLUSTER, found.state)
    assert found.state["scheduler"] == STATE["scheduler"]
    assert torch.equal(found.state["average"]["weight"], STATE["average"]["weight"])
    found.state["average"]["weight"] += 1
    found.state["order"][0] = 7


def test_a_part_without_tensors_comes_back(tmp_path: Path) -> None:
    to_file(tmp_path / "part", {"step": 3})
    assert from_file(tmp_path / "part").state == {"step": 3}


def test_every_dtype_of_a_state_has_a_name_in_files() -> None:
    assert set(TENSOR_DTYPES.values()) <= ELEMENT_BYTES.keys()
    for dtype, name in TENSOR_DTYPES.items():
        assert dtype.itemsize == ELEMENT_BYTES[name]


def test_tensors_are_copied_once() -> None:
    """When they are encoded, so that training goes on; a third copy may not fit."""
    weight = torch.ones(8)
    _, payloads = encoded({"model": {"weight": weight}})
    weight += 1
    (payload,) = payloads.values()
    assert np.frombuffer(payload.payload, np.float32).tolist() == [1.0] * 8
    assert memoryview(payload.payload).obj is not None
    assert not isinstance(payload.payload, bytes | bytearray)


def test_a_flipped_bit_in_a_tensor_is_found(part: Path) -> None:
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    with pytest.raises(InvalidCheckpoint, match=r"^a part"):
        from_file(bytes(raw))


def changed(path: Path, change: dict[str, Any]) -> Path:
    """The part with other words in its metadata."""
    with safetensors.safe_open(path, "pt") as file:
        words = {**json.loads(file.metadata()["pushpull"]), **change}
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    safetensors.torch.save_file(kept, path, {"pushpull": json.dumps(words)})
    return path


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"lr": {"$tensor": "order"}}, "nothing in the state refers to tensor 'average"),
        ({"lr": {"$tensor": "x"}}, "lr is 'x'; expected the name of a tensor"),
        ({"lr": {"$pickle": "gASVBgAAAA=="}}, r"lr is '\$pickle'; expected one key of"),
        ([], "the state is a list; expected a dict"),
    ],
)
def test_a_part_that_is_no_state_is_refused_with_its_name(
    part: Path, state: object, words: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=f"^a part: .*{words}"):
        from_file(changed(part, {"state": state}))


def test_a_servers_part_is_no_workers(tmp_path: Path) -> None:
    directory = CheckpointDirectory(locate(f"file://{tmp_path}/00000001-3fa9c1d2"))
    manifest = write_checkpoint(directory, 1)
    raw = (tmp_path / "00000001-3fa9c1d2" / manifest.parts[0].file).read_bytes()
    with pytest.raises(InvalidCheckpoint, match="a part is no worker's part"):
        from_file(raw)


def test_too_much_beside_the_tensors_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """It could be written, and nothing could read it back."""
    with pytest.raises(InvalidCheckpoint, match=r"without its tensors takes .* at most 100000000"):
        to_file(tmp_path / "part", {"long": bytes(MAX_HEADER_BYTES * 3 // 4)})
    assert not (tmp_path / "part").exists()


def test_whoever_reads_the_folder_reads_the_part(part: Path) -> None:
    other = part.with_name("other")
    other.touch()
    assert part.stat().st_mode == other.stat().st_mode


# --- in a checkpoint


def saved(
    tmp_path: Path,
    states: dict[int, dict[str, Any]],
    lost: tuple[int, ...] = (),
    number: int = 1,
    timeline: bytes = bytes(16),
) -> str:
    """A checkpoint of these ranks' states; of some there is none."""
    url = f"{tmp_path}/{number:08d}-3fa9c1d2"
    directory = CheckpointDirectory(locate(url))
    manifest = replace(write_checkpoint(directory, number), timeline=timeline)
    (tmp_path / directory.name / "manifest.json").unlink()
    workers = [SavedWorker(rank, 41, "", 0, "", "it died") for rank in lost]
    for rank, state in states.items():
        session = Session(
            CLUSTER, bytes(16), NodeId(rank + 9), Incarnation(rank + 70), Role.WORKER, rank
        )
        report = copied(session, Checkpoint(number, url, is_cut=True), 41, state)()
        assert report.file == f"worker-{rank}-{rank + 70}.safetensors"
        workers.append(
            SavedWorker(rank, 41, report.file, report.byte_count, report.header_sha256, "")
        )
    directory.write_manifest(replace(manifest, workers=tuple(workers)))
    return url


def test_each_rank_has_its_own_and_others_the_lowest_ranks(tmp_path: Path) -> None:
    url = saved(tmp_path, {1: {"data": {"at": 10}}, 2: {"data": {"at": 20}}}, lost=(0,))
    for rank, is_own, at in ((0, False, 10), (1, True, 10), (2, True, 20), (5, False, 10)):
        found = RestoredStates(url, rank)
        assert (found.is_own, found.find("data")) == (is_own, {"at": at})
        assert found.find("rate") is None


def test_what_a_rank_lacks_is_known_of_those_that_the_checkpoint_has(tmp_path: Path) -> None:
    url = saved(tmp_path, {1: {"data": {"at": 10}}, 2: {"rate": 1}}, lost=(0,))
    missing = {rank for rank in (0, 1, 2, 3) if RestoredStates(url, rank).misses(rank, "data")}
    assert missing == {0, 2}


def test_a_state_of_other_ranks_is_read_without_what_is_beside_it(tmp_path: Path) -> None:
    left: dict[str, Any] = {"residuals": torch.arange(4.0), "seen": [np.arange(3)], "scale": 2.0}
    states = {rank: {"left": left, "beside": torch.full((8,), 77)} for rank in (1, 2, 4)}
    url = saved(tmp_path, {0: {}, **states, 5: {"beside": 0}}, lost=(3,))
    for part in tmp_path.glob("*/worker-*"):
        raw = part.read_bytes()
        part.write_bytes(raw.replace(b"\x4d\0\0\0", b"\x4e\0\0\0"))
    with pytest.raises(InvalidCheckpoint, match="beside"):
        RestoredStates(url, 2)
    found = states_of(url, "left", {0, 2, 3, 4, 5, 9})
    assert found.keys() == {2, 4}
    for each in found.values():
        assert torch.equal(each["residuals"], left["residuals"])
        assert np.array_equal(each["seen"][0], np.arange(3))
        assert each["scale"] == 2.0


def test_a_checkpoint_whose_states_are_all_lost_has_none(tmp_path: Path) -> None:
    found = RestoredStates(saved(tmp_path, {}, lost=(0, 1)), 1)
    assert (found.is_own, found.find("data")) == (False, None)


def test_a_state_that_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    session = Session(CLUSTER, bytes(16), NodeId(9), Incarnation(70), Role.WORKER)
    checkpoint = Checkpoint(1, f"file://{tmp_path}/00000001-3fa9c1d2", is_cut=True)
    with pytest.raises(InvalidConfig, match=r"a\.b is a object"):
        copied(session, checkpoint, 41, {"a": {"b": object()}})
    assert not list(tmp_path.iterdir())


class Model:
    """A state with parameters that no server has."""

    begins_anew = "To begin anew, give it another name"
    keeps_parameters = True

    def __init__(self, *tables: str) -> None:
        self._tables = tables

    def is_part_of(self, tables: Collection[str]) -> bool:
        """Of its own."""
        return not set(self._tables).isdisjoint(tables)


class Other(Model):
    """A state without."""

    keeps_parameters = False


TABLE = SPECS[0].name


def test_a_checkpoint_without_the_parameters_is_refused_with_one_that_has_them(
    tmp_path: Path,
) -> None:
    states = {0: {"optimizer/a": {"lr": 1}}}
    saved(tmp_path, states, number=1)
    whole = saved(tmp_path, {1: states[0]}, lost=(0,), number=2)
    saved(tmp_path, {0: {"data": {"at": 1}}}, number=3)
    saved(tmp_path, states, number=4, timeline=b"another run's")
    url = saved(tmp_path, {}, lost=(1, 0), number=5)
    saved(tmp_path, states, number=6)
    found = RestoredStates(url, 1)
    with pytest.raises(InvalidCheckpoint) as refused:
        found.check_parameters("optimizer/a", Model("new", TABLE))
    for words in (url, "worker 1: it died", f"resume from {whole}", Model.begins_anew):
        assert words in refused.value.message
    with pytest.raises(InvalidCheckpoint, match="no older one there has them"):
        found.check_parameters("optimizer/b", Model(TABLE))
    for state in (Model("new"), Other(TABLE), object()):
        found.check_parameters("optimizer/a", state)
    RestoredStates(whole, 0).check_parameters("optimizer/b", Model(TABLE))
