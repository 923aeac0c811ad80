"""A node's link against the real scheduler: it comes late, goes away, comes back, is another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ps_core import limits
from ps_core.cluster_view import BackupRequest, ClusterView, NodeState, Role
from ps_core.consistency import parsed
from ps_core.errors import (
    Fenced,
    ForeignCluster,
    Internal,
    InvalidConfig,
    NotPermitted,
    PushpullError,
    TableExists,
    WaitExpired,
)
from ps_core.keys import Incarnation, NodeId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster.registration import Addresses, operator_session
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_runtime.grpc import channels
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.observe.metrics import SchedulerMetrics, new_registry
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler.edge.servicer import SERVICE_NAME, SchedulerServicer
from scheduler.machine.cluster import Cluster, Decision
from scheduler.machine.state import ClusterSettings
from tests.joining import SECRET

SETTINGS = ClusterSettings(
    cluster_id="one",
    timeline=b"t" * 16,
    token_key=b"k" * 32,
    first_incarnation=Incarnation(100),
    worker_count=2,
    server_count=1,
    heartbeat_interval_s=0.02,
    lease_s=2.0,
)
WORKER = scheduler_pb2.RegisterNodeRequest(role=types_pb2.NODE_ROLE_WORKER, protocol_version=1)
SERVER = scheduler_pb2.RegisterNodeRequest(
    role=types_pb2.NODE_ROLE_SERVER,
    protocol_version=1,
    address="server.test:7000",
    kernel_fingerprint="f",
)
SPEC = TableSpec("t", DType.FLOAT32, 640, OptimizerSpec(OptimizerKind.SGD), block_elements=64)
DEADLINE_S = 20.0


class Scheduler:
    """The real scheduler's machine and servicer, whose port can be closed and opened again."""

    def __init__(self, settings: ClusterSettings = SETTINGS) -> None:
        self.cluster = Cluster(settings, clock.now_s())
        self.servicer = SchedulerServicer(
            Decision(self.cluster), SchedulerMetrics(new_registry()), SECRET.encode()
        )
        self.node: NodeServer | None = None

    async def open(self, listen: str = "127.0.0.1:0") -> str:
        def add(server: Any) -> None:
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.servicer, server)

        services = [(SERVICE_NAME, add)]
        self.node = await NodeServer.start(listen, services=services, registry=new_registry())
        return self.node.address

    async def close(self) -> None:
        if self.node is not None:
            await self.node.stop(0.0)
            self.node = None


def run(main: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main, 2 * DEADLINE_S)

    channels.run(bounded())


@contextlib.asynccontextmanager
async def served(scheduler: Scheduler) -> AsyncIterator[str]:
    address = await scheduler.open()
    try:
        yield address
    finally:
        await scheduler.close()


@contextlib.asynccontextmanager
async def opened(settings: ClusterSettings = SETTINGS) -> AsyncIterator[tuple[Scheduler, str]]:
    scheduler = Scheduler(settings)
    async with served(scheduler) as address:
        yield scheduler, address


@contextlib.asynccontextmanager
async def linked(
    *addresses: str, register: scheduler_pb2.RegisterNodeRequest = WORKER
) -> AsyncIterator[SchedulerLink]:
    link = await SchedulerLink.connect(addresses, register, DEADLINE_S)
    try:
        yield link
    finally:
        await link.close()


def unused_address() -> str:
    """A port that nobody listens on: it was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host, port = probe.getsockname()
        return f"{host}:{port}"


class Lines(logging.Handler):
    """The events that pushpull logs while it is attached, and a way to wait for one."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.levels: dict[str, int] = {}
        self._changed = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(record.getMessage().split(" ")[0].removeprefix("event="))
        self.levels[self.events[-1]] = record.levelno
        self._changed.set()

    async def wait_for(self, event: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while event not in self.events:
                self._changed.clear()
                await self._changed.wait()

    def only(self, *names: str) -> list[str]:
        return [event for event in self.events if event in names]


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("pushpull"), Lines()
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level_before)
    logger.removeHandler(handler)


