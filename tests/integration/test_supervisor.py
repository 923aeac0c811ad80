"""What becomes of a run's roles that die while its last checkpoint is made."""

from __future__ import annotations

import asyncio
import io
import signal

import pytest

from ps_cli.console.output import Output
from ps_cli.console.scheduler_query import operator_link
from ps_cli.train.exit_rules import ExitRules, RunEnd
from ps_cli.train.supervisor import Supervisor
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import ReadyRole, RoleCommand, RoleProcess, start_scheduler

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0


def test_a_scheduler_that_dies_while_the_last_checkpoint_is_made_is_started_again() -> None:
    """Its journal has all; the last checkpoint found no scheduler, and the values were lost."""
    printed = io.StringIO()

    async def scenario() -> RunEnd:
        supervisor = Supervisor(Output(printed), frozenset())
        shape = ClusterShape(1, 1, has_journal=True)
        started: list[ReadyRole] = []

        async def work() -> None:
            launcher = supervisor.launcher
            started.append(await asyncio.to_thread(start_scheduler, launcher, shape))
            worker = RoleCommand("worker", 0, "this")  # of the standard library: it ends well
            await asyncio.to_thread(launcher.start, worker)
            await asyncio.Event().wait()

        async def last(_: RunEnd) -> None:
            first: RoleProcess = supervisor.launcher.processes[0]
            first.send(signal.SIGKILL)
            assert await asyncio.to_thread(first.wait, DEADLINE_S) is not None
            async with operator_link(started[0].address, DEADLINE_S) as link:
                assert (await link.view_at_least(0, DEADLINE_S)).cluster_id

        ending = await supervisor.run(work(), ExitRules(shape), last)
        await supervisor.stop()
        return ending

    assert asyncio.run(asyncio.wait_for(scenario(), 2 * DEADLINE_S)).exit_code == 0
    assert "it goes on from its journal, and is started again" in printed.getvalue()
