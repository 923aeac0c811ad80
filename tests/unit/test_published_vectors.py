"""Slots, ranges, segments, presence, codecs and tokens are those that protocol_vectors.json
publishes: a client in another language was written from that file.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from docs import payload_codec as codec
from ps_core.cluster_view import Role, Session
from ps_core.codecs import int8, low_rank, low_rank_loops, low_rank_passes, sign, sparse
from ps_core.keys import (
    Incarnation,
    NodeId,
    Slot,
    TableId,
    key_ranges,
    range_of_slot,
    slot_of_ordinal,
)
from ps_core.tables.elements import Codec, DType, check_length, pack_presence, unpack_presence
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec, TensorSpec

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "docs/reference/protocol_vectors.json").read_text()
)


def test_slots() -> None:
    for vector in VECTORS["slots"]:
        assert slot_of_ordinal(vector["ordinal"]) == vector["slot"]


@pytest.mark.parametrize("vector", VECTORS["ranges"])
def test_ranges(vector: dict[str, Any]) -> None:
    count = vector["range_count"]
    ranges = key_ranges(count)
    assert len(ranges) == count
    for published in vector["ranges"]:
        found = ranges[published["range"]]
        assert (found.begin, found.end) == (published["begin_slot"], published["end_slot"])
        assert Slot(found.begin) in found
        assert Slot(found.end) not in found
    for published in vector["slots"]:
        assert range_of_slot(Slot(published["slot"]), count) == published["range"]


@pytest.mark.parametrize("layout", VECTORS["layouts"])
def test_layouts(layout: dict[str, Any]) -> None:
    tensors = tuple(
        TensorSpec(t["name"], tuple(t["shape"]), t["offset"]) for t in layout["tensors"]
    )
    spec = TableSpec(
        "t", DType.FLOAT32, layout["element_count"], OptimizerSpec(OptimizerKind.SGD),
        block_elements=layout["block_elements"], tensors=tensors,
    )  # fmt: skip
    table = Table(TableId(1), layout["first_ordinal"], spec.validated())
    assert table.block_count == len(layout["blocks"])
    for block in layout["blocks"]:
        number = block["block"]
        assert table.block_length(number) == block["length"]
        assert table.range_of_block(number, layout["range_count"]) == block["range"]
        found = [(s.tensor, s.begin, s.end) for s in table.segments(number)]
        assert found == [(s["tensor"], s["begin"], s["end"]) for s in block["segments"]]
    for range_id, blocks in table.blocks_by_range(layout["range_count"]).items():
        assert blocks == tuple(b["block"] for b in layout["blocks"] if b["range"] == range_id)


def test_presence() -> None:
    for vector in VECTORS["presence"]:
        present = tuple(vector["present"])
        assert pack_presence(present).hex() == vector["hex"]
        assert unpack_presence(bytes.fromhex(vector["hex"]), len(present)) == present


@pytest.mark.parametrize("vector", VECTORS["codecs"])
def test_codecs(vector: dict[str, Any]) -> None:
    kind = Codec(vector["codec"])
    assert kind.element_bytes == vector["element_bytes"]
    payload = bytes.fromhex(vector["hex"])
    assert codec.encode(np.array(vector["values"], np.float64), kind) == payload
    decoded = codec.decode(payload, kind)
    assert decoded.astype(np.float64).tolist() == [float(value) for value in vector["decoded"]]


@pytest.mark.parametrize("vector", VECTORS["int8"])
def test_int8(vector: dict[str, Any]) -> None:
    payload = np.frombuffer(bytes.fromhex(vector["hex"]), np.uint8).copy()
    decoded = np.empty(vector["elements"], np.float32)
    assert int8.element_count(len(payload)) == len(decoded)
    int8.decode(payload, decoded)
    assert decoded.tolist() == vector["decoded"]


@pytest.mark.parametrize("vector", VECTORS["sign"])
def test_sign(vector: dict[str, Any]) -> None:
    payload = np.frombuffer(bytes.fromhex(vector["hex"]), np.uint8).copy()
    decoded = np.empty(vector["elements"], np.float32)
    assert Codec.SIGN.payload_bytes(len(decoded)) == len(payload)
    sign.decode(payload, decoded)
    assert decoded.tolist() == vector["decoded"]


@pytest.mark.parametrize("vector", VECTORS["sparse"])
def test_sparse(vector: dict[str, Any]) -> None:
    payload = np.frombuffer(bytes.fromhex(vector["hex"]), np.uint8).copy()
    decoded = np.empty(vector["elements"], np.float32)
    sparse.decode(payload, decoded)
    assert decoded.tolist() == vector["decoded"]


@pytest.mark.parametrize("vector", VECTORS["low_rank"])
@pytest.mark.parametrize("kernels", [low_rank_passes, low_rank_loops])
def test_low_rank(vector: dict[str, Any], kernels: ModuleType) -> None:
    payload = np.frombuffer(bytes.fromhex(vector["hex"]), np.uint8).copy()
    decoded = np.empty(vector["elements"], np.float32)
    check_length(len(payload), Codec.LOW_RANK, len(decoded))
    matrix = low_rank.matrix_of(payload, len(decoded))
    kernels.decode(*low_rank.factors(payload, matrix), matrix.first, decoded)
    assert decoded.tolist() == vector["decoded"]


def test_token() -> None:
    token = VECTORS["token"]
    session = Session(
        token["cluster_id"], bytes.fromhex(token["timeline"]), NodeId(token["node_id"]),
        Incarnation(token["incarnation"]), Role(token["role"]), token["rank"],
        bytes.fromhex(token["session_token"]),
    )  # fmt: skip
    assert session.is_genuine(bytes.fromhex(token["token_key"]))


def mixed_number(number: int) -> int:
    """splitmix64, as the page has it."""
    mask = 2**64 - 1
    mixed = (number + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


@pytest.mark.parametrize("vector", VECTORS["rows"], ids=lambda vector: vector["seed"])
def test_rows(vector: dict[str, Any]) -> None:
    """As the page says it, number by number."""
    scale = vector["scale"]
    for row in vector["rows"]:
        mixed = mixed_number(int(row["id"]) ^ mixed_number(int(vector["seed"])))
        assert ((mixed >> 32) * vector["partition_count"]) >> 32 == row["partition"]

        def word(number: int, of: int = mixed) -> int:
            return mixed_number((of + number) & (2**64 - 1))

        uniform, normal = [], []
        for j in range(5):
            half = (word(j // 2 + 1) >> (32 * (j % 2))) & 0xFFFFFFFF
            uniform.append(scale * ((half >> 8) / 2**23 - 1))
            parts = [(word(j + 1) >> (16 * part)) & 0xFFFF for part in range(4)]
            normal.append(scale * 3**0.5 * ((sum(parts) + 2) / 2**16 - 2))
        assert np.array(uniform, "<f4").tobytes().hex() == row["uniform"]
        assert np.array(normal, "<f4").tobytes().hex() == row["normal"]


@pytest.mark.parametrize("vector", VECTORS["reduction"])
def test_reduction(vector: dict[str, Any]) -> None:
    """As the page says it: float32 sums in rank order, one multiply by the reciprocal, which was
    rounded to float32 before.
    """
    ranks = [np.frombuffer(bytes.fromhex(each), "<f4") for each in vector["contributions"]]
    total = ranks[0].copy()
    for values in ranks[1:]:
        total += values
    reciprocal = np.float32(1.0 / len(ranks))
    assert reciprocal.tobytes().hex() == vector["reciprocal"]
    assert (total * reciprocal).tobytes().hex() == vector["mean"]


@pytest.mark.parametrize("vector", VECTORS["sgd"])
def test_sgd(vector: dict[str, Any]) -> None:
    values, gradient = (
        np.frombuffer(bytes.fromhex(vector[name]), "<f4") for name in ("values", "gradient")
    )
    after = values - np.float32(vector["lr"]) * gradient
    assert after.tobytes().hex() == vector["after"]


def test_some_reduction_tells_a_multiply_from_a_division() -> None:
    told = False
    for vector in VECTORS["reduction"]:
        ranks = [np.frombuffer(bytes.fromhex(each), "<f4") for each in vector["contributions"]]
        divided = sum(ranks[1:], ranks[0]) / np.float32(len(ranks))
        told |= divided.tobytes().hex() != vector["mean"]
    assert told
