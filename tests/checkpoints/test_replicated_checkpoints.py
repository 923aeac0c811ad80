"""Checkpoints of clusters whose ranges have backups, while servers die."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import numpy as np

import ps_worker as ps
from ps_runtime.checkpoint.reader import problems_of
from ps_runtime.checkpoint.store import resolve
from tests.integration.lane_cluster import until

COUNT, DEADLINE_S = 40_000, 60.0


def _table(client: ps.Client, name: str) -> ps.TableHandle:
    return client.create_table(name, COUNT, optimizer=ps.Adam(lr=0.1), block_elements=1024)


def _gradient(clock: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(clock).standard_normal(COUNT).astype(np.float32)


def _steps(client: ps.Client, tables: list[ps.TableHandle], count: int) -> list[bytes]:
    for _ in range(count):
        found = [client.push_pull(t, _gradient(t.clock), timeout_s=DEADLINE_S) for t in tables]
    return [np.asarray(each).tobytes() for each in found]


def _all_have_backups(client: ps.Client) -> bool:
    view = client.engine.view
    held = {r for table in view.tables for r in table.blocks_by_range(len(view.ranges))}
    return all(view.in_sync_count(view.ranges[range_id]) == 2 for range_id in held)


def test_a_server_dies_while_it_is_written_and_after_it_was_loaded(tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")
    with (
        ps.local_cluster(3, 1, replicas=2, checkpoint_url=root) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        tables = [_table(client, name) for name in ("one", "two")]
        _steps(client, tables, 3)
        ticket = client.checkpoint("a server dies meanwhile")
        os.kill(cluster.process_ids["server 1"], signal.SIGKILL)
        with contextlib.suppress(ps.InvalidCheckpoint):  # the dead server may have been done
            ticket.wait()
        _steps(client, tables, 2)
        until(lambda: _all_have_backups(client), "the others back each other up")
        made = client.checkpoint("the next one").wait()
        expected = _steps(client, tables, 4)
    with resolve(root).reader as reader:
        assert reader.directory.url == made.url
        assert {table.clock for table in reader.manifest.tables} == {5}
        assert not problems_of(reader.directory)
    with (
        ps.local_cluster(2, 1, replicas=2, resume=root) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        tables = [_table(client, name) for name in ("one", "two")]
        _steps(client, tables, 2)
        until(lambda: _all_have_backups(client), "what was loaded has backups")
        os.kill(cluster.process_ids["server 0"], signal.SIGKILL)
        assert _steps(client, tables, 2) == expected
