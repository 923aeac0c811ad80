"""Loops over the ids of rows: compiled by numba and without the GIL, where it is installed (the
extra `rows`), else as passes of numpy.

A row's slot is found by linear probing from its mixed id (`ps_core.rows`). Ids are looked up in
groups: their slots are loaded first, then what the slots name, so that a group waits for memory
twice and not twice an id.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.rows import Ids

Slots = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


def load() -> None:
    """Load the compiled loops. Any thread; what needs them first would do it otherwise."""
    _loops()


@functools.cache
def step_loops() -> Any:
    """The module `row_step_loops`; None without numba."""
    try:
        return importlib.import_module("ps_server.rows.row_step_loops")
    except ImportError:
        return None


@functools.cache
def _loops() -> ModuleType:
    try:
        return importlib.import_module("ps_server.rows.row_loops")
    except ImportError:  # numba is missing, or of no use beside this numpy
        return importlib.import_module("ps_server.rows.row_passes")


def elsewhere(ids: Ids, salt: np.uint64, partition_count: int, partition: int) -> int:
    """The place of the first id that lives in another partition, or -1."""
    return int(_loops().elsewhere(ids, salt, np.uint64(partition_count), partition))


def find(slots: Slots, known: Ids, ids: Ids, salt: np.uint64) -> Numbers:
    """The number of each id, or -1. Shapes: as `ids`.

    Args:
        slots: as of `RowIndex`; a power of two of them, one of them free.
        known: the ids by number; one at least, of any content.
    """
    found = np.empty(len(ids), np.int64)
    _loops().find(slots, known, ids, salt, found)
    return found


def put(slots: Slots, first: int, ids: Ids, salt: np.uint64) -> None:
    """Give slots to ids that have none, which get the numbers from `first` on; there must be more
    free slots than ids.
    """
    _loops().put(slots, first, ids, salt)
