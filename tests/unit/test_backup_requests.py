"""What a server says of its wishes for backups while the scheduler is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from ps_core.cluster_view import BackupRequest
from ps_core.errors import WaitExpired
from ps_core.keys import AssignmentEpoch, NodeId, RangeId
from ps_server.service.scheduler_requests import BackupRequests

WISHES = [BackupRequest(RangeId(0), AssignmentEpoch(2), frozenset({NodeId(2)}))]


def test_a_scheduler_that_is_away_is_one_line_and_its_return_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = [False, False, False, True, True, False]
    is_away = iter([not answer for answer in answers])

    async def ask(_: Sequence[BackupRequest]) -> None:
        if next(is_away):
            raise WaitExpired("scheduler 127.0.0.1:7070 last heard 9 s ago")

    async def stand_often() -> None:
        backup_requests = BackupRequests(ask)
        for _ in answers:
            backup_requests.request(WISHES)
            assert backup_requests._asking is not None
            await backup_requests._asking

    with caplog.at_level(logging.INFO, "pushpull"):
        asyncio.run(stand_often())
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert events == [
        "event=backup_request_unheard",
        "event=backup_request_heard",
        "event=backup_request_unheard",
    ], caplog.text
