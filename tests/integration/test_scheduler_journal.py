"""What a scheduler's journal keeps, through its service: one goes on where another one ended."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_core.cluster_view import Role
from ps_core.consistency import parsed
from ps_core.errors import InvalidJournal, Recovering
from ps_runtime.grpc import channels
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2, types_pb2
from scheduler.edge.publication import JournalWriter
from scheduler.edge.sqlite_store import SqliteStore
from scheduler.journal import records
from scheduler.machine.cluster import Cluster, Decision
from tests.integration.scheduler_calls import DEADLINE_S, SPEC, cluster_of, refused, serving


def resumed(place: Path) -> Decision[Cluster]:
    """The cluster that the journal there has."""
    store = SqliteStore(place)
    kept = records.read(store.read())
    store.close()
    assert kept is not None
    return Cluster.resumed(kept, clock.now_s())


async def told_to_wait(call: Coroutine[Any, Any, object], words: str) -> None:
    """It must be refused for now, with these words."""
    await refused(call, Recovering, grpc.StatusCode.UNAVAILABLE, [words])


def test_what_is_remembered_of_a_bound_that_moves_outlives_the_scheduler(tmp_path: Path) -> None:
    begun = Decision(cluster_of(adaptation_interval_s=0.1, worker_count=1, server_count=1))
    cluster = begun.reply

    async def first() -> None:
        async with serving(begun, JournalWriter(SqliteStore(tmp_path))) as scheduler:
            server = await scheduler.join(Role.SERVER)
            worker = await scheduler.join(Role.WORKER)
            spec = replace(SPEC, consistency=parsed("ssp:2..8"))
            table_id = (await scheduler.create(worker, spec)).table.table_id
            for clock_now in count(0, 100):
                at = scheduler_pb2.TableProgress(table_id=table_id, clock=clock_now)
                await scheduler.beat(server)
                await scheduler.beat(worker, progress=scheduler_pb2.NodeProgress(tables=[at]))
                if cluster.courses:
                    break
            await scheduler.join(Role.READER)  # answered when the journal has all before it

    async def second() -> None:
        again = resumed(tmp_path)
        assert again.reply.courses == cluster.courses
        async with serving(again, JournalWriter(SqliteStore(tmp_path))) as scheduler:
            scheduler.servicer.move_bounds()
            assert again.reply.courses == cluster.courses

    async def both() -> None:
        await asyncio.wait_for(first(), 2 * DEADLINE_S)
        assert len(cluster.courses) == 1
        await second()

    channels.run(both())


def test_a_journal_that_is_an_older_copy_ends_the_scheduler_before_it_told_anything(
    tmp_path: Path,
) -> None:
    newest, copied = tmp_path / "newest", tmp_path / "copied"
    begun = Decision(cluster_of(worker_count=1, server_count=1, lease_s=60.0, worker_timeout_s=0))

    async def first() -> tuple[types_pb2.SessionIdentity, types_pb2.SessionIdentity, int]:
        async with serving(begun, JournalWriter(SqliteStore(newest))) as scheduler:
            server = await scheduler.join(Role.SERVER)
            worker = await scheduler.join(Role.WORKER)
            shutil.copytree(newest, copied)
            created = await scheduler.create(worker)
            return server, worker, created.view_number

    async def second() -> None:
        server, worker, acted_on = await first()
        async with serving(resumed(newest), JournalWriter(SqliteStore(newest))) as scheduler:
            await scheduler.beat(server, view_number=acted_on)
            await scheduler.beat(worker, view_number=acted_on)
        again = resumed(copied)
        assert again.reply.view.view_number < acted_on
        async with serving(again, JournalWriter(SqliteStore(copied))) as scheduler:
            waits = "waits at most a lease to hear which view server node 1"
            await told_to_wait(scheduler.join(Role.READER), waits)
            await told_to_wait(scheduler.create(worker), waits)
            await told_to_wait(scheduler.view_where(worker, lambda _: True), waits)
            await scheduler.beat(worker, view_number=acted_on)
            older = f"server node 1 acts on view {acted_on}: it is an older copy. Put the newest"
            await told_to_wait(scheduler.beat(server, view_number=acted_on), older)
            with pytest.raises(InvalidJournal, match=older):
                await asyncio.wait_for(scheduler.servicer.until_journal_failed(), DEADLINE_S)

    channels.run(second())
