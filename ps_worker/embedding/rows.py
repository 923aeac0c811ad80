"""The ids of a push or a pull of rows, cut by partition.

Rules:
    - An id may come several times, in any order. On the wire each comes once; only a pull whose
      rows nobody keeps asks for an id twice, where few come twice.
    - Negative ids are refused, unless the caller says that they are hashes: then their bits count.

Invariants:
    RC-1  Each id of a batch is in the span of its own partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ps_core import limits
from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor
from ps_core.rows import Groups, Ids, mixed_ids, partitions_of, salt_of
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec
from ps_worker.spec.values import Values, is_tensor

MAX_PULLED_COUNT = 16_384
"""The most ids of one pull: half of what a request may name."""


class RowPiece(NamedTuple):
    """Ids of a batch from `begin` on; `spans` count from there."""

    begin: int
    ids: Ids
    spans: dict[int, tuple[int, int]]

    def bytes_of(self, block: int) -> bytes:
        """The ids of a partition, as a request has them."""
        begin, end = self.spans[block]
        return self.ids[begin:end].tobytes()


class CutIds(NamedTuple):
    """Distinct ids, partition by partition.

    Shapes:
        ids: (n,), ascending within a partition.
        spans: partition -> [begin, end) of its ids.
    """

    ids: Ids
    spans: dict[int, tuple[int, int]]

    def pieces(self, most: int) -> Iterator[RowPiece]:
        """The ids in pieces of at most `most`."""
        for begin in range(0, len(self.ids), most):
            end = min(begin + most, len(self.ids))
            spans = {
                block: (max(low, begin) - begin, min(high, end) - begin)
                for block, (low, high) in self.spans.items()
                if low < end and high > begin
            }
            yield RowPiece(begin, self.ids[begin:end], spans)


class GivenIds(NamedTuple):
    """The ids of a pull, partition by partition; one that was given twice may be there twice.

    Shapes:
        ids, spans: as of `CutIds`.
        places: for each given id, in order, its place in `ids`; None: they are as given.
    """

    ids: Ids
    spans: dict[int, tuple[int, int]]
    places: npt.NDArray[np.int64] | None

    def pieces(self, most: int) -> Iterator[RowPiece]:
        """As of `CutIds`."""
        return CutIds(self.ids, self.spans).pieces(most)

    def as_given(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows of `ids`, in the order of the given ids."""
        return rows if self.places is None else rows.take(self.places, axis=0)


class RowBatch(NamedTuple):
    """The distinct ids of a batch, partition by partition.

    Shapes:
        ids, spans: as of `CutIds`.
        places: for each given id, in order, its place in `ids`.
        groups: the given ids, grouped in the order of `ids`.
    """

    ids: Ids
    spans: dict[int, tuple[int, int]]
    places: npt.NDArray[np.int64]
    groups: Groups

    def pieces(self, most: int) -> Iterator[RowPiece]:
        """As of `CutIds`."""
        return CutIds(self.ids, self.spans).pieces(most)

    def only(self, which: npt.NDArray[np.int64]) -> CutIds:
        """Some of the ids, by ascending places in `ids`."""
        spans = {}
        for block, (begin, end) in self.spans.items():
            low, high = np.searchsorted(which, (begin, end)).tolist()
            if low < high:
                spans[block] = low, high
        return CutIds(self.ids[which], spans)


def rows_of(table: Table) -> RowsSpec:
    """The table's spec of its rows; InvalidConfig if it is no table of rows."""
    rows = table.spec.rows
    if rows is None:
        raise InvalidConfig(
            f"table '{table.spec.name}' is not one of rows; create one with create_embedding"
        )
    return rows


def ids_of(given: Values, *, hashed_ids: bool = False) -> Ids:
    """The ids as unsigned numbers, flat. InvalidKeys for a negative one, InvalidTensor for what is
    no whole number.
    """
    array: npt.NDArray[Any]
    array = given.detach().cpu().numpy() if is_tensor(given) else np.asarray(given)  # type: ignore[union-attr]
    array = array.reshape(-1)
    if array.dtype == np.uint64:
        return array
    if not array.size:
        return np.empty(0, np.uint64)
    if array.dtype.kind not in "iu":
        raise InvalidTensor(f"ids are of {array.dtype}; expected whole numbers, such as int64")
    if array.dtype.kind == "i" and not hashed_ids and int(array.min()) < 0:
        raise InvalidKeys(
            f"id {int(array.min())} is negative; expected 0 or more, or hashed_ids=True, with "
            "which the bits of a hash count"
        )
    return array.astype(np.int64).view(np.uint64) if array.dtype.kind == "i" else array.astype("u8")


