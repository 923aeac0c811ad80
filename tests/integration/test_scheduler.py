"""The scheduler as others meet it: real gRPC, free ports, every bad registration."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from ps_core import errors, limits
from ps_core.cluster_view import ClusterView, NodeState, Role
from ps_core.consistency import parsed
from ps_core.tables.elements import DType, Initializer, InitializerKind
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster import wire
from ps_runtime.grpc import channels
from pushpull.v1 import scheduler_pb2, types_pb2
from scheduler.edge.servicer import MAX_PROGRESS_BYTES, SERVICE_NAME
from tests.integration.scheduler_calls import (
    DEADLINE_S,
    SPEC,
    Running,
    refused,
    running,
    with_scheduler,
)

BAD_REGISTRATIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"registration_id": b""}, ("registration_id has 0 bytes; expected 16",)),
    ({"registration_id": b"x" * 17}, ("registration_id has 17 bytes",)),
    ({"role": 0}, ("role is unset",)),
    ({"role": 9}, ("role is 9", "unknown")),
    ({"protocol_version": 0}, ("protocol_version is 0",)),
    ({"protocol_version": 2}, ("protocol_version is 2; this cluster speaks 1",)),
    ({"requested_rank": 2}, ("requested_rank is 2", "ranks 0 to 1")),
    ({"requested_rank": 0}, ("rank 0 is taken by worker node 1",)),
    ({"features": ["x"] * 65}, ("features has 65 names",)),
    ({"role": types_pb2.NODE_ROLE_READER, "requested_rank": 1}, ("a reader has no rank",)),
    ({"role": types_pb2.NODE_ROLE_SERVER, "address": "h:1"}, ("kernel_fingerprint has 0 bytes",)),
    (
        {"role": types_pb2.NODE_ROLE_SERVER, "kernel_fingerprint": "t"},
        ("address is ''; expected 'host:port'",),
    ),
    (
        {"role": types_pb2.NODE_ROLE_SERVER, "kernel_fingerprint": "t", "address": "*:1"},
        ("--advertise",),
    ),
    (
        {"role": types_pb2.NODE_ROLE_SERVER, "kernel_fingerprint": "u", "address": "h:1"},
        ("kernel_fingerprint is 'u'; server node 2 at h2:7000", "has 't'"),
    ),
    (
        {"role": types_pb2.NODE_ROLE_SERVER, "kernel_fingerprint": "t", "address": "h2:7000"},
        ("'h2:7000', which server node 2", "has already"),
    ),
]


@pytest.mark.parametrize(("fields", "words"), BAD_REGISTRATIONS)
def test_a_bad_registration_is_an_invalid_argument_and_changes_nothing(
    fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    async def test(scheduler: Running) -> None:
        await scheduler.join(Role.WORKER)
        await scheduler.join(Role.SERVER, address="h2:7000")
        before = (await scheduler.status()).view
        call = scheduler.register(Role.WORKER, **fields)
        await refused(call, errors.InvalidConfig, grpc.StatusCode.INVALID_ARGUMENT, words)
        assert (await scheduler.status()).view == before
        assert 'refusals_total{code="INVALID_CONFIG"} 1.0' in await scheduler.page("/metrics")

    with_scheduler(test)


def test_a_registration_that_means_another_cluster_is_fenced() -> None:
    async def test(scheduler: Running) -> None:
        call = scheduler.register(Role.SERVER, cluster_id="old")
        words = ("names cluster 'old'; this is cluster 'c-1'", "restarted")
        await refused(call, errors.Fenced, grpc.StatusCode.FAILED_PRECONDITION, words)

    with_scheduler(test)


def test_a_worker_beyond_the_count_hears_who_has_the_ranks() -> None:
    async def test(scheduler: Running) -> None:
        assert [(await scheduler.join(Role.WORKER)).rank for _ in range(2)] == [0, 1]
        words = ("a worker beyond the 2", "rank 1 by worker node 2 (alive")
        call = scheduler.register(Role.WORKER)
        await refused(call, errors.InvalidConfig, grpc.StatusCode.INVALID_ARGUMENT, words)

    with_scheduler(test)


def test_a_request_that_does_not_parse_is_an_invalid_argument() -> None:
    async def test(scheduler: Running) -> None:
        raw: Any = scheduler.channel.unary_unary(f"/{SERVICE_NAME}/RegisterNode")

        async def call() -> None:
            await raw(b"\xff\xff\xff", timeout=DEADLINE_S)

        words = ("does not parse",)
        await refused(call(), errors.InvalidTensor, grpc.StatusCode.INVALID_ARGUMENT, words)

    with_scheduler(test)


def test_registration_is_idempotent_and_gives_the_settings() -> None:
    async def test(scheduler: Running) -> None:
        registration_id = secrets.token_bytes(16)
        first = await scheduler.register(Role.WORKER, registration_id=registration_id)
        again = await scheduler.register(Role.WORKER, registration_id=registration_id)
        assert first == again
        assert wire.session_from_proto(first.session).is_genuine(b"k" * 32)
        assert (first.worker_count, first.lease_ms, first.heartbeat_interval_ms) == (2, 3000, 1000)
        assert (first.replica_count, first.min_in_sync) == (1, 1)
        assert first.token_key == b""
        assert (await scheduler.register(Role.SERVER)).token_key == b"k" * 32
        assert len((await scheduler.status()).nodes) == 2

    with_scheduler(test)


@pytest.mark.parametrize("method", ["Heartbeat", "DeregisterNode", "WatchCluster", "CreateTable"])
@pytest.mark.parametrize(
    ("change", "kind", "status", "words"),
    [
        (
            {"session_token": b""},
            errors.Unauthenticated,
            grpc.StatusCode.UNAUTHENTICATED,
            "the session token is missing",
        ),
        (
            {"rank": 1},
            errors.Unauthenticated,
            grpc.StatusCode.UNAUTHENTICATED,
            "is wrong; send the session as RegisterNode gave it",
        ),
        (
            {"cluster_id": "old"},
            errors.ForeignCluster,
            grpc.StatusCode.FAILED_PRECONDITION,
            "the session is of another cluster than this scheduler's",
        ),
        (
            {"role": 0},
            errors.InvalidConfig,
            grpc.StatusCode.INVALID_ARGUMENT,
            "session.role is unset",
        ),
    ],
)
def test_a_session_that_was_not_issued_is_refused_everywhere(
    method: str,
    change: dict[str, Any],
    kind: type[errors.PushpullError],
    status: grpc.StatusCode,
    words: str,
) -> None:
    async def test(scheduler: Running) -> None:
        session = await scheduler.join(Role.WORKER)
        for name, value in change.items():
            setattr(session, name, value)

        async def call() -> None:
            if method == "WatchCluster":
                async for _ in scheduler.views(session):
                    raise AssertionError("a view was sent to a stranger")
            elif method == "CreateTable":
                await scheduler.create(session)
            elif method == "Heartbeat":
                await scheduler.beat(session)
            else:
                await scheduler.leave(session)

        await refused(call(), kind, status, (words,))

    with_scheduler(test)


def test_a_scheduler_that_was_started_again_fences_the_old_clusters_nodes() -> None:
    async def both() -> None:
        async with running() as old:
            session = await old.join(Role.WORKER)
        async with running(cluster_id="c-2") as new:
            words = ("of another cluster", "must be restarted too")
            status = grpc.StatusCode.FAILED_PRECONDITION
            await refused(new.beat(session), errors.ForeignCluster, status, words)

    channels.run(both())


def test_views_come_whole_at_once_and_at_each_change_and_end_with_the_watcher() -> None:
    async def test(scheduler: Running) -> None:
        watcher = await scheduler.join(Role.READER)
        views = scheduler.views(watcher)
        first = await anext(views)
        assert [n.role for n in first.nodes] == [Role.READER]
        assert len(first.ranges) == limits.RANGE_COUNT
        await scheduler.join(Role.SERVER)
        second = await anext(views)
        assert second.view_number > first.view_number
        assert [n.role for n in second.nodes] == [Role.READER, Role.SERVER]
        await scheduler.leave(watcher)
        rest = [view async for view in views]
        assert [n.state for n in rest[-1].nodes] == [NodeState.LEFT, NodeState.ALIVE]

    with_scheduler(test)


def test_a_node_falls_silent_and_is_heard_again() -> None:
    async def test(scheduler: Running) -> None:
        quiet, watcher = await scheduler.join(Role.WORKER), await scheduler.join(Role.READER)

        def is_quiet(view: ClusterView) -> bool:
            return view.nodes[0].state is NodeState.SILENT

        await scheduler.view_where(watcher, is_quiet)
        await scheduler.beat(quiet)
        await scheduler.view_where(watcher, lambda view: not is_quiet(view))

    with_scheduler(test, lease_s=0.4, heartbeat_interval_s=0.1)


def test_a_creation_waits_for_servers_and_all_workers_get_one_table() -> None:
    async def test(scheduler: Running) -> None:
        workers = [await scheduler.join(Role.WORKER) for _ in range(2)]
        creations = [asyncio.create_task(scheduler.create(worker)) for worker in workers]
        await scheduler.join(Role.SERVER)
        await scheduler.join(Role.SERVER)
        one, other = await asyncio.gather(*creations)
        assert one.table == other.table
        view = await scheduler.view_where(workers[0], lambda v: v.view_number >= one.view_number)
        table = wire.table_from_proto(one.table)
        assert view.tables == (table,)
        held = table.blocks_by_range(limits.RANGE_COUNT)
        assert {r.range_id for r in view.ranges if r.primary is not None} == set(held)

    with_scheduler(test)


def test_a_change_that_is_decided_and_not_yet_made_says_so_at_its_deadline() -> None:
    async def test(scheduler: Running) -> None:
        servers = [await scheduler.join(Role.SERVER) for _ in range(2)]
        worker, _ = [await scheduler.join(Role.WORKER) for _ in range(2)]
        await scheduler.create(worker)
        wanted = scheduler_pb2.SetConsistencyRequest(
            session=worker,
            table_name=SPEC.name,
            consistency=wire.consistency_to_proto(parsed("asp")),
        )
        call = asyncio.ensure_future(scheduler.stub.SetConsistency(wanted, timeout=1.5))
        view = await scheduler.view_where(worker, lambda view: view.tables[0].proposed is not None)
        (table,) = view.tables
        assert table.proposed is not None
        for server in servers:
            prepared = scheduler_pb2.PromiseChangeRequest(
                session=server, table_id=table.table_id, number=table.proposed.number, clock=3
            )
            await scheduler.stub.PromiseChange(prepared, timeout=DEADLINE_S)
        words = ("is decided and waits for", "the change may still be made")
        await refused(call, errors.WaitExpired, grpc.StatusCode.DEADLINE_EXCEEDED, words)
        assert (await scheduler.status()).view.tables[0].proposed.number == table.proposed.number

    with_scheduler(test)


def proposed_number(view: ClusterView) -> int:
    """Of the change of the first table that is proposed; 0: none is."""
    proposed = view.tables[0].proposed
    return 0 if proposed is None else proposed.number


def test_a_change_is_proposed_again_when_a_server_that_had_to_prepare_it_leaves() -> None:
    async def test(scheduler: Running) -> None:
        servers = [await scheduler.join(Role.SERVER) for _ in range(2)]
        worker, _ = [await scheduler.join(Role.WORKER) for _ in range(2)]
        await scheduler.create(worker)
        wanted = scheduler_pb2.SetConsistencyRequest(
            session=worker,
            table_name=SPEC.name,
            consistency=wire.consistency_to_proto(parsed("asp")),
        )
        call = asyncio.ensure_future(scheduler.stub.SetConsistency(wanted, timeout=DEADLINE_S))
        await scheduler.view_where(worker, lambda view: proposed_number(view) == 1)
        await scheduler.leave(servers[0])
        await scheduler.view_where(worker, lambda view: proposed_number(view) == 2)
        assert not call.done()
        call.cancel()

    with_scheduler(test, replica_count=2)


def test_a_creation_that_waited_in_vain_says_for_whom_before_its_deadline() -> None:
    async def test(scheduler: Running) -> None:
        worker = await scheduler.join(Role.WORKER)
        await scheduler.join(Role.SERVER)
        before = (await scheduler.status()).view
        words = ("table 'model' waits for 1 more server (1 of 2 registered)",)
        status = grpc.StatusCode.DEADLINE_EXCEEDED
        call = scheduler.create(worker, timeout_s=1.0)
        await refused(call, errors.WaitExpired, status, words)
        assert (await scheduler.status()).view == before

    with_scheduler(test)


def test_a_differing_table_and_a_wrong_one_are_refused_by_name() -> None:
    async def test(scheduler: Running) -> None:
        workers = [await scheduler.join(Role.WORKER) for _ in range(2)]
        for _ in range(2):
            await scheduler.join(Role.SERVER)
        await scheduler.create(workers[0])
        other = TableSpec("model", DType.FLOAT32, 1_001, SPEC.optimizer, 64)
        exists = ("table 'model' exists and differs: its element_count is 1000; got 1001",)
        call = scheduler.create(workers[1], other)
        await refused(call, errors.TableExists, grpc.StatusCode.ALREADY_EXISTS, exists)
        wrong = TableSpec("other", DType.FLOAT32, 1_001, SPEC.optimizer, 63)
        call = scheduler.create(workers[1], wrong)
        status = grpc.StatusCode.INVALID_ARGUMENT
        await refused(call, errors.InvalidConfig, status, ("block_elements is 63",))
        reader = await scheduler.join(Role.READER)
        words = ("CreateTable is for workers",)
        call = scheduler.create(reader)
        await refused(call, errors.NotPermitted, grpc.StatusCode.PERMISSION_DENIED, words)

    with_scheduler(test)


def test_a_parked_creation_ends_when_the_scheduler_stops() -> None:
    async def test(scheduler: Running) -> None:
        worker = await scheduler.join(Role.WORKER)
        views = scheduler.views(worker)
        await anext(views)
        parked = asyncio.create_task(scheduler.create(worker))
        await scheduler.status()
        scheduler.servicer.close()
        words = ("the scheduler is stopping; table 'model' waits for 2 more servers",)
        await refused(
            asyncio.wait_for(parked, DEADLINE_S),
            errors.Draining,
            grpc.StatusCode.UNAVAILABLE,
            words,
        )
        assert [view async for view in views] == []

    with_scheduler(test)


def test_the_status_says_what_nodes_said_last() -> None:
    async def test(scheduler: Running) -> None:
        worker = await scheduler.join(Role.WORKER)
        progress = scheduler_pb2.NodeProgress(step_count=7, loss=0.5, waiting_for="worker 3")
        progress.tables.add(table_id=1, clock=7)
        number = await scheduler.beat(worker, progress=progress, view_number=2)
        status = await scheduler.status()
        assert status.nodes[0].progress == progress
        assert status.nodes[0].view_number == 2
        assert status.nodes[0].last_heard_ms < DEADLINE_S * 1000
        assert status.view.view_number == number
        await scheduler.leave(worker)
        status = await scheduler.status()
        assert status.nodes[0].node.state == types_pb2.NODE_STATE_LEFT
        assert status.nodes[0].progress == progress

    with_scheduler(test)


def test_a_progress_over_the_limit_is_refused() -> None:
    async def test(scheduler: Running) -> None:
        worker = await scheduler.join(Role.WORKER)
        progress = scheduler_pb2.NodeProgress(waiting_for="x" * MAX_PROGRESS_BYTES)
        words = (f"expected at most {MAX_PROGRESS_BYTES}",)
        call = scheduler.beat(worker, progress=progress)
        await refused(call, errors.InvalidConfig, grpc.StatusCode.INVALID_ARGUMENT, words)

    with_scheduler(test)


def test_the_status_fits_a_message_whatever_the_tables_hold() -> None:
    async def test(scheduler: Running) -> None:
        worker = await scheduler.join(Role.WORKER)
        for _ in range(2):
            await scheduler.join(Role.SERVER)
        inline = Initializer(InitializerKind.INLINE, inline=bytes(1024 * 1024))
        for name in "abc":
            spec = TableSpec(name, DType.FLOAT32, 256 * 1024, SPEC.optimizer, initializer=inline)
            await scheduler.create(worker, spec)
        status = await scheduler.status()
        assert [t.spec.name for t in status.view.tables] == ["a", "b", "c"]
        assert status.ByteSize() < 100_000
        view = await scheduler.view_where(worker, lambda v: len(v.tables) == 3)
        assert view.tables[0].spec.initializer == inline

    with_scheduler(test)


def test_a_server_that_alone_has_values_of_a_named_run_stays_and_is_told_which(
    tmp_path: Path,
) -> None:
    """No checkpoint is made of them, so it waits for none; without values it leaves."""

    async def test(scheduler: Running) -> None:
        server = await scheduler.join(Role.SERVER)
        worker = await scheduler.join(Role.WORKER, run="nightly", world_size=1)
        await scheduler.create(worker)
        kept = scheduler_pb2.DeregisterNodeRequest(session=server, only_if_kept=True)
        await refused(
            scheduler.stub.DeregisterNode(kept, timeout=DEADLINE_S),
            errors.Recovering,
            grpc.StatusCode.UNAVAILABLE,
            ["server 1 has the only copy of values of run 'nightly', which no checkpoint covers"],
        )
        operator = await scheduler.join(Role.OPERATOR)
        await scheduler.leave(worker)
        removed = scheduler_pb2.RemoveRunRequest(session=operator, run="nightly")
        await scheduler.stub.RemoveRun(removed, timeout=DEADLINE_S)
        await scheduler.stub.DeregisterNode(kept, timeout=DEADLINE_S)
        assert not scheduler.servicer.degraded_words

    with_scheduler(test, worker_count=1, server_count=1, checkpoint_url=str(tmp_path))


def _log_claim(number: int) -> scheduler_pb2.UpdateLogClaim:
    return scheduler_pb2.UpdateLogClaim(log_id=bytes([number]) * limits.LOG_ID_BYTES)


@pytest.mark.parametrize("is_unused", [True, False])
def test_a_server_that_died_before_its_log_had_a_segment_begins_its_ranges_anew(
    is_unused: bool,
) -> None:
    """Nobody has seen anything of them. A log that has lost its segments claims nothing."""

    async def test(scheduler: Running) -> None:
        await scheduler.join(Role.SERVER, update_log=_log_claim(1))
        worker = await scheduler.join(Role.WORKER)
        await scheduler.create(worker)
        claim = _log_claim(1)
        claim.is_unused = is_unused
        if not is_unused:
            claim = _log_claim(2)
            claim.former_log_ids.append(_log_claim(1).log_id)
        again = await scheduler.join(Role.SERVER, update_log=claim)
        view = await scheduler.view_where(worker, lambda v: again.node_id in v.nodes_by_id)
        assert bool(view.lost_ranges) != is_unused
        assert any(each.primary == again.node_id for each in view.ranges) == is_unused

    with_scheduler(test, worker_count=1, server_count=1)


def test_a_checkpoint_is_made_of_what_the_log_of_a_leaving_server_alone_has(tmp_path: Path) -> None:
    """Another release could not go on with the log. A checkpoint that fails keeps no server, nor do
    values of a named run.
    """

    async def test(scheduler: Running) -> None:
        server = await scheduler.join(Role.SERVER, update_log=_log_claim(1))
        worker = await scheduler.join(Role.WORKER)
        await scheduler.create(worker)
        await scheduler.create(await scheduler.join(Role.WORKER, run="nightly", world_size=1))
        kept = scheduler_pb2.DeregisterNodeRequest(session=server, only_if_kept=True)
        leaving = asyncio.ensure_future(scheduler.stub.DeregisterNode(kept, timeout=DEADLINE_S))
        view = await scheduler.view_where(worker, lambda v: v.checkpoint is not None)
        assert view.checkpoint is not None
        assert not leaving.done()
        failed = scheduler_pb2.ReportCheckpointPartRequest(
            session=server, number=view.checkpoint.number, problem="the disk is full"
        )
        await scheduler.stub.ReportCheckpointPart(failed, timeout=DEADLINE_S)
        await leaving

    with_scheduler(test, worker_count=1, server_count=1, checkpoint_url=str(tmp_path))


def test_a_server_with_a_log_waits_for_no_other_that_has_left_with_one(tmp_path: Path) -> None:
    """All are told to stop: no checkpoint could be made before the first has come back."""

    async def test(scheduler: Running) -> None:
        first, second = [
            await scheduler.join(Role.SERVER, update_log=_log_claim(number)) for number in (1, 2)
        ]
        await scheduler.create(await scheduler.join(Role.WORKER))
        await scheduler.leave(first)
        kept = scheduler_pb2.DeregisterNodeRequest(session=second, only_if_kept=True)
        await scheduler.stub.DeregisterNode(kept, timeout=DEADLINE_S)
        assert not scheduler.servicer.degraded_words

    with_scheduler(test, worker_count=1, checkpoint_url=str(tmp_path))


def test_metrics_and_health() -> None:
    async def test(scheduler: Running) -> None:
        await scheduler.beat(await scheduler.join(Role.WORKER))
        page = await scheduler.page("/metrics")
        assert 'pushpull_scheduler_nodes{role="worker",state="alive"} 1.0' in page
        assert 'pushpull_scheduler_heartbeats_total{role="worker"} 1.0' in page
        assert await scheduler.page("/healthz") == "ok\n"

    with_scheduler(test)


def test_metrics_say_which_ranges_miss_replicas_and_how_often_one_took_over() -> None:
    def degraded(count: int) -> str:
        return f'pushpull_scheduler_ranges{{missing_replicas="1"}} {float(count)}'

    async def test(scheduler: Running) -> None:
        servers = [await scheduler.join(Role.SERVER) for _ in range(2)]
        worker = await scheduler.join(Role.WORKER)
        created = await scheduler.create(worker)
        table = wire.table_from_proto(created.table)
        held_count = len(table.blocks_by_range(limits.RANGE_COUNT))
        page = await scheduler.page("/metrics")
        assert f'pushpull_scheduler_ranges{{missing_replicas="0"}} {float(held_count)}' in page
        assert degraded(0) in page
        view = await scheduler.view_where(worker, lambda v: bool(v.tables))
        lost_count = sum(r.primary == servers[0].node_id for r in view.ranges)
        assert 0 < lost_count < held_count
        await scheduler.leave(servers[0])
        page = await scheduler.page("/metrics")
        assert f"pushpull_scheduler_failovers_total {float(lost_count)}" in page
        assert degraded(held_count) in page
        status = await scheduler.status()
        assert (status.replica_count, status.min_in_sync) == (2, 1)

    with_scheduler(test, replica_count=2)
