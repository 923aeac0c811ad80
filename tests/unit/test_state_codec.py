"""What a worker's own state may have, what is refused and why, and the file that it is in."""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import json
import struct
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.limits import MAX_STATE_DEPTH, MAX_STATE_HEADER_BYTES
from ps_worker.state_codec import WorkerState, decode, encode, from_file, to_file

CLUSTER = "3fa9c1d27b60a5e4"


WEIGHT = nn.Parameter(torch.ones(2))


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


def returned(state: dict[Any, Any]) -> dict[Any, Any]:
    value, tensors = encode(state)
    return decode(json.loads(json.dumps(value)), tensors)


def test_simple_states_read_as_themselves() -> None:
    state = {"lr": {"base_lrs": [0.1, 1], "last": None, "on": True, "name": "step"}}
    assert encode(state) == (state, {})


def test_a_tensor_is_named_for_its_path() -> None:
    value, tensors = encode({"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}})
    name = "optimizer.state[0].step"
    assert value == {"optimizer": {"state": {"$dict": [[0, {"step": {"$tensor": name}}]]}}}
    assert list(tensors) == [name]


def test_tensors_of_equal_paths_and_reserved_names_have_names_of_their_own() -> None:
    one, two, three, four = (torch.tensor(number) for number in range(4))
    state = {"a": {0: one, "b": two}, "__metadata__": three, "a[0]#1": four}
    state["a"] = {0: one, "b": [two], "b[0]": two}
    value, tensors = encode({**state, "same": {0: one}, "list": [[one], {0: two}]})
    assert "__metadata__" not in tensors
    assert len(tensors) == 8
    assert decode(value, tensors)["__metadata__"] == three


def test_long_keys_of_tensors_do_not_collide() -> None:
    state = {"k" * 300 + str(number): torch.tensor(number) for number in range(3)}
    assert returned(state) == state


def test_integers_of_any_size_come_back() -> None:
    numbers = [10**5000, -(10**5000), 2**53, 1 - 2**53, 0]
    state: dict[Any, Any] = {"seeds": numbers, **dict.fromkeys(numbers, "as a key")}
    assert returned(state) == state


def test_a_path_with_a_huge_key_can_be_said() -> None:
    state: dict[Any, Any] = {10**5000: object()}
    with pytest.raises(InvalidConfig, match=r"^\[an integer of 16610 bits\] is a object;"):
        encode(state)


def test_a_reference_that_is_huge_can_be_said() -> None:
    with pytest.raises(InvalidCheckpoint, match="a is an integer of 16610 bits; expected a hexa"):
        decode({"a": {"$int": 10**5000}}, {})


def test_what_looks_like_a_reference_is_not_one() -> None:
    state = {"a": {"$tensor": "b"}, "b": "$tensor", "$dict": [], "c": {"$int": "0x1", "d": 1}}
    assert returned(state) == state


def test_texts_that_are_no_unicode_come_back_apart() -> None:
    state = {"\ud83d\ude00": "\udcff", "pair": "\ud83d\ude00", "letter": "\U0001f600"}
    back = returned(state)
    assert back == state
    assert [len(back["pair"]), len(back["letter"])] == [2, 1]


def test_views_and_tied_tensors_come_back_apart_and_contiguous() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"turned": base.T, "row": base[1], "spread": torch.ones(1).expand(5), "tied": base}
    back = returned(state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor)
        assert back[name].is_contiguous()
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == 4


def test_tensors_and_arrays_are_copied_when_they_are_encoded() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    value, tensors = encode({"tensor": tensor, "array": array})
    tensor += 1
    array += 1
    back = decode(value, tensors)
    assert back["tensor"].tolist() == back["array"].tolist() == [0.0] * 3


def test_a_parameter_becomes_the_tensor_that_it_holds() -> None:
    back = returned({"weight": WEIGHT, "grown": WEIGHT * 2})
    assert [(type(one), one.requires_grad) for one in back.values()] == [(torch.Tensor, False)] * 2


def test_what_torch_computes_lazily_is_saved_as_it_reads() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugate": numbers.conj(), "negative": numbers.conj().imag}
    back = returned(state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_arrays_come_back_writable_and_of_their_dtype() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3).T
    back = returned({"array": array})["array"]
    assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())
    back[0, 0] = 7


def test_a_modules_state_keeps_its_metadata() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    back = returned({"model": state})["model"]
    assert type(back) is OrderedDict
    assert list(back) == list(state)
    assert vars(back) == vars(state)
    assert type(vars(back)["_metadata"]) is OrderedDict


