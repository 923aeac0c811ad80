"""Makes protocol_vectors.json and the worked messages inside PROTOCOL.md from the code.

`python -m docs.protocol_vectors`, run in the repository root, writes both;
tests/unit/test_protocol_vectors.py fails when either is not what this script would write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.message import Message

from docs import payload_codec as codecs
from docs.wire_dump import dump
from docs.worked_messages import (
    EXAMPLE_CHALLENGE,
    EXAMPLE_SECRET,
    EXAMPLE_TOKEN_KEY,
    WorkedMessage,
    example_joiner,
    example_session,
    worked_messages,
)
from ps_core import rows
from ps_core.keys import Slot, TableId, key_ranges, range_of_slot, slot_of_ordinal
from ps_core.tables.elements import DType, Initializer, InitializerKind, pack_presence
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec, TensorSpec
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution, added, averaged, padded
from ps_server.values.optimizers import BlockState, Optimizer, padded_length

DOCS = Path(__file__).resolve().parent / "reference"
PAGE = DOCS / "PROTOCOL.md"
VECTORS = DOCS / "protocol_vectors.json"

ORDINALS = (0, 1, 2, 3, 4, 5, 100, 65_535, 65_536, 65_537, 1_000_000, 2**32, 2**53 - 1)
RANGE_COUNTS = (1, 2, 3, 7, 256, 1000, 65_536)
SLOTS = (0, 1, 255, 256, 257, 21_845, 21_846, 32_767, 32_768, 40_503, 65_534, 65_535)
CODEC_VALUES = (0.0, -0.0, 1.0, -2.0, 0.5, 0.1, -0.3, 3.140625, 1e-7, 65_504.0, float("inf"))
INT8_PAYLOADS = (
    ((0.5,), (0, 1, -1, 127, -127, -128)),
    ((0.1, 2.0**-20), (*range(-128, 128), 3, -5)),
)
SIGN_PAYLOADS = (
    ((0.5,), 3, "05"),
    ((0.1, 2.0**-20), 258, "00ff0f" * 10 + "a50a" + "fd"),
)
SPARSE_PAYLOADS = (
    (3, (0.5, -1.0), (0, 2)),
    (300, (0.1, -(2.0**-20), 3.0, 1.0), (7, 255, 256, 299)),
)
LOW_RANK_PAYLOADS: tuple[tuple[int, int, list[list[float]], list[list[float]]], ...] = (
    (9, 0, [[1.0], [-2.0], [0.5]], [[1.0, 0.5, 3.0]]),
    (
        40,
        3,
        [[0.1 * row, 1.0 / (row + 3)] for row in range(7)],
        [[0.3, -0.7, 1.1, 0.9, -0.1, 2.3, 0.6], [1.7, 0.2, -1.3, 0.8, 3.1, -0.4, 0.7]],
    ),
)
CONTRIBUTIONS = (
    ((1.0, -2.0, 0.5), (0.1, 0.2, 0.3)),
    ((1.0, 0.1, -7.7, 2.5), (0.3, 0.1, 1e-3, 2.5), (3.3, 0.1, 5.9, 2.7)),
    ((1e8, 0.7, 1.0), (1.0, 0.7, -2.0), (-1e8, 0.7, 5.0), (1.0, 0.7, 0.1), (1.0, 0.7, 0.1)),
    tuple((0.1 * rank, 1.0 / (rank + 1)) for rank in range(7)),
)
SGD_VALUES = (1.0, -0.3, 0.2, 3.0)
SGD_RATE = 0.5
ROW_IDS = (0, 1, 2, 12_345, 2**32, 2**63, 2**64 - 1)
ROW_TABLES = ((0, 16), (2**64 - 1, 3), (7, 4096))
ROW_SCALE, ROW_LENGTH = 0.5, 5
PRESENCE = (
    (True,),
    (False,),
    (True, False, True),
    (False,) * 9,
    (False,) * 8 + (True,),
    (True,) * 9,
    (True, True, False, False, True, False, True, False, False, True),
)


def slot_vectors() -> list[dict[str, int]]:
    """Ordinals and their slots."""
    return [{"ordinal": n, "slot": slot_of_ordinal(n)} for n in ORDINALS]


def range_vectors() -> list[dict[str, Any]]:
    """For each number of ranges: its first and last bounds, and the ranges of some slots."""
    found = []
    for count in RANGE_COUNTS:
        ranges = key_ranges(count)
        picked = sorted({0, 1, count // 2, count - 1} & set(range(count)))
        found.append(
            {
                "range_count": count,
                "ranges": [
                    {"range": i, "begin_slot": ranges[i].begin, "end_slot": ranges[i].end}
                    for i in picked
                ],
                "slots": [{"slot": s, "range": range_of_slot(Slot(s), count)} for s in SLOTS],
            }
        )
    return found


def layout_tables() -> tuple[Table, ...]:
    """The tables whose layout the vectors spell out."""

    def table(first_ordinal: int, block_elements: int, *shapes: tuple[int, ...]) -> Table:
        tensors, end = [], 0
        for index, shape in enumerate(shapes):
            tensors.append(TensorSpec(f"t{index}", shape, end))
            end += tensors[-1].element_count
        spec = TableSpec(
            name="vectors",
            dtype=DType.FLOAT32,
            element_count=end,
            optimizer=OptimizerSpec(OptimizerKind.SGD),
            block_elements=block_elements,
            tensors=tuple(tensors),
        )
        return Table(TableId(1), first_ordinal, spec.validated())

    return (
        table(0, 64, (3, 4)),
        table(7, 64, (8, 8), (64,)),
        table(1000, 128, (10, 20), (), (0, 3), (5,), (300,)),
    )


def layout_vectors() -> list[dict[str, Any]]:
    """Tables cut into blocks: lengths, places in the key space, tensors of each block."""
    range_count = 256
    found = []
    for table in layout_tables():
        spec = table.spec
        blocks = [
            {
                "block": block,
                "begin": block * spec.block_elements,
                "length": table.block_length(block),
                "slot": slot_of_ordinal(table.first_ordinal + block),
                "range": table.range_of_block(block, range_count),
                "segments": [
                    {"tensor": s.tensor, "begin": s.begin, "end": s.end}
                    for s in table.segments(block)
                ],
            }
            for block in range(table.block_count)
        ]
        found.append(
            {
                "first_ordinal": table.first_ordinal,
                "range_count": range_count,
                "element_count": spec.element_count,
                "block_elements": spec.block_elements,
                "tensors": [
                    {"name": t.name, "shape": list(t.shape), "offset": t.offset}
                    for t in spec.tensors
                ],
                "blocks": blocks,
            }
        )
    return found


def _json_number(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


def codec_vectors() -> list[dict[str, Any]]:
    """Values, their bytes, and what the bytes decode to; infinity is the string "inf"."""
    values = np.array(CODEC_VALUES, dtype=np.float64)
    found = []
    for codec in codecs.RAW_CODECS:
        payload = codecs.encode(values, codec)
        decoded = codecs.decode(payload, codec)
        found.append(
            {
                "codec": codec.value,
                "element_bytes": codec.element_bytes,
                "values": [_json_number(v) for v in CODEC_VALUES],
                "hex": payload.hex(),
                "decoded": [_json_number(float(v)) for v in decoded],
            }
        )
    return found


def int8_vectors() -> list[dict[str, Any]]:
    """INT8 payloads, and what they decode to."""
    found = []
    for scales, numbers in INT8_PAYLOADS:
        payload = np.array(scales, "<f4").tobytes() + np.array(numbers, np.int8).tobytes()
        decoded = codecs.decode_int8(payload, len(numbers)).tolist()
        found.append({"elements": len(numbers), "hex": payload.hex(), "decoded": decoded})
    return found


def sign_vectors() -> list[dict[str, Any]]:
    """SIGN payloads, and what they decode to."""
    found = []
    for scales, count, bits in SIGN_PAYLOADS:
        payload = np.array(scales, "<f4").tobytes() + bytes.fromhex(bits)
        decoded = codecs.decode_sign(payload, count).tolist()
        found.append({"elements": count, "hex": payload.hex(), "decoded": decoded})
    return found


def sparse_vectors() -> list[dict[str, Any]]:
    """SPARSE payloads, and what they decode to."""
    found = []
    for count, elements, places in SPARSE_PAYLOADS:
        payload = codecs.encode_sparse(elements, places)
        decoded = codecs.decode_sparse(payload, count).tolist()
        found.append({"elements": count, "hex": payload.hex(), "decoded": decoded})
    return found


def low_rank_vectors() -> list[dict[str, Any]]:
    """LOW_RANK payloads, and what they decode to."""
    found = []
    for count, first, left, right in LOW_RANK_PAYLOADS:
        payload = codecs.encode_low_rank(left, right, first)
        decoded = codecs.decode_low_rank(payload, count).tolist()
        found.append({"elements": count, "hex": payload.hex(), "decoded": decoded})
    return found


def presence_vectors() -> list[dict[str, Any]]:
    """Which segments are present, and the bitmap."""
    return [{"present": list(p), "hex": pack_presence(p).hex()} for p in PRESENCE]


def token_vector() -> dict[str, Any]:
    """An identity, the text that is signed, and the token."""
    session = example_session()
    return {
        "token_key": EXAMPLE_TOKEN_KEY.hex(),
        "cluster_id": session.cluster_id,
        "timeline": session.timeline.hex(),
        "node_id": session.node_id,
        "incarnation": session.incarnation,
        "role": session.role.value,
        "rank": session.rank,
        "session_token": session.signed(EXAMPLE_TOKEN_KEY).hex(),
    }


def join_vector() -> dict[str, Any]:
    """A secret, a challenge, who asks to join, the text that is signed, and the proof."""
    joiner = example_joiner()
    return {
        "secret": EXAMPLE_SECRET.decode(),
        "challenge": EXAMPLE_CHALLENGE.hex(),
        "registration_id": joiner.registration_id.hex(),
        "role": joiner.role.value,
        "rank": joiner.rank,
        "address": joiner.address,
        "join_proof": joiner.proof(EXAMPLE_SECRET, EXAMPLE_CHALLENGE).hex(),
    }


def serialized(message: Message) -> bytes:
    """The message's bytes, fields in the order of their numbers."""
    return message.SerializeToString(deterministic=True)