def test_a_worker_gets_its_identity_and_the_view() -> None:
    async def main() -> None:
        async with opened() as (_, address), linked(address) as link:
            assert (link.session.role, link.session.rank) == (Role.WORKER, 0)
            assert link.session.is_genuine(SETTINGS.token_key)
            assert (link.worker_count, link.token_key) == (2, b"")
            view = await link.view_at_least(1, DEADLINE_S)
            assert view.nodes_by_id[link.session.node_id].state is NodeState.ALIVE
            seen: list[int] = []
            link.on_view.append(lambda newer: seen.append(newer.view_number))
            async with linked(address, register=SERVER) as other:
                assert other.token_key == SETTINGS.token_key
                newer = await link.view_at_least(view.view_number + 1, DEADLINE_S)
                assert other.session.node_id in newer.nodes_by_id
                assert seen[-1] == newer.view_number
                assert link.view is newer

    run(main())


class NoAnswers(SchedulerServicer):
    """It has taken a request for another consistency, and is paused before it answers."""

    async def SetConsistency(self, *_: Any) -> Any:  # noqa: N802 - gRPC's name
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_change_that_nobody_answers_may_still_be_made(*, is_there: bool) -> None:
    """Also one that a scheduler had taken before it died."""

    async def main() -> None:
        scheduler = Scheduler()
        given = Decision(scheduler.cluster), SchedulerMetrics(new_registry()), SECRET.encode()
        scheduler.servicer = NoAnswers(*given)
        async with served(scheduler) as address, linked(address) as link:
            await link.view_at_least(1, DEADLINE_S)
            if not is_there:
                await scheduler.close()
            with pytest.raises(WaitExpired, match=r"for table 't'.*the change may still be made"):
                await link.set_consistency("t", parsed("asp"), 0, 0.3)

    run(main())


def test_a_view_is_taken_when_all_is_ready_for_it() -> None:
    async def main() -> None:
        async with opened() as (_, address), linked(address) as link:
            view = await link.view_at_least(1, DEADLINE_S)
            asked, ready = asyncio.Event(), asyncio.Event()
            seen: list[int] = []

            async def prepare(newer: ClusterView) -> None:
                seen.append(-newer.view_number)
                asked.set()
                await ready.wait()

            link.before_view = prepare
            link.on_view.append(lambda newer: seen.append(newer.view_number))
            async with linked(address, register=SERVER):
                await asked.wait()
                assert link.view is view
                assert len(seen) == 1
                ready.set()
                newer = await link.view_at_least(view.view_number + 1, DEADLINE_S)
                assert seen[:2] == [-newer.view_number, newer.view_number]

    run(main())


def test_a_scheduler_that_comes_late_is_waited_for_with_one_line(lines: Lines) -> None:
    async def main() -> None:
        scheduler, address = Scheduler(), unused_address()
        connecting = asyncio.create_task(SchedulerLink.connect([address], WORKER, DEADLINE_S))
        await lines.wait_for("waiting_for_scheduler")
        await scheduler.open(address)
        link = await connecting
        await link.close()
        await scheduler.close()

    run(main())
    said = lines.only("waiting_for_scheduler", "registered")
    assert said == ["waiting_for_scheduler", "registered"]


def test_no_scheduler_in_time_names_the_addresses_and_the_failure() -> None:
    async def main() -> None:
        addresses = [unused_address(), unused_address()]
        with pytest.raises(WaitExpired) as caught:
            await SchedulerLink.connect(addresses, WORKER, 0.3)
        assert f"no scheduler answered at {addresses[0]}, {addresses[1]}" in caught.value.message
        assert "UNAVAILABLE" in caught.value.message
        with pytest.raises(InvalidConfig, match="no scheduler address"):
            await SchedulerLink.connect([], WORKER, 0.3)

    run(main())


