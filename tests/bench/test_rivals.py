"""torch RPC's processes in a benchmark."""

from __future__ import annotations

import os

import pytest

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.contenders import Pair

pytestmark = pytest.mark.timeout(180)


def wait_until_paused(pair: Pair) -> None:
    for child in (pair.client, pair.server):
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)


def test_idle_processes_of_rows_take_no_time_from_others() -> None:
    """At its end the pair checks that each of several pushes at once has counted."""
    with contenders.torch_rows("tcp", 10_000) as pair:
        assert pair.is_restless
        wait_until_paused(pair)
        assert pair.do("push 4").result > 0
        wait_until_paused(pair)