def message_vectors() -> list[dict[str, str]]:
    """The worked messages as they go over the wire."""
    return [
        {
            "name": worked.name,
            "type": worked.message.DESCRIPTOR.full_name,
            "hex": serialized(worked.message).hex(),
        }
        for worked in worked_messages()
    ]


def reduction_vectors() -> list[dict[str, Any]]:
    """Contributions in rank order, as float32 payloads, and the mean that the servers make."""
    return [
        {
            "contributions": [payload_of(values) for values in ranks],
            "reciprocal": payload_of([1.0 / len(ranks)]),
            "mean": reduced(ranks).values[: len(ranks[0])].numpy().tobytes().hex(),
        }
        for ranks in CONTRIBUTIONS
    ]


def sgd_vectors() -> list[dict[str, Any]]:
    """A plain SGD step with the means above."""
    spec = OptimizerSpec(OptimizerKind.SGD)
    numbers = dict(spec.merged((("lr", SGD_RATE),)))
    found = []
    for ranks in CONTRIBUTIONS:
        count = len(ranks[0])
        values = torch.zeros(padded_length(count))
        values[:count] = torch.tensor(SGD_VALUES[:count])
        state = BlockState(values, np.array([0, count]))
        mean = reduced(ranks)
        Optimizer(spec, BufferPool()).apply(state, padded(mean, BufferPool()).values, None, numbers)
        found.append(
            {
                "values": payload_of(SGD_VALUES[:count]),
                "gradient": mean.values[:count].numpy().tobytes().hex(),
                "lr": SGD_RATE,
                "after": values[:count].numpy().tobytes().hex(),
            }
        )
    return found


