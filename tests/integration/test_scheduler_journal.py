"""What a scheduler's journal keeps, through its service: one goes on where another one ended."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_core.cluster_view import Role
from ps_core.consistency import parsed
from ps_core.errors import Fenced, InvalidJournal, Recovering
from ps_runtime.grpc import channels
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2, types_pb2
from scheduler.edge.publication import JournalWriter
from scheduler.edge.sqlite_store import SqliteStore
from scheduler.journal import records
from scheduler.machine.cluster import Cluster, Decision
from tests.integration.held_store import HeldStore
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


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until it is so."""
    while not holds():
        is_next = asyncio.Event()
        asyncio.get_running_loop().call_soon(is_next.set)
        await is_next.wait()


def test_a_heartbeat_that_a_restore_overtakes_says_nothing_of_the_new_timeline(
    tmp_path: Path,
) -> None:
    """Its clocks would make checkpoints due that nobody wants."""

    async def live() -> None:
        store, begun = HeldStore(tmp_path), Decision(cluster_of(worker_count=1, server_count=1))
        store.claim()
        async with serving(begun, JournalWriter(store)) as scheduler:
            servicer = scheduler.servicer
            operator = await scheduler.join(Role.OPERATOR)
            server, worker = await scheduler.join(Role.SERVER), await scheduler.join(Role.WORKER)
            table_id = (await scheduler.create(worker)).table.table_id
            store.may_write.clear()
            joins = asyncio.create_task(scheduler.join(Role.READER))
            await asyncio.to_thread(store.waits.wait, DEADLINE_S)
            at = scheduler_pb2.NodeProgress(
                tables=[scheduler_pb2.TableProgress(table_id=table_id, clock=1_000)]
            )
            waiting = len(servicer._publication._waiting)
            beats = asyncio.create_task(scheduler.beat(worker, progress=at))
            await until(lambda: len(servicer._publication._waiting) > waiting)
            empty = scheduler_pb2.RestoreCheckpointRequest(session=operator, empty=True)
            restores = scheduler.stub.RestoreCheckpoint(empty, timeout=DEADLINE_S)
            await until(lambda: servicer._cluster is not begun.reply)
            store.may_write.set()
            await asyncio.gather(joins, beats, restores)
            assert servicer.checkpointing.schedule.clock == 0
            assert servicer.checkpointing.schedule.reached == {}
            await told_again(scheduler.beat(server), "another timeline")

    async def told_again(call: Coroutine[Any, Any, object], words: str) -> None:
        await refused(call, Fenced, grpc.StatusCode.FAILED_PRECONDITION, [words])

    channels.run(asyncio.wait_for(live(), 3 * DEADLINE_S))
