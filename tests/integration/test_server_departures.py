"""The reasons that a server gives when it leaves with values that no other server has (S8)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ps_core.errors import InvalidCheckpoint
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_runtime.grpc.errors import translated
from ps_runtime.observe.metrics import SchedulerMetrics, new_registry
from ps_runtime.system.clock import now_s
from ps_server.service.scheduler_requests import until_kept
from scheduler.edge.servicer import SchedulerServicer
from scheduler.machine.cluster import Decision
from tests.integration.test_runtime_scheduler_link import (
    DEADLINE_S,
    SERVER,
    SETTINGS,
    SPEC,
    Scheduler,
    linked,
    run,
    served,
)
from tests.joining import SECRET

EVENT = "event=leaves_with_the_only_copy"
FULL = "checkpoint 7 was not made: No space left on device"


class HeldFarewells(SchedulerServicer):
    """Its answers to farewells wait until somebody says so."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.answers = asyncio.Event()

    async def DeregisterNode(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        answer = await super().DeregisterNode(request, context)
        await self.answers.wait()
        return answer


class FullPlace(SchedulerServicer):
    """A checkpoint is to be made before a server leaves, and none can be."""

    @translated
    async def DeregisterNode(self, *_: Any) -> Any:  # noqa: N802 - gRPC's name
        raise InvalidCheckpoint(FULL)


def scheduler_of(kind: type[SchedulerServicer], lease_s: float = 2.0) -> Scheduler:
    scheduler = Scheduler(replace(SETTINGS, lease_s=lease_s))
    metrics = SchedulerMetrics(new_registry())
    scheduler.servicer = kind(Decision(scheduler.cluster), metrics, SECRET.encode())
    return scheduler


async def with_values(link: SchedulerLink, address: str) -> None:
    """Create a table, which the server of this link holds alone."""
    async with linked(address) as worker:
        _, view_number = await worker.create_table(SPEC, DEADLINE_S)
    await link.view_at_least(view_number, DEADLINE_S)


def test_a_view_after_the_departure_is_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    """It says that the server's own ranges are lost; a checkpoint has them."""
    scheduler = scheduler_of(HeldFarewells)
    held = scheduler.servicer
    assert isinstance(held, HeldFarewells)

    async def main() -> None:
        async with served(scheduler) as address, linked(address, register=SERVER) as link:
            await with_values(link, address)
            link.checkpoint_url = "somewhere"
            leaving = asyncio.create_task(until_kept(link, now_s() + DEADLINE_S, has_log=False))
            await link.view_where(lambda view: bool(view.lost_ranges), "a loss", DEADLINE_S)
            held.answers.set()
            await leaving

    with caplog.at_level("INFO", "pushpull"):
        run(main())
    assert "event=deregistered" in caplog.text
    assert EVENT not in caplog.text


def test_the_last_answer_of_the_scheduler_is_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """It had answered each time, and the line said: no answer."""
    scheduler = scheduler_of(FullPlace)

    async def main() -> None:
        async with served(scheduler) as address, linked(address, register=SERVER) as link:
            await with_values(link, address)
            await until_kept(link, now_s() + 0.3, has_log=False)

    with caplog.at_level("INFO", "pushpull"):
        run(main())
    (line,) = (line for line in caplog.messages if EVENT in line)
    assert FULL in line


@pytest.mark.parametrize("has_log", [False, True])
def test_without_a_scheduler_it_says_what_is_lost(
    caplog: pytest.LogCaptureFixture, *, has_log: bool
) -> None:
    scheduler = scheduler_of(SchedulerServicer, lease_s=0.2)

    async def main() -> None:
        async with served(scheduler) as address, linked(address, register=SERVER) as link:
            await with_values(link, address)
            await scheduler.close()
            await until_kept(link, now_s() + DEADLINE_S, has_log=has_log)

    with caplog.at_level("INFO", "pushpull"):
        run(main())
    assert "event=leaves_unheard" in caplog.text
    (line,) = (line for line in caplog.messages if EVENT in line)
    assert "the scheduler has not answered for" in line
    assert ("its update log alone has them" in line) is has_log
