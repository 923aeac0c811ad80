"""What a scheduler's journal keeps, through its service: one goes on where another one ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from pathlib import Path

from ps_core.cluster_view import Role
from ps_core.consistency import parsed
from ps_runtime import channels, clock
from pushpull.v1 import scheduler_pb2
from scheduler.cluster import Cluster, Decision
from scheduler.publication import Journal
from scheduler.store import records
from scheduler.store.sqlite_store import SqliteStore
from tests.integration.scheduler_calls import DEADLINE_S, SPEC, cluster_of, serving


def resumed(place: Path) -> Decision[Cluster]:
    """The cluster that the journal there has."""
    store = SqliteStore(place)
    kept = records.read(store.read())
    store.close()
    assert kept is not None
    return Cluster.resumed(kept, clock.now_s())


def test_what_is_remembered_of_a_bound_that_moves_outlives_the_scheduler(tmp_path: Path) -> None:
    begun = Decision(cluster_of(adaptation_interval_s=0.1, worker_count=1, server_count=1))
    cluster = begun.reply

    async def first() -> None:
        async with serving(begun, Journal(SqliteStore(tmp_path))) as scheduler:
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

    async def second() -> None:
        again = resumed(tmp_path)
        assert again.reply.courses == cluster.courses
        async with serving(again, Journal(SqliteStore(tmp_path))) as scheduler:
            scheduler.servicer.move_bounds()
            assert again.reply.courses == cluster.courses

    async def both() -> None:
        await asyncio.wait_for(first(), 2 * DEADLINE_S)
        assert len(cluster.courses) == 1
        await second()

    channels.run(both())