def test_a_refusal_is_raised() -> None:
    async def main() -> None:
        one = replace(SETTINGS, worker_count=1)
        async with opened(one) as (_, address), linked(address):
            with pytest.raises(InvalidConfig, match="worker"):
                await SchedulerLink.connect([address], WORKER, DEADLINE_S)
            stranger = scheduler_pb2.RegisterNodeRequest()
            stranger.CopyFrom(SERVER)
            stranger.cluster_id = "another"
            with pytest.raises(Fenced, match="another"):
                await SchedulerLink.connect([address], stranger, DEADLINE_S)

    run(main())


def test_a_rank_is_waited_for_until_whoever_had_it_is_gone(lines: Lines) -> None:
    async def main() -> None:
        settings = replace(SETTINGS, lease_s=0.2, worker_timeout_s=0.5)
        ranked = scheduler_pb2.RegisterNodeRequest(requested_rank=1)
        ranked.MergeFrom(WORKER)
        async with opened(settings) as (scheduler, address):
            ticking = asyncio.create_task(scheduler.servicer.watch_for_silence())
            async with linked(address, register=ranked) as living:
                with pytest.raises(InvalidConfig, match="rank 1 is taken by worker node 1 "):
                    await SchedulerLink.connect([address], ranked, DEADLINE_S)
            assert lines.only("waiting_for_place") == ["waiting_for_place"]
            async with linked(address, register=ranked) as successor:
                assert successor.session.rank == 1
                assert successor.session.incarnation > living.session.incarnation
            with pytest.raises(WaitExpired, match=r"not registered at .* within 0\.1 s; .* rank 1"):
                await SchedulerLink.connect([address], ranked, 0.1)
            ticking.cancel()

    run(main())
    assert len(lines.only("waiting_for_place")) == 3
    assert not lines.only("waiting_for_scheduler")


def test_of_several_addresses_the_one_that_answers_is_used() -> None:
    async def main() -> None:
        async with (
            opened() as (_, address),
            linked(unused_address(), address, unused_address()) as link,
        ):
            assert (await link.view_at_least(1, DEADLINE_S)).cluster_id == "one"

    run(main())


def test_a_table_waits_for_servers_and_then_is_in_the_view() -> None:
    async def main() -> None:
        async with opened() as (_, address), linked(address) as link:
            with pytest.raises(WaitExpired, match="1 more server"):
                await link.create_table(SPEC, 0.4)
            creating = asyncio.create_task(link.create_table(SPEC, DEADLINE_S))
            async with linked(address, register=SERVER):
                table, number = await creating
                assert link.view is not None
                assert link.view.view_number >= number
                assert link.view.tables_by_name["t"] == table
                assert table.spec == SPEC.validated()
                again, _ = await link.create_table(SPEC, DEADLINE_S)
                assert again == table
                with pytest.raises(TableExists, match="element_count"):
                    await link.create_table(replace(SPEC, element_count=641), DEADLINE_S)

    run(main())


def test_a_scheduler_that_goes_and_comes_back_is_survived_with_two_lines(lines: Lines) -> None:
    async def main() -> None:
        async with opened() as (scheduler, address), linked(address) as link:
            first = await link.view_at_least(1, DEADLINE_S)
            await scheduler.close()
            await lines.wait_for("scheduler_is_away")
            with pytest.raises(
                WaitExpired, match=r"table 't' to be created; scheduler .* last heard"
            ):
                await link.create_table(SPEC, 0.3)
            with pytest.raises(WaitExpired, match="view 99 of the cluster; scheduler"):
                await link.view_at_least(99, 0.05)
            await scheduler.open(address)
            async with linked(address, register=SERVER):
                await link.view_at_least(first.view_number + 1, DEADLINE_S)
                await link.create_table(SPEC, DEADLINE_S)
            assert not link.fenced.is_set()
            assert clock.now_s() - link.last_scheduler_contact_s < DEADLINE_S

    run(main())
    said = lines.only("scheduler_is_away", "scheduler_is_back", "link_failed")
    assert said == ["scheduler_is_away", "scheduler_is_back"]


