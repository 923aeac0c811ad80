"""Calls to lease data shards that wait: what wakes them, and how they end (SEMANTICS S20)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from ps_core.cluster_view import Role
from ps_core.errors import Draining, InvalidConfig, WaitExpired
from pushpull.v1 import scheduler_pb2, types_pb2
from tests.integration.scheduler_calls import DEADLINE_S, Running, refused, with_scheduler

PATIENCE_S = 6 * DEADLINE_S
"""Of a call that waits, and a lease: longer than a test, so nothing else wakes the call."""
DATA_SET = scheduler_pb2.DataSet(name="data", sample_count=2, shard_size=1, seed=0)


async def lease(
    scheduler: Running,
    session: types_pb2.SessionIdentity,
    want_count: int,
    done: Sequence[int] = (),
    timeout_s: float = DEADLINE_S,
) -> scheduler_pb2.LeaseDataShardsResponse:
    request = scheduler_pb2.LeaseDataShardsRequest(
        session=session, data_set=DATA_SET, pass_number=0, done_shards=done, want_count=want_count
    )
    answer: scheduler_pb2.LeaseDataShardsResponse = await scheduler.stub.LeaseDataShards(
        request, timeout=timeout_s
    )
    return answer


async def waiting(
    scheduler: Running,
) -> tuple[types_pb2.SessionIdentity, list[int], asyncio.Task[list[int]]]:
    """A worker with all shards, and the call of another that waits for one."""
    first = await scheduler.join(Role.WORKER)
    second = await scheduler.join(Role.WORKER)
    leased = await lease(scheduler, first, 2)
    shards = list(leased.shards)
    assert leased.view_number == (await scheduler.status()).view.view_number

    async def waits() -> list[int]:
        answer = await lease(scheduler, second, 1, timeout_s=PATIENCE_S)
        return [answer.pass_number, *answer.shards]

    call = asyncio.create_task(waits())
    await scheduler.status()
    assert not call.done()
    return first, shards, call


def test_it_is_woken_by_the_end_of_the_pass() -> None:
    async def test(scheduler: Running) -> None:
        first, shards, call = await waiting(scheduler)
        await lease(scheduler, first, 0, shards[:1])
        await scheduler.status()
        assert not call.done()
        await lease(scheduler, first, 0, shards[1:])
        assert await asyncio.wait_for(call, DEADLINE_S) == [1]

    with_scheduler(test, lease_s=PATIENCE_S, worker_timeout_s=0.0)


def test_it_is_woken_by_the_leave_of_who_has_the_shards() -> None:
    async def test(scheduler: Running) -> None:
        first, shards, call = await waiting(scheduler)
        await scheduler.leave(first)
        assert await asyncio.wait_for(call, DEADLINE_S) == [0, shards[0]]
        metrics = await scheduler.page("/metrics")
        for event, count in (("issued", 3), ("returned", 2)):
            line = f'pushpull_scheduler_data_shards_total{{event="{event}"}} {count}.0'
            assert line in metrics

    with_scheduler(test)


def test_it_ends_with_the_scheduler() -> None:
    async def test(scheduler: Running) -> None:
        _, _, call = await waiting(scheduler)
        scheduler.servicer.close()
        words = ["the scheduler is stopping; the last 2 shards of pass 0 of data set 'data'"]
        await refused(
            asyncio.wait_for(call, DEADLINE_S), Draining, grpc.StatusCode.UNAVAILABLE, words
        )

    with_scheduler(test)


def test_it_ends_at_its_deadline_with_who_has_the_shards() -> None:
    async def test(scheduler: Running) -> None:
        first = await scheduler.join(Role.WORKER)
        second = await scheduler.join(Role.WORKER)
        await lease(scheduler, first, 2)
        words = [
            "the last 2 shards of pass 0 of data set 'data' are leased to worker node 1 (alive"
        ]
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        await refused(lease(scheduler, second, 1, timeout_s=0.5), WaitExpired, late, words)

    with_scheduler(test)


def test_a_request_with_nothing_in_it_is_refused() -> None:
    async def test(scheduler: Running) -> None:
        session = await scheduler.join(Role.WORKER)
        request = scheduler_pb2.LeaseDataShardsRequest(session=session)
        call = scheduler.stub.LeaseDataShards(request, timeout=DEADLINE_S)
        words = ["the data set's name has 0 bytes; expected 1 to 200"]
        await refused(call, InvalidConfig, grpc.StatusCode.INVALID_ARGUMENT, words)
        assert not (await scheduler.status()).data_sets

    with_scheduler(test)