def gradients_of(table: Table, ids: Ids, given: Values) -> npt.NDArray[Any]:
    """The gradients of these ids, as rows; InvalidTensor for another dtype or shape."""
    array: npt.NDArray[Any]
    array = given.detach().cpu().numpy() if is_tensor(given) else np.asarray(given)  # type: ignore[union-attr]
    name, length = table.spec.name, table.spec.element_count
    if array.dtype != np.dtype(table.spec.dtype.value):
        raise InvalidTensor(
            f"gradients of table '{name}' are of {array.dtype}; expected {table.spec.dtype.value}"
        )
    if array.size != len(ids) * length or array.shape[-1:] != (length,):
        raise InvalidTensor(
            f"gradients of table '{name}' have shape {tuple(array.shape)} for {len(ids)} ids; "
            f"expected that of the ids, and {length} elements behind"
        )
    return np.ascontiguousarray(array.reshape(len(ids), length))


def cut_ids(ids: Ids, rows: RowsSpec) -> RowBatch:
    """Cut ids by partition."""
    groups = Groups.of(ids)
    if rows.partition_count == 1:
        places = np.empty(len(ids), np.int64)
        places[groups.order] = np.repeat(np.arange(len(groups.keys)), groups.counts)
        spans = {0: (0, len(groups.keys))} if len(ids) else {}
        return RowBatch(groups.keys, spans, places, groups)
    partitions = partitions_of(mixed_ids(groups.keys, salt_of(rows.seed)), rows.partition_count)
    order = _by_partition(partitions)
    places = np.empty(len(ids), np.int64)
    places[groups.order] = np.repeat(_inverse(order), groups.counts)
    ordered = groups.some(order)
    return RowBatch(ordered.keys, _spans(partitions, rows.partition_count), places, ordered)


def cut_as_given(ids: Ids, rows: RowsSpec) -> GivenIds:
    """Cut ids by partition for a pull alone. One that comes twice is asked for twice where few do:
    to find all that do, and to put the rows in their places, takes longer than to pull these.
    """
    if _has_many_twice(ids):
        batch = cut_ids(ids, rows)
        return GivenIds(batch.ids, batch.spans, batch.places)
    if rows.partition_count == 1:
        return GivenIds(ids, {0: (0, len(ids))} if len(ids) else {}, None)
    partitions = partitions_of(mixed_ids(ids, salt_of(rows.seed)), rows.partition_count)
    order = _by_partition(partitions)
    return GivenIds(ids[order], _spans(partitions, rows.partition_count), _inverse(order))


def _has_many_twice(ids: Ids) -> bool:
    """True if many ids come again. Every fourth is looked at: where a sixteenth of these comes
    again, up to a quarter of all may.
    """
    some = np.sort(ids[::4])
    return 16 * int(np.count_nonzero(some[1:] == some[:-1])) > len(some)


def _by_partition(partitions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Positions by ascending partition, those of one partition ascending."""
    return np.argsort(partitions.astype(np.uint16), kind="stable")  # sorts short numbers by radix


def _inverse(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order))
    return found


def _spans(partitions: npt.NDArray[Any], count: int) -> dict[int, tuple[int, int]]:
    """The spans of `CutIds`, for ids by partition."""
    ends = np.cumsum(np.bincount(partitions, minlength=count)).tolist()
    begins = [0, *ends[:-1]]
    return {
        block: span
        for block, span in enumerate(zip(begins, ends, strict=True))
        if span[0] < span[1]
    }


def check_fit(table: Table, spans: Mapping[int, tuple[int, int]], row_bytes: int) -> None:
    """InvalidConfig if the payload of a partition, ids and gradients, is too large for a message.
    `spans` as of `RowBatch`; `row_bytes` of one gradient.
    """
    most = limits.FOREIGN_MAX_MESSAGE_BYTES
    for block, (begin, end) in spans.items():
        byte_count = (end - begin) * (limits.ROW_ID_BYTES + row_bytes)
        if byte_count > most or end - begin > limits.MAX_ROW_COUNT:
            raise InvalidConfig(
                f"a step of table '{table.spec.name}' has {end - begin} rows of partition {block}, "
                f"{byte_count} bytes; expected at most {limits.MAX_ROW_COUNT} and {most}: "
                "push fewer rows a step, or create the table with more partitions than "
                f"{rows_of(table).partition_count}"
            )


def payloads_of(
    table: Table, batch: RowBatch, gradients: npt.NDArray[Any], *, are_summed: bool = False
) -> Iterator[tuple[int, memoryview]]:
    """(partition, payload) of each partition that has ids, in new memory; gradients of one id are
    summed. InvalidConfig if a payload is too large for a message.

    Shapes:
        gradients: (given ids, length); if `are_summed`, (distinct ids, length), as `batch.ids`.
    """
    length, width = gradients.shape[1], gradients.itemsize
    check_fit(table, batch.spans, length * width)
    is_one = len(batch.spans) == 1
    if not (are_summed or is_one):  # once: each call takes long, of few rows too
        gradients = batch.groups.sums(gradients)
    for block, (begin, end) in batch.spans.items():
        split = (end - begin) * limits.ROW_ID_BYTES
        payload = np.empty(split + (end - begin) * length * width, np.uint8)
        payload[:split].view(np.uint64)[:] = batch.ids[begin:end]
        rows = payload[split:].view(gradients.dtype).reshape(end - begin, length)
        if is_one and not are_summed:
            batch.groups.sums(gradients, rows)
        else:
            rows[:] = gradients[begin:end]
        yield block, payload.data