def ordered_with_attribute() -> OrderedDict[str, int]:
    state: OrderedDict[str, int] = OrderedDict()
    vars(state)["factory"] = print
    return state


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 0, r"lr\.lambdas\[0\] is a function; a state may have None, bool, int"),
        (functools.partial(print), r"lr\.lambdas\[0\] is a functools\.partial;"),
        (defaultdict(list), r"lr\.lambdas\[0\] is a collections?\.?defaultdict;|is a defaultdict;"),
        (Colour.RED, r"is a .*Colour;"),
        (Point(1), r"is a .*Point;"),
        (bytearray(b"a"), "is a bytearray;"),
        (1j, "is a complex;"),
        (range(3), "is a range;"),
        (torch.device("cpu"), r"is a torch\.device;"),
        (np.array(["a"]), "numpy's dtype <U1; expected one of booleans, numbers or times"),
        (np.array([None]), "numpy's dtype object;"),
        (np.str_("a"), "numpy's dtype <U1;"),
        (np.ma.masked_array([1]), r"is a numpy\.ma\..*MaskedArray;"),
        (torch.zeros(2, 2).to_sparse(), r"a tensor of torch\.float32, torch\.sparse_coo, on cpu"),
        (torch.zeros(2, dtype=torch.complex128), r"torch\.complex128, .* expected a dense one"),
        (torch.zeros(2, device="meta"), "on meta; expected a dense one, with values"),
        ({(1, 2): 3}, r"\[0\]\[\(1, 2\)\]: a tuple as key or element; expected one of NoneType"),
        ({frozenset({1})}, "a frozenset as key or element"),
        ({np.int64(3): 1}, r"a numpy\.int64 as key"),
        (ordered_with_attribute(), "an OrderedDict with attributes of its own: factory"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(value: object, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as raised:
        encode({"lr": {"lambdas": [value]}})
    assert raised.value.message.startswith("lr.lambdas[0]")


def test_a_state_that_is_no_dict_is_refused() -> None:
    wrong: Any = [1]
    with pytest.raises(InvalidConfig, match="the state is a list; expected a dict"):
        encode(wrong)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["inner"] = [state, state]
    with pytest.raises(InvalidConfig, match=f"nested deeper than {MAX_STATE_DEPTH}"):
        encode(state)


def test_the_deepest_state_comes_back_and_a_deeper_one_is_refused() -> None:
    state: Any = {}
    for _ in range(MAX_STATE_DEPTH):
        state = {0: state}
    assert returned(state) == state
    with pytest.raises(InvalidConfig, match="nested deeper"):
        encode({"a": state})
    with pytest.raises(InvalidCheckpoint, match="nested deeper"):
        decode({"a": encode(state)[0]}, {})


NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "the state is a list; expected a dict"),
        ({"$counter": [["a"]]}, "the state is a list of 1; expected a list of pairs"),
        ({"a": [{"$tensor": "b"}]}, r"a\[0\] is 'b'; expected the name of a tensor"),
        ({"a": {"$tensor": []}}, "a is a list of 0; expected the name of a tensor"),
        (
            {"a": {"$tensor": "t"}, "b": {"$tensor": "t"}},
            "b is 't'; expected a tensor that nothing",
        ),
        ({}, "nothing in the state refers to tensor 't' and 0 others"),
        ({"a": {"$tuple": [], "b": 1}}, r"a is '\$tuple, b'; expected one key of \$int"),
        ({"a": {"$pickle": "gASVBgAAAA=="}}, r"a is '\$pickle'; expected one key of"),
        ({"a": NAN}, "a is nan; expected a finite number"),
        ({"a": {"$int": "12"}}, "a is '12'; expected a hexadecimal integer"),
        ({"a": {"$float": "7ff8"}}, "8 bytes of a float"),
        ({"a": {"$bytes": "é"}}, "bytes in base64"),
        ({"a": {"$bytes": "A"}}, "bytes in base64"),
        ({"a": {"$text": "/w=="}}, "text in UTF-8"),
        ({"a": {"$set": [1, 1]}}, "elements that differ"),
        ({"a": {"$set": [[]]}}, r"a\[0\] is a list of 0; expected a simple value"),
        ({"a": {"$dict": [[1, 2], [True, 3]]}}, "keys that differ"),
        ({"a": {"$dict": [[{"$tuple": []}, 2]]}}, "expected a simple value, as key"),
        ({"a": {"$module": [[]]}}, "expected pairs and metadata"),
        ({"a": {"$size": [-1]}}, "a list of at most 64 lengths"),
        ({"a": {"$dtype": "load"}}, "a is 'load'; expected a dtype of torch"),
        ({"a": {"$array": ["|O", [1], "t"]}}, r"a is '\|O'; expected a dtype of numpy"),
        ({"a": {"$array": ["<f3", [1], "t"]}}, "a is '<f3'; expected a dtype of numpy"),
        ({"a": {"$array": ["<f8", [2], "t"]}}, r"torch.uint8 of shape \[8\]'; expected bytes of"),
        ({"a": {"$array": ["<f8", [2]]}}, "a dtype, a shape and the name of a tensor"),
        ({"a": {"$scalar": ["<f8", "AA=="]}}, "a is '1 bytes'; expected 8 of float64"),
        ({"a": {"$scalar": "<f8"}}, "a dtype and bytes in base64"),
        ({"a": object()}, "expected a value of JSON"),
    ],
)
def test_json_that_is_no_state_is_refused_by_its_path(value: object, words: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=words):
        decode(value, {"t": torch.zeros(8, dtype=torch.uint8)})


