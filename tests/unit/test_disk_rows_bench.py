"""`pushpull bench sparse` with rows on disk: the memory that its server gets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ps_cli.bench.measurements import disk_rows
from ps_core.errors import InvalidConfig
from ps_core.sliced_work import at_once
from ps_server.rows.row_index import RowIndex

MIB = 2**20


@pytest.mark.parametrize("row_count", [100_000, 150_000, 160_000])
def test_the_memory_is_that_of_the_index_and_a_tenth_of_the_rows(row_count: int) -> None:
    index = RowIndex(np.uint64(1))
    at_once(index.adding(np.arange(row_count, dtype=np.uint64)))
    place_bytes = 4 * row_count
    frame_bytes = row_count // 10 * (64 * 4 + 4 + 10)
    needed = index.byte_count + place_bytes + frame_bytes
    assert 0 <= disk_rows.memory_mb(row_count, 1) * MIB - needed < MIB


def test_more_partitions_than_have_a_tenth_of_their_rows_in_memory_are_not_measured() -> None:
    assert disk_rows.is_measured(100_000, 1)
    assert not disk_rows.is_measured(100_000, 16)
    assert disk_rows.is_measured(1_000_000, 16)


def test_a_folder_without_space_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"GB free; expected .* for rows: .* with TMPDIR"):
        disk_rows.check_space(10**15, 2)


def test_the_file_system_is_that_of_the_closest_mount() -> None:
    assert disk_rows.file_system(Path("/proc/self")) == "proc"
    assert disk_rows.file_system(Path("/")) not in ("", "unknown", "proc")
