"""What the scheduler leaves of a checkpoint that came to nothing: no file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ps_runtime.metrics import SchedulerMetrics
from scheduler.checkpoint_state import CheckpointBegunAgain, CheckpointFailed, CheckpointMade
from scheduler.checkpointing import Checkpointing, CheckpointPolicy
from tests.unit.cluster_harness import Harness

LATE = "server-1-1.safetensors"


async def removals() -> None:
    """All that was begun has ended."""
    own = asyncio.current_task()
    await asyncio.wait([task for task in asyncio.all_tasks() if task is not own])


@pytest.mark.parametrize("is_begun_again", [False, True])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_is_written_late_into_its_directory_goes_too(
    tmp_path: Path, is_begun_again: bool, is_stopped: bool
) -> None:
    """A server that has not heard that it was given up makes its file after it was removed."""
    given_up = tmp_path / "00000001-c"
    came_to: Any = (
        CheckpointBegunAgain(1, str(given_up), 2)
        if is_begun_again
        else CheckpointFailed(1, str(given_up), "a server was lost while it was made")
    )

    async def live() -> None:
        checkpointing = Checkpointing(
            Harness(checkpoint_url=str(tmp_path)).cluster,
            CheckpointPolicy(),
            lambda decision: decision.reply,
            SchedulerMetrics(CollectorRegistry()),
        )
        given_up.mkdir()
        checkpointing.published(came_to, 0.0)
        await removals()
        given_up.mkdir()
        (given_up / LATE).write_bytes(b"late")
        if is_stopped:
            await checkpointing.close()
        else:
            checkpointing.published(CheckpointMade(2, f"{tmp_path}/00000002-c"), 1.0)
            await removals()
        assert not given_up.exists()

    asyncio.run(live())
