"""`pushpull runs end` and `remove`, whose scheduler dies before it answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from ps_cli.console.scheduler_query import SchedulerQuery
from ps_core.errors import Recovering
from ps_runtime.observe.metrics import SchedulerMetrics, new_registry
from scheduler.edge.servicer import SchedulerServicer
from scheduler.machine.cluster import Decision
from tests.integration.test_runtime_scheduler_link import Scheduler, run, served
from tests.joining import SECRET


class DiesBefore(SchedulerServicer):
    """It dies when it has the request, which may be done by then."""

    async def EndRun(self, _: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async def RemoveRun(self, _: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@pytest.mark.parametrize(
    ("verb", "what"), [(SchedulerQuery.end_run, "ended"), (SchedulerQuery.remove_run, "removed")]
)
def test_it_says_that_the_run_may_have_changed(
    verb: Callable[[SchedulerQuery, str], Awaitable[object]], what: str
) -> None:
    scheduler = Scheduler()
    given = Decision(scheduler.cluster), SchedulerMetrics(new_registry()), SECRET.encode()
    scheduler.servicer = DiesBefore(*given)

    async def main() -> None:
        async with served(scheduler) as address, SchedulerQuery(address) as query:
            words = f"Socket closed; run 'nightly' may be {what}: pushpull runs list says so"
            with pytest.raises(Recovering, match=words):
                await verb(query, "nightly")

    run(main())
