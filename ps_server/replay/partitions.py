"""Partitions of a table of rows, compared and measured: by id, since a row has no fixed number.

Values are compared bit by bit: a NaN is equal to itself, and 0.0 differs from -0.0. An id that was
admitted may still have a place among the candidates, with the count 0, and is none (`Candidates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ps_core.rows import Ids
from ps_core.sliced_work import at_once
from ps_server.rows.row_retention import COUNT, TALLY
from ps_server.values.mutations import fixed_elements
from ps_server.values.row_gradients import RowAccumulator, slices_of
from ps_server.values.row_pieces import prefixed
from ps_server.values.row_store import RowStore
from ps_server.values.store_copy import CANDIDATES, IDS, SumCopy

_PIECE_COUNT = 16_384
"""Rows that are copied or compared at once."""

Tensors = Mapping[str, bytes | bytearray | memoryview]
"""The tensors of a partition by name, as a checkpoint has them."""


class RowDifference(NamedTuple):
    """Rows, or candidates, that differ between two versions of a partition.

    Attributes:
        subject: their difference, for people.
        first_id: the lowest of their ids.
    """

    subject: str
    row_count: int
    first_id: int


class _Content(NamedTuple):
    """Rows, or candidates. Shapes: ids (n,), ascending; bits (n, bytes of a row)."""

    ids: Ids
    bits: dict[str, npt.NDArray[np.uint8]]

    @classmethod
    def of(cls, tensors: Tensors, ids_name: str) -> _Content:
        ids: Ids = np.frombuffer(tensors.get(ids_name, b""), "<u8")
        bits = {
            name: np.frombuffer(payload, np.uint8).reshape(len(ids), len(payload) // len(ids))
            for name, payload in tensors.items()
            if name != ids_name and len(ids)
        }
        counts = tensors.get(prefixed(COUNT))
        places: npt.NDArray[Any] = np.argsort(ids)
        if counts is not None and len(ids):
            places = places[np.frombuffer(counts, TALLY)[places] > 0]
        return cls(ids[places], {name: each[places] for name, each in bits.items()})


def differences(made: Tensors, stored: Tensors) -> Iterator[RowDifference]:
    """The differences of a partition's rows and candidates: as the log has them, and as a
    checkpoint or a snapshot does.
    """
    for ids_name, noun in ((IDS, "rows"), (CANDIDATES, "candidates")):
        left, right = (_Content.of(_own(each, noun), ids_name) for each in (made, stored))
        for one, other, where in ((left, right, "log"), (right, left, "checkpoint")):
            alone = np.setdiff1d(one.ids, other.ids, assume_unique=True)
            if len(alone):
                subject = f"{noun} are in the {where} only"
                yield RowDifference(subject, len(alone), int(alone[0]))
        ids, mine, theirs = np.intersect1d(
            left.ids, right.ids, assume_unique=True, return_indices=True
        )
        if not len(ids):
            continue
        for name in sorted(left.bits.keys() | right.bits.keys()):
            differs = _differing(left.bits.get(name), right.bits.get(name), (mine, theirs))
            if differs.any():
                first = int(ids[np.flatnonzero(differs)[0]])
                subject = f"{noun} differ in {name}"
                yield RowDifference(subject, int(np.count_nonzero(differs)), first)


def _own(tensors: Tensors, noun: str) -> Tensors:
    """The tensors of rows, or those of candidates."""
    are_candidates = noun == "candidates"
    beginning = prefixed("")
    return {n: each for n, each in tensors.items() if n.startswith(beginning) == are_candidates}


def _differing(
    left: npt.NDArray[np.uint8] | None,
    right: npt.NDArray[np.uint8] | None,
    places: tuple[npt.NDArray[Any], npt.NDArray[Any]],
) -> npt.NDArray[np.bool_]:
    mine, theirs = places
    if left is None or right is None or left.shape[1] != right.shape[1]:
        return np.ones(len(mine), bool)
    found = np.empty(len(mine), bool)
    for begin in range(0, len(mine), _PIECE_COUNT):
        some = slice(begin, begin + _PIECE_COUNT)
        found[some] = (left[mine[some]] != right[theirs[some]]).any(axis=1)
    return found


def in_order(sums: Iterable[SumCopy]) -> Sequence[object]:
    """Sums in a fixed order, without running means."""
    return sorted((s.clock, s.waits, fixed_elements(s.accumulator.blocks)) for s in sums)


def are_same(one: RowStore, other: RowStore) -> bool:
    """True if two stores of the same partitions go on alike; one of these is copied at a time."""
    if in_order(one.kept_sums()) != in_order(other.kept_sums()):
        return False
    for block in one.blocks:
        left, right = one.saved(block), other.saved(block)
        if left.version != right.version:
            return False
        if any(differences(dict(left.tensors), dict(right.tensors))):
            return False
    return True


def pieces_of_rows(store: RowStore, block: int) -> Iterator[tuple[Ids, npt.NDArray[Any]]]:
    """Copies of a partition's ids and rows, some at a time, in the order of their numbers."""
    begin = 0
    while True:
        ids, rows = at_once(store.listed(block, begin, _PIECE_COUNT))
        if not len(ids):
            return
        yield ids, rows
        begin += len(ids)


def square_sum_of_rows(store: RowStore) -> float:
    """The sum of the squares of all values of a store's rows."""
    pieces = (rows for block in store.blocks for _, rows in pieces_of_rows(store, block))
    return sum(_square_sum(rows) for rows in pieces)


def square_sum_of_gradients(accumulator: RowAccumulator) -> float:
    """The sum of the squares of a sum of gradients, those of ids that get no row included."""
    found = 0.0
    for total in accumulator.sums.values():
        _, values = at_once(total.totalling())
        found += sum(_square_sum(values[some]) for some in slices_of(values))
    return found


def _square_sum(rows: npt.NDArray[Any]) -> float:
    return float(np.square(rows, dtype=np.float64).sum())