STATE = {
    "scheduler": {"milestones": Counter({3: 1}), "last": -0.0},
    "order": np.arange(5),
    "average": {"weight": torch.arange(6, dtype=torch.bfloat16), "none": torch.empty(0, 3)},
}


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "worker-0-8817.safetensors"
    to_file(path, STATE, 12, CLUSTER, 2, 41)
    return path


def changed(
    path: Path, change: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    """The part with other words in its metadata, and its tensors unless there are `tensors`."""
    with safetensors.safe_open(path, "pt") as file:
        words = {**json.loads(file.metadata()["pushpull"]), **change}
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    safetensors.torch.save_file(
        kept if tensors is None else tensors, path, {"pushpull": json.dumps(words)}
    )
    return path


def test_a_part_is_as_the_page_has_it(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"what was here before" * 1000)
    byte_count, digest = to_file(path, STATE, 12, CLUSTER, 2, 41)
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + header_bytes]
    assert byte_count == len(raw)
    assert digest == hashlib.sha256(header).hexdigest()
    words = json.loads(json.loads(header)["__metadata__"]["pushpull"])
    names = {"order", "average.weight", "average.none"}
    assert words.keys() == {
        "version",
        "checkpoint",
        "cluster_id",
        "rank",
        "clock",
        "state",
        "crc32",
    }
    assert (words["version"], words["checkpoint"], words["cluster_id"]) == (1, 12, CLUSTER)
    assert words["crc32"].keys() == json.loads(header).keys() - {"__metadata__"} == names
    assert words["crc32"]["average.none"] == 0


def test_a_part_comes_back_from_a_path_and_from_an_open_file(part: Path) -> None:
    raw = part.read_bytes()
    for source in (part, str(part), io.BytesIO(raw)):
        found = from_file(source, "a part", byte_count=len(raw))
        assert found == WorkerState(2, 41, 12, CLUSTER, found.state)
        assert found.state["scheduler"] == STATE["scheduler"]
        assert torch.equal(found.state["average"]["weight"], STATE["average"]["weight"])  # type: ignore[index]
        found.state["average"]["weight"] += 1


def test_a_part_without_tensors_comes_back(tmp_path: Path) -> None:
    to_file(tmp_path / "part", {"step": 3}, 1, CLUSTER, 0, 0)
    assert from_file(tmp_path / "part", "a part").state == {"step": 3}


def test_a_flipped_bit_in_a_tensor_is_found(part: Path) -> None:
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    with pytest.raises(
        InvalidCheckpoint, match=r"^a part: tensor '.*' is damaged: CRC-32 \d+, exp"
    ):
        from_file(io.BytesIO(raw), "a part")


def test_a_flipped_bit_in_the_header_is_found(part: Path) -> None:
    raw = part.read_bytes()
    byte_count, digest = to_file(part, STATE, 12, CLUSTER, 2, 41)
    damaged = raw.replace(rb"\"clock\":41", rb"\"clock\":43")
    assert damaged != raw
    assert from_file(io.BytesIO(damaged), "a part").clock == 43
    with pytest.raises(InvalidCheckpoint, match=f"^a part: its header's SHA-256 is .* {digest}"):
        from_file(io.BytesIO(damaged), "a part", byte_count=byte_count, header_sha256=digest)