def test_who_stops_the_scheduler_itself_is_not_warned_that_it_is_away(lines: Lines) -> None:
    async def main() -> None:
        async with opened() as (scheduler, address), linked(address) as link:
            link.is_stopped_here = True
            await scheduler.close()
            await lines.wait_for("scheduler_is_away")

    run(main())
    assert lines.levels["scheduler_is_away"] == logging.INFO


def test_a_heartbeat_that_is_lost_is_followed_by_another_within_the_lease() -> None:
    class Losing(SchedulerServicer):
        """Answers no first heartbeat."""

        def __init__(self, cluster: Cluster) -> None:
            super().__init__(Decision(cluster), SchedulerMetrics(new_registry()), SECRET.encode())
            self.came_s: list[float] = []
            self.came_again = asyncio.Event()

        async def Heartbeat(  # noqa: N802 - the contract's name
            self, request: scheduler_pb2.HeartbeatRequest, context: Any
        ) -> scheduler_pb2.HeartbeatResponse:
            self.came_s.append(clock.now_s())
            if len(self.came_s) == 1:
                await asyncio.Event().wait()
            self.came_again.set()
            return await super().Heartbeat(request, context)

    async def main() -> None:
        scheduler = Scheduler()
        losing = scheduler.servicer = Losing(scheduler.cluster)
        address = await scheduler.open()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(scheduler.close)
            link = await stack.enter_async_context(linked(address))
            await losing.came_again.wait()
            assert losing.came_s[1] - losing.came_s[0] < 0.7 * link.lease_s

    run(main())


def test_another_cluster_at_the_address_fences_the_node() -> None:
    async def main() -> None:
        other = Scheduler(replace(SETTINGS, cluster_id="two", first_incarnation=Incarnation(9)))
        async with contextlib.AsyncExitStack() as stack:
            scheduler, address = await stack.enter_async_context(opened())
            stack.push_async_callback(other.close)
            link = await stack.enter_async_context(linked(address))
            heard: list[PushpullError] = []
            link.on_fenced.append(heard.append)
            waiting = asyncio.create_task(link.view_at_least(99, DEADLINE_S))
            await link.view_at_least(1, DEADLINE_S)
            await scheduler.close()
            await other.open(address)
            await asyncio.wait_for(link.fenced.wait(), DEADLINE_S)
            assert [type(error) for error in heard] == [ForeignCluster]
            assert link.fenced_by is heard[0]
            with pytest.raises(ForeignCluster):
                await waiting
            with pytest.raises(ForeignCluster):
                await link.create_table(SPEC, DEADLINE_S)
            assert not await link.deregister("too late")

    run(main())


def test_backups_are_set_by_their_primary_and_what_came_too_late_is_named() -> None:
    async def main() -> None:
        settings = replace(SETTINGS, server_count=2, replica_count=2, min_in_sync=2)
        other = scheduler_pb2.RegisterNodeRequest()
        other.CopyFrom(SERVER)
        other.address = "server.test:7001"
        async with (
            opened(settings) as (_, address),
            linked(address) as worker,
            linked(address, register=SERVER) as primary,
            linked(address, register=other) as backup,
        ):
            assert (backup.replica_count, backup.min_in_sync, backup.lease_s) == (2, 2, 2.0)
            _, number = await worker.create_table(SPEC, DEADLINE_S)
            view = await primary.view_at_least(number, DEADLINE_S)
            mine = [r for r in view.ranges if r.primary == primary.session.node_id]
            assert {r.backups for r in mine} == {(backup.session.node_id,)}
            backup_requests = [
                BackupRequest(r.range_id, r.assignment_epoch, frozenset()) for r in mine
            ]
            first, *rest = backup_requests
            assert await primary.set_backups([first], DEADLINE_S) == []
            assert await primary.set_backups([first, *rest], DEADLINE_S) == [first.range_id]
            await primary.view_where(
                lambda v: all(not v.ranges[w.range_id].backups for w in backup_requests),
                "the ranges without backups",
                DEADLINE_S,
            )
            itself = replace(first, backups=frozenset({primary.session.node_id}))
            with pytest.raises(InvalidConfig, match="never its own backup"):
                await primary.set_backups([itself], DEADLINE_S)
            with pytest.raises(NotPermitted, match="SetBackups is for servers"):
                await worker.set_backups([first], DEADLINE_S)

    run(main())


