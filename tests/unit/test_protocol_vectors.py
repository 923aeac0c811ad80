"""docs/reference/PROTOCOL.md and docs/reference/protocol_vectors.json say what the code does.

The vectors are checked twice: against the script that makes them, so that they are never stale, and
against the formulas of the page, written out here once more, so that the page itself is enough.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from docs import protocol_vectors
from ps_core import errors, limits
from ps_server.service import servicer
from ps_worker.transport import engine
from pushpull.v1 import parameters_pb2, scheduler_pb2, types_pb2

DOCS = Path(__file__).resolve().parents[2] / "docs/reference"
VECTORS: dict[str, Any] = json.loads((DOCS / "protocol_vectors.json").read_text())
PAGE = (DOCS / "PROTOCOL.md").read_text()
FORMATS = {"fp32": "<f", "fp16": "<e", "fp64": "<d"}


def test_vectors_are_what_the_script_writes() -> None:
    assert (DOCS / "protocol_vectors.json").read_text() == protocol_vectors.vectors_text()


def test_worked_messages_are_what_the_script_writes() -> None:
    assert protocol_vectors.page_text(PAGE) == PAGE


def test_a_page_without_the_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="challenge"):
        protocol_vectors.page_text("no markers")


def test_slots_follow_the_formula_of_the_page() -> None:
    for vector in VECTORS["slots"]:
        assert vector["slot"] == (vector["ordinal"] % 65_536) * 40_503 % 65_536


def test_slots_on_the_page_are_those_of_the_vectors() -> None:
    rows = re.findall(r"^\| (?:ordinal|slot|range of 256) \|([ 0-9|]+)\|$", PAGE, re.MULTILINE)
    ordinals, slots, places = ([int(cell) for cell in row.split("|")] for row in rows)
    for ordinal, slot, place in zip(ordinals, slots, places, strict=True):
        assert slot == ordinal * 40_503 % 65_536
        assert place == ((slot + 1) * 256 - 1) // 65_536


def test_ranges_follow_the_formulas_of_the_page() -> None:
    for vector in VECTORS["ranges"]:
        count = vector["range_count"]
        for row in vector["ranges"]:
            assert row["begin_slot"] == row["range"] * 65_536 // count
            assert row["end_slot"] == (row["range"] + 1) * 65_536 // count
        for row in vector["slots"]:
            place = row["range"]
            assert place * 65_536 // count <= row["slot"] < (place + 1) * 65_536 // count
            assert place == ((row["slot"] + 1) * count - 1) // 65_536


def test_layouts_follow_the_page() -> None:
    for table in VECTORS["layouts"]:
        size, total = table["block_elements"], table["element_count"]
        assert len(table["blocks"]) == math.ceil(total / size)
        for index, block in enumerate(table["blocks"]):
            assert block["begin"] == index * size
            assert block["length"] == min(size, total - index * size)
            assert block["slot"] == (table["first_ordinal"] + index) * 40_503 % 65_536
            assert block["segments"] == _overlaps(table["tensors"], block)


def _overlaps(tensors: list[dict[str, Any]], block: dict[str, int]) -> list[dict[str, int]]:
    found = []
    for index, tensor in enumerate(tensors):
        begin = max(tensor["offset"] - block["begin"], 0)
        end = tensor["offset"] + math.prod(tensor["shape"]) - block["begin"]
        end = min(end, block["length"])
        if begin < end:
            found.append({"tensor": index, "begin": begin, "end": end})
    return found


def test_presence_follows_the_page() -> None:
    for vector in VECTORS["presence"]:
        present = vector["present"]
        number = sum(1 << index for index, bit in enumerate(present) if bit)
        expected = b"" if all(present) else number.to_bytes((len(present) + 7) // 8, "little")
        assert vector["hex"] == expected.hex()


def test_codecs_follow_the_page() -> None:
    for vector in VECTORS["codecs"]:
        values = [float(v) for v in vector["values"]]
        payload = b"".join(_encoded(value, vector["codec"]) for value in values)
        assert vector["hex"] == payload.hex()
        assert len(payload) == vector["element_bytes"] * len(values)


def test_int8_follows_the_page() -> None:
    for vector in VECTORS["int8"]:
        payload, count = bytes.fromhex(vector["hex"]), vector["elements"]
        groups = -(-count // 256)
        assert len(payload) == count + 4 * groups
        scales = struct.unpack_from(f"<{groups}f", payload)
        numbers = struct.unpack_from(f"<{count}b", payload, 4 * groups)
        products = (number * scales[at // 256] for at, number in enumerate(numbers))
        expected = [struct.unpack("<f", struct.pack("<f", product))[0] for product in products]
        assert vector["decoded"] == expected


def test_the_int8_example_on_the_page() -> None:
    scale, *numbers = struct.unpack("<f3b", bytes.fromhex("0000003f01ff7f"))
    assert [scale * number for number in numbers] == [0.5, -0.5, 63.5]
    assert "`0000003f01ff7f` is 0.5, \N{MINUS SIGN}0.5, 63.5" in " ".join(PAGE.split())


def test_sign_follows_the_page() -> None:
    for vector in VECTORS["sign"]:
        payload, count = bytes.fromhex(vector["hex"]), vector["elements"]
        groups = -(-count // 256)
        assert len(payload) == 4 * groups + -(-count // 8)
        scales = struct.unpack_from(f"<{groups}f", payload)
        bits = int.from_bytes(payload[4 * groups :], "little")
        expected = [scales[at // 256] * (1 if bits >> at & 1 else -1) for at in range(count)]
        assert vector["decoded"] == expected
    assert "`0000003f05` is 0.5, \N{MINUS SIGN}0.5, 0.5" in " ".join(PAGE.split())


def test_sparse_follows_the_page() -> None:
    for vector in VECTORS["sparse"]:
        payload, expected = bytes.fromhex(vector["hex"]), [0.0] * vector["elements"]
        count = len(payload) // 8
        found = struct.unpack(f"<{count}f{count}I", payload)
        for element, place in zip(found[:count], found[count:], strict=True):
            expected[place] = element
        assert vector["decoded"] == expected
    text = "`0000003f000080bf0000000002000000` is 0.5, 0, \N{MINUS SIGN}1"
    assert text in " ".join(PAGE.split())


def test_low_rank_follows_the_page() -> None:
    """A fused multiply-add would give other bits."""
    are_fused = []
    for vector in VECTORS["low_rank"]:
        payload = bytes.fromhex(vector["hex"])
        columns, rank, first = struct.unpack_from("<3I", payload)
        rows = -(-(first + vector["elements"]) // columns)
        numbers = struct.unpack_from(f"<{rank * (rows + columns)}f", payload, 12)
        assert len(payload) == 12 + 4 * len(numbers) <= 4 * vector["elements"]
        right = numbers[rows * rank :]
        expected, fused = [], []
        for row, column in (divmod(first + at, columns) for at in range(vector["elements"])):
            products = [numbers[row * rank + k] * right[k * columns + column] for k in range(rank)]
            expected.append(functools.reduce(_sum, map(_rounded, products)))
            fused.append(functools.reduce(_sum, products))
        assert vector["decoded"] == expected
        are_fused.append(vector["decoded"] == fused)
    assert not all(are_fused)
    found = " ".join(PAGE.split())
    assert (
        "`0000803f000000c00000003f` `0000803f0000003f00004040` is 1, 0.5, 3, \N{MINUS SIGN}2"
        in found
    )


def _sum(one: float, other: float) -> float:
    return _rounded(one + other)


def _rounded(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _encoded(value: float, codec: str) -> bytes:
    if codec in FORMATS:
        return struct.pack(FORMATS[codec], value)
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
def test_codec_examples_on_the_page(codec: str) -> None:
    payload = b"".join(_encoded(value, codec) for value in (1.0, -2.0, 0.5))
    assert f"`{payload.hex()}` in {codec.upper()}" in " ".join(PAGE.split())


def test_token_follows_the_page() -> None:
    token = VECTORS["token"]
    fields = ("cluster_id", "timeline", "node_id", "incarnation", "role", "rank")
    text = "|".join(str(token[field]) for field in fields)
    key = bytes.fromhex(token["token_key"])
    assert hmac.new(key, text.encode(), hashlib.sha256).hexdigest() == token["session_token"]


def test_the_proof_of_the_join_secret_follows_the_page() -> None:
    join = VECTORS["join"]
    fields = ("challenge", "registration_id", "role", "rank", "address")
    text = "|".join(("pushpull-join", *(str(join[field]) for field in fields)))
    made = hmac.new(join["secret"].encode(), text.encode(), hashlib.sha256).hexdigest()
    assert made == join["join_proof"]


def test_messages_parse_and_use_every_byte() -> None:
    modules = (types_pb2, scheduler_pb2, parameters_pb2)
    for vector in VECTORS["messages"]:
        name = vector["type"].removeprefix("pushpull.v1.")
        (message_type,) = [
            getattr(m, name) for m in modules if name in m.DESCRIPTOR.message_types_by_name
        ]
        message = message_type.FromString(bytes.fromhex(vector["hex"]))
        assert message.SerializeToString(deterministic=True).hex() == vector["hex"]
        assert "unknown" not in str(message).lower()


def test_the_page_has_every_error_with_its_number() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (\d+) \| [A-Z_]+ \|", PAGE, re.MULTILINE)
    named = {name: int(number) for name, number in rows}
    contract = {
        name.removeprefix("ERROR_CODE_"): number for name, number in types_pb2.ErrorCode.items()
    }
    del contract["UNSPECIFIED"]
    assert named == contract
    assert set(named) == set(errors.CATALOGUE)


@pytest.mark.parametrize("name", ["ReplyKind", "Outcome"])
def test_the_page_explains_every_reply_and_outcome(name: str) -> None:
    prefix = {"ReplyKind": "REPLY_KIND_", "Outcome": "OUTCOME_"}[name]
    values = getattr(parameters_pb2, name).keys()
    explained = set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE))
    assert {value.removeprefix(prefix) for value in values} - {"UNSPECIFIED"} <= explained


def test_the_page_explains_every_feature() -> None:
    explained = set(re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE, re.MULTILINE))
    assert {*servicer.FEATURES, *engine.FEATURES} <= explained


@pytest.mark.parametrize(
    "limit",
    [
        limits.SLOT_COUNT,
        limits.MAX_BLOCK_ELEMENTS,
        limits.DEFAULT_BLOCK_ELEMENTS,
        limits.MAX_MESSAGE_BYTES,
        limits.MAX_TABLE_NAME_BYTES,
        limits.MAX_INLINE_INITIALIZER_BYTES,
        limits.MAX_TABLE_COUNT,
        limits.MAX_TENSOR_COUNT,
        limits.MAX_NODE_COUNT,
        limits.MAX_HYPERPARAMETER_COUNT,
        limits.MAX_LEDGER_GAP_COUNT,
        limits.MAX_WAITER_COUNT,
        int(limits.MAX_DEADLINE_S * 1000),
        int(limits.DEFAULT_PULL_DEADLINE_S * 1000),
        int(limits.DEFAULT_SESSION_DEADLINE_S * 1000),
    ],
)
def test_the_page_has_the_limits_of_the_code(limit: int) -> None:
    assert f"{limit:,}" in PAGE


def test_every_link_on_the_page_leads_to_a_section() -> None:
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-").replace(",", "") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
