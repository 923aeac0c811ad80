"""A role that a test starts is a fork; whoever watches it finds what a new interpreter would be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, RoleProcess, start_scheduler, start_server
from tests.integration.command_line import command_of

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0


def _started(launcher: Launcher, shape: ClusterShape) -> list[RoleProcess]:
    scheduler = start_scheduler(launcher, shape)
    launcher.wait_ready(start_server(launcher, shape, scheduler.address, 0), DEADLINE_S)
    return list(launcher.processes)


def test_a_fork_is_a_child_and_leads_its_group() -> None:
    with Launcher() as launcher:
        shape = ClusterShape(1, 1, environment={"PUSHPULL_LOG_LEVEL": "debug"})
        roles = _started(launcher, shape)
        for role in roles:
            assert " -m " not in command_of(role.pid), "it is no fork"
            stat = Path(f"/proc/{role.pid}/stat").read_text().rpartition(")")[2].split()
            assert [int(n) for n in stat[1:3]] == [os.getpid(), role.pid]
            opened = {os.readlink(f"/proc/{role.pid}/fd/{number}") for number in (0, 1, 2)}  # noqa: PTH115
            assert len(opened) == 2, opened
            assert os.devnull in opened
        roles[1].send(signal.SIGKILL)
        ended = roles[1].wait(DEADLINE_S)
        assert ended is not None
        assert ended.how == "signal 9 (SIGKILL)"
        assert any("event=serving" in line for line in roles[0].recent_lines)


@pytest.mark.thorough
def test_what_is_set_before_an_import_needs_a_new_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    with Launcher() as launcher:
        roles = _started(launcher, ClusterShape(1, 1))
        for role in roles:
            assert " -m " in command_of(role.pid)
            given = Path(f"/proc/{role.pid}/environ").read_bytes().split(b"\0")
            assert b"TORCH_SHOW_CPP_STACKTRACES=1" in given