def row_vectors() -> list[dict[str, Any]]:
    """Seeds, and ids with their partitions and first values."""
    ids = np.array(ROW_IDS, np.uint64)
    found = []
    for seed, count in ROW_TABLES:
        mixed = rows.mixed_ids(ids, rows.salt_of(seed))
        of_kind = {
            kind: rows.first_values(mixed, Initializer(kind, scale=ROW_SCALE), ROW_LENGTH, "<f4")
            for kind in (InitializerKind.UNIFORM, InitializerKind.NORMAL)
        }
        found.append(
            {
                "seed": str(seed),
                "partition_count": count,
                "scale": ROW_SCALE,
                "rows": [
                    {
                        "id": str(row_id),
                        "partition": int(partition),
                        **{kind.value: of_kind[kind][at].tobytes().hex() for kind in of_kind},
                    }
                    for at, (row_id, partition) in enumerate(
                        zip(ROW_IDS, rows.partitions_of(mixed, count), strict=True)
                    )
                ],
            }
        )
    return found


def payload_of(values: Sequence[float]) -> str:
    """The numbers as a payload of FP32, in hexadecimal."""
    return np.array(values, "<f4").tobytes().hex()


def reduced(ranks: Sequence[Sequence[float]]) -> Contribution:
    """The servers' mean."""
    pool = BufferPool()
    parts = []
    for values in ranks:
        memory = torch.zeros(padded_length(len(values)))
        memory[: len(values)] = torch.tensor(values)
        bounds = np.array([0, len(values)])
        parts.append(Contribution(0, len(values), memory, None, bounds, is_owned=True))
    total = parts[0]
    for part in parts[1:]:
        total = added(total, part, pool)
    return averaged(total, len(ranks), pool)


