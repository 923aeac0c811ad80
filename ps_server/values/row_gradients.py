"""Gradients of rows, from payload to reduced sum; and their payloads.

    payload = n ids (unsigned 64-bit, little-endian), then n rows

Rules:
    - A payload is copied when it comes, unless its rows lie aligned in memory that nobody changes.
    - An id that comes twice in one payload has the sum of its rows, in their order.
    - A sum over workers is taken id by id, in the order of `add`; an id that a worker leaves out is
      zero there.
    - The ids of a sum that was merged ascend.

Invariants:
    RG-1  A sum of rows meets rows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from ps_core import limits
from ps_core.errors import InvalidTensor, check
from ps_core.rows import Groups, Ids, sums_by_key
from ps_core.sliced_work import Work
from ps_server.rows.row_arrays import Rows
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.mutations import Elements, SentAccumulator
from ps_server.values.update_arithmetic import Accumulator

_SENT_BYTES = 1 << 20
"""A sum for another server is cut into payloads of so many bytes."""

_SLICE_BYTES = 1 << 20
"""Bytes of rows that are merged or scaled in one turn of the loop."""


class RowGradients(NamedTuple):
    """One worker's gradients of rows of a partition. Shapes: ids (n,), ascending, each once;
    values (n, length).
    """

    block: int
    ids: Ids
    values: Rows

    @property
    def byte_count(self) -> int:
        return self.ids.nbytes + self.values.nbytes


def check_count(what: str, byte_count: int, row_bytes: int) -> None:
    """Raise InvalidTensor if a push of that length is of too many rows."""
    most = limits.MAX_ROW_COUNT * (limits.ROW_ID_BYTES + row_bytes)
    if byte_count > most:
        raise InvalidTensor(
            f"{what}: the payload has {byte_count} bytes; expected at most {most}, "
            f"{limits.MAX_ROW_COUNT} rows"
        )


def check_length(what: str, byte_count: int, row_bytes: int) -> None:
    """Raise InvalidTensor unless a payload of that length is of whole rows."""
    if byte_count % (limits.ROW_ID_BYTES + row_bytes):
        raise InvalidTensor(
            f"{what}: the payload has {byte_count} bytes; expected a multiple of "
            f"{limits.ROW_ID_BYTES + row_bytes}, an id and a row of {row_bytes} bytes for each"
        )


def parsed(
    block: int, payload: memoryview, length: int, dtype: np.dtype[Any], *, copies: bool
) -> RowGradients:
    """The gradients in a payload of rows of that length. Views of it, unless `copies`."""
    count = len(payload) // (limits.ROW_ID_BYTES + length * dtype.itemsize)
    split = count * limits.ROW_ID_BYTES
    ids: Ids = np.frombuffer(payload[:split], "<u8")
    values: Rows = np.frombuffer(payload[split:], dtype).reshape(count, length)
    if copies or not (ids.flags.aligned and values.flags.aligned):
        ids, values = ids.copy(), values.copy()
    return gradients_of(block, ids, values)


def gradients_of(block: int, ids: Ids, values: Rows) -> RowGradients:
    """The gradients of these ids, which may come in any order, and twice."""
    if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
        ids, values = sums_by_key(ids, values)
    return RowGradients(block, ids, values)


def payload_of(ids: Ids, values: Rows) -> bytes:
    return ids.tobytes() + values.tobytes()


@dataclass(slots=True, eq=False)
class RowSum:
    """The sum of one partition's gradients in the making."""

    parts: list[tuple[Ids, Rows]] = field(default_factory=list)

    def totalling(self) -> Work[tuple[Ids, Rows]]:
        """The ids, which ascend, and their sums; parts are merged in slices of bounded size."""
        if len(self.parts) > 1:
            self.parts = [(yield from _merging(self.parts))]
        return self.parts[0]

    @property
    def row_count(self) -> int:
        """The rows that came, some perhaps of one id."""
        return sum(len(ids) for ids, _ in self.parts)

    def scaling(self, factor: float) -> Work[None]:
        if factor == 1.0:
            return
        ids, values = yield from self.totalling()
        scaled = np.empty_like(values)
        for some in slices_of(values):
            np.multiply(values[some], values.dtype.type(factor), out=scaled[some])
            yield
        self.parts = [(ids, scaled)]


def slices_of(values: Rows) -> Iterator[slice]:
    """Slices of rows, each of so many as are worked on in one turn of the loop."""
    count = max(1, _SLICE_BYTES // (values.shape[1] * values.itemsize))
    for begin in range(0, len(values), count):
        yield slice(begin, begin + count)


def _merging(parts: Sequence[tuple[Ids, Rows]]) -> Work[tuple[Ids, Rows]]:
    """Sum parts by id, in slices of ids of which all parts together have few."""
    length, dtype = parts[0][1].shape[1], parts[0][1].dtype
    step = max(1, _SLICE_BYTES // (length * dtype.itemsize) // len(parts))
    cuts = np.unique(np.concatenate([ids[step::step] for ids, _ in parts]))
    ends = [np.append(np.searchsorted(ids, cuts), len(ids)).tolist() for ids, _ in parts]
    most = sum(len(ids) for ids, _ in parts)
    found, sums, count = np.empty(most, np.uint64), np.empty((most, length), dtype), 0
    begins = [0] * len(parts)
    for at in range(len(cuts) + 1):
        some = [slice(begin, end[at]) for begin, end in zip(begins, ends, strict=True)]
        begins = [each.stop for each in some]
        ids = np.concatenate([ids[each] for (ids, _), each in zip(parts, some, strict=True)])
        rows = np.concatenate([rows[each] for (_, rows), each in zip(parts, some, strict=True)])
        groups = Groups.of(ids)
        end = count + len(groups.keys)
        found[count:end] = groups.keys
        groups.sums(rows, sums[count:end])
        count = end
        yield
    return found[:count], sums[:count]


@dataclass(slots=True, eq=False)
class RowAccumulator(Accumulator):
    """As `Accumulator`, of rows; `parts` has a `RowSum` of each partition."""

    sums: dict[int, RowSum] = field(default_factory=dict)

    def add_rows(self, part: RowGradients) -> None:
        self.sums.setdefault(part.block, RowSum()).parts.append((part.ids, part.values))

    @property
    def blocks(self) -> Sequence[int]:
        return sorted(self.sums)

    @classmethod
    def of(cls, accumulator: Accumulator) -> RowAccumulator:
        """The accumulator of a table of rows, as what it is."""
        check(isinstance(accumulator, cls), "RG-1", f"a {type(accumulator).__name__} of rows")
        return cast(RowAccumulator, accumulator)

    def release(self, pool: BufferPool) -> None:
        del pool  # nothing of it is from there
        self.sums.clear()

    def sent(self) -> SentAccumulator:
        """Rows as they came from each worker, unless they are merged: a backup merges them so."""
        found: list[Elements] = []
        for block in self.blocks:
            for part in self.sums[block].parts:
                found += cut(block, *part)
        return SentAccumulator(tuple(found), self.is_reduced)


def cut(block: int, ids: Ids, values: Rows) -> Iterator[Elements]:
    """Rows as payloads of bounded size, of no more rows than a push; one, empty, for none."""
    row_bytes = limits.ROW_ID_BYTES + values.shape[1] * values.itemsize
    count = min(max(1, _SENT_BYTES // row_bytes), limits.MAX_ROW_COUNT)
    for begin in range(0, max(1, len(ids)), count):
        some = slice(begin, begin + count)
        yield Elements(block, b"", payload_of(ids[some], values[some]))
