"""A worker's state comes back bit for bit, and nothing that is not one does."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ps_core.errors import InvalidCheckpoint
from ps_worker.checkpoint.state_codec import _DECODERS, TENSOR_DTYPES, decode, encode
from tests.examples import examples
from tests.unit.worker_files import from_file, to_file

pytestmark = pytest.mark.slow

ARRAY_DTYPES = [
    "?", "i1", "<u2", "<i4", ">i4", "<u8", "<f2", "<f4", ">f8", "<c8", "<c16", "<M8[ns]", "<m8[3D]",
]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Whether two states are of the same types throughout, in the same order, to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        )
    if isinstance(one, np.ndarray | np.generic):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return bool(is_alike and one.tobytes() == other.tobytes())
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, dict):
        return vars_of(one) == vars_of(other) and same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return same(sorted(one, key=ordinal), sorted(other, key=ordinal))
    return bool(one == other)


def vars_of(value: Any) -> dict[str, Any]:
    """The attributes of an OrderedDict; other dicts have none."""
    return vars(value) if isinstance(value, OrderedDict) else {}


def ordinal(value: Any) -> tuple[str, bytes, str]:
    """Something that orders simple values of all types, floats by their bits."""
    bits = struct.pack(">d", value) if isinstance(value, float) else b""
    return type(value).__name__, bits, "" if bits else repr(value)


def tensor_of(dtype: torch.dtype, shape: list[int], raw: bytes) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    filled = (raw * (count // len(raw) + 1))[:count]
    if dtype is torch.bool:
        filled = bytes(byte & 1 for byte in filled)
    return torch.tensor(list(filled), dtype=torch.uint8).view(dtype).reshape(shape)


def array_of(dtype: str, shape: list[int], raw: bytes) -> Any:
    kind = np.dtype(dtype)
    count = math.prod(shape) * kind.itemsize
    filled = (raw * (count // len(raw) + 1))[:count]
    if kind.kind == "b":
        filled = bytes(byte & 1 for byte in filled)
    return np.frombuffer(filled, dtype=kind).reshape(shape).copy()


texts = st.one_of(
    st.text(max_size=6),
    st.text(st.sampled_from("$a\ud83d\ude00\x00"), max_size=4),
    st.sampled_from(["$tensor", "$int", "$", "__metadata__"]),
)
floats = st.one_of(
    st.floats(),
    st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0]),
    st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324]),
)
integers = st.one_of(st.integers(), st.sampled_from([2**53, -(2**53) - 1, 2**64]))
simple = st.one_of(st.none(), st.booleans(), integers, floats, texts, st.binary(max_size=5))
shapes = st.lists(st.integers(0, 3), max_size=3)
raws = st.binary(min_size=1, max_size=16)
tensors = st.builds(tensor_of, st.sampled_from(sorted(TENSOR_DTYPES, key=str)), shapes, raws)
arrays = st.builds(array_of, st.sampled_from(ARRAY_DTYPES), shapes, raws)
scalars = st.builds(
    lambda dtype, raw: array_of(dtype, [1], raw)[0], st.sampled_from(ARRAY_DTYPES), raws
)
others = st.sampled_from([torch.float32, torch.bfloat16, torch.Size([]), torch.Size([2, 0])])
leaves = st.one_of(simple, tensors, arrays, scalars, others, st.frozensets(simple), st.sets(simple))


def module_state(pairs: list[tuple[Any, Any]]) -> OrderedDict[Any, Any]:
    state = OrderedDict(pairs)
    vars(state)["_metadata"] = OrderedDict([("", {"version": 1})])
    return state


def dicts_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(simple, inner), max_size=4)
    plain = st.dictionaries(st.text(max_size=5), inner, max_size=4)
    return st.one_of(
        plain,
        pairs.map(dict),
        pairs.map(OrderedDict),
        pairs.map(module_state),
        st.dictionaries(simple, st.integers(), max_size=4).map(Counter),
    )


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    return st.one_of(lists, lists.map(tuple), dicts_of(inner))


states = dicts_of(st.recursive(leaves, nested, max_leaves=12))


@pytest.mark.thorough
@given(states)
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.too_slow])
def test_a_state_comes_back_bit_for_bit(state: dict[Any, Any]) -> None:
    value, kept = encode(state)
    read = json.loads(json.dumps(value, allow_nan=False))
    assert same(decode(read, kept), state)


@given(states)
@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_a_file_has_the_state_bit_for_bit(tmp_path: Path, state: dict[Any, Any]) -> None:
    path = tmp_path / "worker.safetensors"
    to_file(path, state)
    assert same(from_file(path).state, state)


tags = st.sampled_from([*_DECODERS, "$", "$unknown"])
json_leaves = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats(),
    texts,
    st.sampled_from(
        ["bytes", "floats", "0x1f", "-0x1", "QUJD", "<f8", "<M8[s]", "float32", "<M8[0s]"]
    ),
)
bodies = st.one_of(
    st.tuples(
        st.sampled_from(["<f8", "|u1", "<m8[9999999999s]", "<M8[0s]"]),
        st.sampled_from([[1], [0, 2**62, 2**62], [8], [-1], ["x"]]),
        st.sampled_from(["bytes", "floats", "none"]),
    ).map(list),
    st.tuples(st.sampled_from(["<f8", "|u1"]), st.sampled_from(["QQ==", "AAAAAAAAAAA="])).map(list),
)


def json_nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(texts, inner, max_size=3),
        st.builds(lambda tag, body: {tag: body}, tags, st.one_of(inner, bodies)),
        st.builds(
            lambda tag, pairs: {tag: pairs},
            tags,
            st.lists(st.tuples(inner, inner).map(list), max_size=3),
        ),
    )


@pytest.mark.thorough
@given(st.recursive(json_leaves, json_nested, max_leaves=15))
@settings(max_examples=examples(1500), suppress_health_check=[HealthCheck.too_slow])
@example({"$set": [{"$list": []}]})
@example({"$tuple": [{"$dict": [[[], 1]]}]})
@example({"a": {"$array": ["<f8", [0, 2**62, 2**62], "none"]}})
def test_whatever_json_says_it_is_a_state_or_refused(value: Any) -> None:
    raw = torch.zeros(8, dtype=torch.uint8)
    kept = {"bytes": raw, "none": raw[:0], "floats": torch.zeros(2)}
    try:
        state = decode(value, kept)
    except InvalidCheckpoint:
        return
    assert isinstance(state, dict)
    encode(state)


def deep(levels: int, tag: str | None) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value] if tag is None else {tag: [value]}
    return {"a": value}


@pytest.mark.thorough
@pytest.mark.parametrize("tag", [None, "$tuple", "$set", "$dict"])
def test_json_of_any_depth_is_refused_and_not_followed(tag: str | None) -> None:
    with pytest.raises(InvalidCheckpoint):
        decode(deep(100_000, tag), {})


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    path = tmp_path_factory.mktemp("parts") / "worker.safetensors"
    state = {
        "weights": torch.arange(40.0),
        "order": np.arange(9),
        "rate": 0.5,
        "empty": torch.empty(0),
    }
    written = to_file(path, state)
    return path.read_bytes(), written.header_sha256


@given(place=st.floats(0, 1, exclude_max=True), flipped=st.integers(1, 255))
@settings(max_examples=examples(400))
def test_a_changed_byte_anywhere_is_found(
    part: tuple[bytes, str], place: float, flipped: int
) -> None:
    raw, digest = part
    at = int(place * len(raw))
    damaged = raw[:at] + bytes([raw[at] ^ flipped]) + raw[at + 1 :]
    with pytest.raises(InvalidCheckpoint, match="a part"):
        from_file(damaged, len(raw), digest)


@given(place=st.floats(0, 1, exclude_max=True), flipped=st.integers(1, 255))
@settings(max_examples=examples(400))
def test_without_the_manifest_a_changed_byte_is_refused_or_read(
    part: tuple[bytes, str], place: float, flipped: int
) -> None:
    raw, _ = part
    at = int(place * len(raw))
    damaged = raw[:at] + bytes([raw[at] ^ flipped]) + raw[at + 1 :]
    with suppress(InvalidCheckpoint):  # a name, a clock: no checksum of the file itself has them
        from_file(damaged)


@given(place=st.floats(0, 1, exclude_max=True))
def test_a_file_that_ends_early_anywhere_is_refused(part: tuple[bytes, str], place: float) -> None:
    raw, _ = part
    with pytest.raises(InvalidCheckpoint, match="a part"):
        from_file(raw[: int(place * len(raw))])


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidCheckpoint, match="a part"):
        from_file(raw)