def vectors() -> dict[str, Any]:
    """Everything in docs/reference/protocol_vectors.json."""
    return {
        "about": "Made by docs/protocol_vectors.py; docs/reference/PROTOCOL.md explains each part.",
        "slots": slot_vectors(),
        "ranges": range_vectors(),
        "layouts": layout_vectors(),
        "presence": presence_vectors(),
        "codecs": codec_vectors(),
        "int8": int8_vectors(),
        "sign": sign_vectors(),
        "sparse": sparse_vectors(),
        "low_rank": low_rank_vectors(),
        "reduction": reduction_vectors(),
        "sgd": sgd_vectors(),
        "rows": row_vectors(),
        "token": token_vector(),
        "join": join_vector(),
        "messages": message_vectors(),
    }


def vectors_text() -> str:
    """The text of docs/reference/protocol_vectors.json: one vector a line."""
    parts = []
    for key, value in vectors().items():
        if isinstance(value, list):
            rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in value)
            parts.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def worked_text(worked: WorkedMessage) -> str:
    """One worked message as it stands on the page: a sentence, then its bytes, field by field."""
    name = worked.message.DESCRIPTOR.name
    payload = serialized(worked.message)
    lines = dump(payload, worked.message.DESCRIPTOR)
    return f"\n{worked.caption} `{name}`, {len(payload)} bytes:\n\n```text\n{lines}\n```\n"


def page_text(page: str) -> str:
    """The page with each of its generated parts made anew.

    Raises:
        ValueError: the page lacks the markers of a part.
    """
    for worked in worked_messages():
        begin, end = f"<!-- generated: {worked.name} -->\n", f"<!-- end: {worked.name} -->\n"
        head, found_begin, rest = page.partition(begin)
        _, found_end, tail = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"{PAGE.name} lacks the markers {begin.strip()} and {end.strip()}")
        page = head + begin + worked_text(worked) + "\n" + end + tail
    return page


def main() -> None:
    """Writes both files."""
    VECTORS.write_text(vectors_text())
    PAGE.write_text(page_text(PAGE.read_text()))


if __name__ == "__main__":
    main()