def test_a_farewell_brings_the_last_progress_and_ends_the_membership() -> None:
    async def main() -> None:
        async with opened() as (_, address), linked(address, register=SERVER) as observer:
            progress = scheduler_pb2.NodeProgress(step_count=0)
            async with linked(address) as link:
                link.progress = lambda: progress
                progress.step_count = 41
                assert await link.deregister("done")
                node_id = link.session.node_id
                await observer.view_where(
                    lambda view: has_left(view, node_id), "the farewell", DEADLINE_S
                )
            async with channels.aio_channel(address) as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                session = await operator_session(stub, DEADLINE_S)
                request = scheduler_pb2.GetClusterStatusRequest(session=session)
                answer = await stub.GetClusterStatus(request, timeout=DEADLINE_S)
            steps = {node.node.node_id: node.progress.step_count for node in answer.nodes}
            assert steps[node_id] == 41

    run(main())


def has_left(view: ClusterView, node_id: NodeId) -> bool:
    return view.nodes_by_id[node_id].state is NodeState.LEFT


def test_a_farewell_that_nobody_hears_ends_in_time() -> None:
    async def main() -> None:
        async with opened() as (scheduler, address), linked(address) as link:
            await link.view_at_least(1, DEADLINE_S)
            await scheduler.close()
            assert not await link.deregister("done", deadline_s=0.3)

    run(main())


def fail(view: ClusterView) -> None:
    raise KeyError(view.view_number)


def test_a_callback_that_fails_ends_the_link_instead_of_silencing_it() -> None:
    async def main() -> None:
        async with opened() as (_, address), linked(address) as link:
            await link.view_at_least(1, DEADLINE_S)
            link.on_view.append(fail)
            async with linked(address, register=SERVER):
                await asyncio.wait_for(link.fenced.wait(), DEADLINE_S)
            assert isinstance(link.fenced_by, Internal)
            with pytest.raises(Internal, match="KeyError"):
                await link.view_at_least(99, DEADLINE_S)

    run(main())


def test_close_ends_the_waits_and_comes_twice() -> None:
    async def main() -> None:
        async with opened() as (_, address), linked(address) as link:
            await link.view_at_least(1, DEADLINE_S)
            waiting = asyncio.create_task(link.view_at_least(99, DEADLINE_S))
            await link.close()
            with pytest.raises(Fenced, match="closed"):
                await waiting
            await link.close()

    run(main())


def test_a_scheduler_that_is_away_is_tried_again_well_within_a_lease() -> None:
    """One that is started again takes for silent whom it did not hear for a lease."""

    async def main() -> None:
        came_s: list[float] = []
        enough = asyncio.Event()

        def came(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came_s.append(clock.now_s())
            writer.close()
            if len(came_s) == 8:
                enough.set()

        async with await asyncio.start_server(came, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            addresses = Addresses([f"127.0.0.1:{port}"])
            request = scheduler_pb2.GetJoinChallengeRequest()
            asking = addresses.stub().GetJoinChallenge(request, wait_for_ready=True)
            await asyncio.wait_for(enough.wait(), DEADLINE_S)
            asking.cancel()
            await addresses.close()
        waits_s = [later - before for before, later in itertools.pairwise(came_s)]
        assert min(waits_s[-2:]) < 2 * limits.SCHEDULER_RECONNECT_S, waits_s

    run(main())