@pytest.mark.parametrize("kept_bytes", [0, 7, 8, 100, -1])
def test_a_torn_file_is_refused(part: Path, kept_bytes: int) -> None:
    raw = part.read_bytes()
    with pytest.raises(InvalidCheckpoint, match=r"^a part: (it ends within|not a whole)"):
        from_file(io.BytesIO(raw[:kept_bytes]), "a part")
    with pytest.raises(InvalidCheckpoint, match=r"^a part: it has \d+ bytes; expected"):
        from_file(io.BytesIO(raw[:kept_bytes]), "a part", byte_count=len(raw))


def test_a_file_that_is_longer_than_the_manifest_says_is_refused(part: Path) -> None:
    byte_count = part.stat().st_size
    part.write_bytes(part.read_bytes() + b"more")
    with pytest.raises(InvalidCheckpoint, match=f"it has more bytes; expected {byte_count}"):
        from_file(part, "a part", byte_count=byte_count)
    with pytest.raises(InvalidCheckpoint, match="not a whole safetensors file"):
        from_file(part, "a part")


def test_a_header_of_any_length_is_not_believed() -> None:
    raw = struct.pack("<Q", MAX_STATE_HEADER_BYTES + 1) + b"{}"
    with pytest.raises(InvalidCheckpoint, match="a header of 100000001 bytes; at most 100000000"):
        from_file(io.BytesIO(raw), "a part")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{}", "its metadata is not one text named pushpull"),
        (b'{"__metadata__": {"pushpull": "{}", "format": "pt"}}', "not one text named pushpull"),
        (b'{"__metadata__": {"pushpull": 3}}', "not one text named pushpull"),
        (b'{"__metadata__": {"pushpull": "[]"}}', "a header that is a list; expected an object"),
        (b'{"__metadata__": {"pushpull": "{"}}', "its header is not JSON"),
        (b"[" * 100_000, "its header is not JSON"),
        (b"\xff", "its header is not JSON"),
        (b"{1}", "its header is not JSON"),
    ],
)
def test_a_header_that_is_no_parts_is_refused(header: bytes, words: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=f"^a part: .*{words}"):
        from_file(io.BytesIO(struct.pack("<Q", len(header)) + header), "a part")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2; expected 1"),
        ({"version": True}, "version is True; expected a number"),
        ({"rank": -1}, "rank is -1; expected a number that is not negative"),
        ({"clock": 1.5}, r"clock is 1\.5"),
        ({"cluster_id": None}, "cluster_id is None; expected a str"),
        ({"crc32": []}, "crc32 is a list of 0; expected a dict"),
        ({"blocks": {}}, "a worker's part says blocks, checkpoint, clock, .* expected checkpoint"),
        ({"crc32": {}}, "has no checksum, or a checksum has no tensor"),
        ({"crc32": {"order": 1, "average.weight": 2, "average.none": "x"}}, "is damaged"),
        ({"state": {"lr": {"$tensor": "order"}}}, "nothing in the state refers to tensor 'average"),
        ({"state": {"lr": {"$tensor": "x"}}}, "^a part: lr is 'x'; expected the name of a tensor"),
    ],
)
def test_a_part_that_says_something_else_is_refused(
    part: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=words) as raised:
        from_file(changed(part, change), "a part")
    assert raised.value.message.startswith("a part: ")


def test_a_tensor_that_is_missing_is_named(part: Path) -> None:
    with pytest.raises(
        InvalidCheckpoint, match=r"tensor 'average\.(none|weight)' has no checksum, or"
    ):
        from_file(changed(part, {}, {"order": torch.zeros(1)}), "a part")


def test_a_file_that_is_not_there_is_an_invalid_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"^worker 3: there is no such file"):
        from_file(tmp_path / "part", "worker 3")


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        to_file(tmp_path / "none/part", STATE, 12, CLUSTER, 2, 41)


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.symlink_to("/dev/full")  # a link: what replaces it, as root, replaces no device
    with pytest.raises(OSError, match="No space left on device"):
        to_file(path, STATE, 12, CLUSTER, 2, 41)


def test_whoever_reads_the_folder_reads_the_part(part: Path) -> None:
    other = part.with_name("other")
    other.touch()
    assert part.stat().st_mode == other.stat().st_mode


def test_too_much_beside_the_tensors_is_refused(tmp_path: Path) -> None:
    state = {"long": bytes(MAX_STATE_HEADER_BYTES * 3 // 4)}
    with pytest.raises(InvalidConfig, match=r"too large|at most 100000000"):
        to_file(tmp_path / "part", state, 12, CLUSTER, 2, 41)
