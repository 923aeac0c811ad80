"""What the end of a role means for a run of the command line."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ps_cli.console.options import LOGGED_RESTARTS
from ps_cli.train.exit_rules import (
    SCHEDULER_RESTARTS,
    STEADY_S,
    ExitRules,
    GoOn,
    RestartRole,
    RunEnd,
    Verdict,
)
from ps_runtime.launch.cluster_shape import NO_UPDATE_LOG, ClusterShape, UpdateLogPlan
from ps_runtime.launch.launcher import RoleCommand, RoleExit

KILLED = -9
ADDRESS = "127.0.0.1:7070"


def ended(kind: str, index: int | None, returncode: int, *, was_ready: bool = True) -> RoleExit:
    command = RoleCommand(kind, index, f"module_of_{kind}")
    address = ADDRESS if was_ready else ""
    return RoleExit(command, returncode, False, ("its last line",), address)


def server(index: int = 1, returncode: int = KILLED, *, was_ready: bool = True) -> RoleExit:
    return ended("server", index, returncode, was_ready=was_ready)


def worker(index: int = 0, returncode: int = KILLED) -> RoleExit:
    return ended("worker", index, returncode)


def scheduler(returncode: int = KILLED, *, was_ready: bool = True) -> RoleExit:
    return ended("scheduler", None, returncode, was_ready=was_ready)


def rules_of(
    worker_count: int,
    replica_count: int = 1,
    max_restarts: int | None = None,
    *,
    has_update_log: bool = False,
) -> ExitRules:
    log = UpdateLogPlan("logs") if has_update_log else NO_UPDATE_LOG
    shape = ClusterShape(3, worker_count, replica_count=replica_count, update_log=log)
    return ExitRules(shape, max_restarts)


def judged(rules: ExitRules, ran_s: float = 1.0) -> Verdict:
    """What the end of a server with a log means that had served, and ran for so long."""
    return rules.judge(replace(server(), ran_s=ran_s), 0)


def message_of(verdict: Verdict) -> str:
    return verdict.message


def test_the_run_ends_well_when_all_workers_have_finished() -> None:
    rules = rules_of(worker_count=2)
    assert rules.judge(worker(1, 0), 1) == GoOn()
    assert rules.judge(worker(0, 0), 1) == RunEnd(0)


@pytest.mark.parametrize("who", [worker(), server(), scheduler(was_ready=False)])
def test_a_dead_role_ends_the_run_with_its_last_lines(who: RoleExit) -> None:
    verdict = rules_of(worker_count=2).judge(who, 1)
    assert isinstance(verdict, RunEnd)
    assert verdict.exit_code == 1
    head, last = verdict.message.split("\n")
    name = who.command.name
    assert head.startswith(f"{name} ended with signal 9 (SIGKILL) and the run cannot go on")
    assert last == f"  [{name}] its last line"


def test_a_dead_scheduler_is_started_again_and_costs_nobody_a_restart() -> None:
    rules = rules_of(worker_count=2, replica_count=2, max_restarts=1)
    for number in range(1, SCHEDULER_RESTARTS + 1):
        again = rules.judge(replace(scheduler(), ran_s=STEADY_S), 2)
        assert again == RestartRole(
            "scheduler was killed by SIGKILL; it goes on from its journal, and is started again "
            f"(restart {number} of {SCHEDULER_RESTARTS})"
        )
    assert isinstance(rules.judge(server(), 1), RestartRole)
    assert isinstance(rules.judge(scheduler(), 2), RunEnd)


def test_a_scheduler_that_dies_again_before_it_serves_is_started_again_later() -> None:
    rules = rules_of(worker_count=2)
    assert isinstance(rules.judge(scheduler(), 2), RestartRole)
    again = rules.judge(scheduler(returncode=1, was_ready=False), 2)
    assert isinstance(again, RestartRole)
    assert again.after_s == 1.0
    refused = rules.judge(scheduler(returncode=2, was_ready=False), 2)
    assert isinstance(refused, RunEnd)


def test_a_dead_server_without_replicas_ends_the_run_whatever_restarts_are_left() -> None:
    verdict = rules_of(worker_count=2, max_restarts=5).judge(server(), 3)
    assert isinstance(verdict, RunEnd)
    assert "the run cannot go on: its values are lost" in verdict.message


def test_a_dead_server_with_replicas_is_told_in_a_line_and_the_run_goes_on() -> None:
    rules = rules_of(worker_count=2, replica_count=2)
    assert rules.judge(server(1), 2) == GoOn(
        f"server 1 ({ADDRESS}) was killed by SIGKILL; its ranges go on at their backups"
    )
    assert rules.judge(server(2, 1), 1) == GoOn(
        f"server 2 ({ADDRESS}) ended with exit code 1; its ranges go on at their backups"
    )
    last = rules.judge(server(0), 0)
    assert isinstance(last, RunEnd)
    assert "no server is left that serves, and the values are lost" in last.message


def test_a_server_with_an_update_log_is_started_again_so_often_and_later_each_time() -> None:
    rules = rules_of(worker_count=2, has_update_log=True)
    first = rules.judge(server(), 0)
    assert first == RestartRole(
        f"server 1 ({ADDRESS}) was killed by SIGKILL; it goes on from its update log, and "
        "is started again (restart 1 of 5)"
    )
    pauses = []
    for _ in range(LOGGED_RESTARTS - 1):
        again = rules.judge(server(was_ready=False), 0)
        assert isinstance(again, RestartRole)
        pauses.append(again.after_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    last = rules.judge(server(returncode=1), 0)
    assert isinstance(last, RunEnd)
    assert "server 1 ended with exit code 1 after 5 restarts" in last.message
    assert "and the run cannot go on: its values are in its update log" in last.message


def test_with_backups_one_that_cannot_come_back_from_its_log_leaves_the_others_alone() -> None:
    rules = rules_of(worker_count=2, replica_count=2, max_restarts=0, has_update_log=True)
    assert isinstance(rules.judge(server(), 1), GoOn)
    assert isinstance(rules.judge(server(2), 0), RunEnd)


def test_a_pause_has_a_bound_and_ends_with_a_role_that_ran_for_long() -> None:
    rules = rules_of(worker_count=2, max_restarts=20, has_update_log=True)
    pauses = [again.after_s for _ in range(9) if isinstance(again := judged(rules), RestartRole)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    steady = judged(rules, ran_s=STEADY_S)
    assert isinstance(steady, RestartRole)
    assert steady.after_s == 0.0
    assert " in " not in steady.message.split("started again")[1]


def test_what_was_refused_is_not_tried_again() -> None:
    rules = rules_of(worker_count=2, max_restarts=5, has_update_log=True)
    verdict = rules.judge(server(returncode=2, was_ready=False), 0)
    assert isinstance(verdict, RunEnd)
    assert verdict.message.startswith("server 1 ended with exit code 2 before it served")


def test_the_reason_is_told_with_each_restart_and_at_the_end() -> None:
    why = '2026-01-31T12:00:00.123Z error server event=failed error=X message="the disk is full"'
    rules = rules_of(worker_count=2, max_restarts=1, has_update_log=True)
    full = replace(server(returncode=1), recent_lines=(why, "and a last line"))
    assert rules.judge(full, 0) == RestartRole(
        f"server 1 ({ADDRESS}) ended with exit code 1 (the disk is full); it goes on from its "
        "update log, and is started again (restart 1 of 1)"
    )
    assert message_of(rules.judge(full, 0)).endswith("; it said: the disk is full")
    killed = replace(full, returncode=KILLED)
    assert "the disk is full" not in message_of(rules_of(2).judge(killed, 1)).splitlines()[0]


def test_the_last_server_is_not_started_again_on_nothing() -> None:
    rules = rules_of(worker_count=2, replica_count=2, max_restarts=5)
    assert isinstance(rules.judge(server(), 0), RunEnd)


def test_dead_roles_are_started_again_as_often_as_may_be_all_in_all() -> None:
    rules = rules_of(worker_count=2, replica_count=2, max_restarts=2)
    first, second = rules.judge(server(1), 1), rules.judge(worker(0, 3), 2)
    assert first == RestartRole(
        f"server 1 ({ADDRESS}) was killed by SIGKILL; its ranges go on at their backups, and "
        "it is started again (restart 1 of 2)"
    )
    assert second == RestartRole(
        "worker 0 ended with exit code 3; it is started again (restart 2 of 2), and takes its rank "
        "over"
    )
    assert isinstance(rules.judge(server(1), 1), GoOn)
    third = rules.judge(worker(1), 2)
    assert isinstance(third, RunEnd)
    assert "after 2 restarts (see --max-restarts) and the run cannot go on" in third.message


def test_a_worker_that_was_started_again_and_finishes_counts_once() -> None:
    rules = rules_of(worker_count=2, max_restarts=1)
    assert isinstance(rules.judge(worker(0), 1), RestartRole)
    assert rules.judge(worker(0, 0), 1) == GoOn()
    assert rules.judge(worker(1, 0), 1) == RunEnd(0)


LOST = 75
"""The exit code of a worker that has lost another one."""


def counts_of(rules: ExitRules, *ends: RoleExit) -> list[str]:
    """What is said of each restart's count."""
    messages = [message_of(rules.judge(end, 1)) for end in ends]
    return [re.findall(r"\(((?:part of )?restart \d of \d)\)", said)[0] for said in messages]


def test_workers_that_end_because_one_has_are_one_restart_together() -> None:
    rules = rules_of(worker_count=3, max_restarts=2)
    first = counts_of(rules, worker(1), worker(0, LOST), worker(2, LOST))
    assert first == ["restart 1 of 2", "part of restart 1 of 2", "part of restart 1 of 2"]
    second = counts_of(rules, worker(0), worker(2, LOST), worker(1, LOST))
    assert second == ["restart 2 of 2", "part of restart 2 of 2", "part of restart 2 of 2"]
    assert isinstance(rules.judge(worker(2), 1), RunEnd)


def test_the_one_that_the_others_have_lost_may_end_after_them() -> None:
    rules = rules_of(worker_count=3, max_restarts=2)
    assert counts_of(rules, worker(0, LOST), worker(1, 1), worker(2, LOST)) == [
        "restart 1 of 2", "part of restart 1 of 2", "part of restart 1 of 2",
    ]  # fmt: skip
    assert counts_of(rules, worker(1, 1)) == ["restart 2 of 2"]
    assert isinstance(rules.judge(worker(0), 1), RunEnd)


def test_a_worker_that_loses_others_again_and_again_is_counted() -> None:
    rules = rules_of(worker_count=2, max_restarts=3)
    assert counts_of(rules, worker(1), worker(0, LOST), worker(0, LOST), worker(0, LOST)) == [
        "restart 1 of 3", "part of restart 1 of 3", "restart 2 of 3", "restart 3 of 3",
    ]  # fmt: skip
    assert isinstance(rules.judge(worker(0, LOST), 1), RunEnd)


def test_a_worker_that_was_refused_is_not_started_again() -> None:
    rules = rules_of(worker_count=2, max_restarts=3)
    assert counts_of(rules, worker(1), worker(0, LOST)) == [
        "restart 1 of 3",
        "part of restart 1 of 3",
    ]
    refused = rules.judge(worker(1, 2), 1)
    assert isinstance(refused, RunEnd)
    assert "worker 1 ended with exit code 2 after 1 restarts" in refused.message


@pytest.mark.parametrize("replica_count", [1, 2])
def test_a_server_that_never_served_is_a_cluster_that_did_not_come_to_be(
    replica_count: int,
) -> None:
    rules = rules_of(worker_count=2, replica_count=replica_count)
    verdict = rules.judge(server(returncode=1, was_ready=False), 1)
    assert isinstance(verdict, RunEnd)
    assert verdict.message.startswith("server 1 ended with exit code 1 before it served")
    patient = rules_of(worker_count=2, replica_count=replica_count, max_restarts=1)
    again = patient.judge(server(returncode=1, was_ready=False), 0)
    assert isinstance(again, RestartRole)
    assert again.message.endswith("exit code 1; it is started again (restart 1 of 1)")
    assert isinstance(patient.judge(server(returncode=1, was_ready=False), 1), RunEnd)


def test_one_that_cannot_come_back_leaves_the_others_alone() -> None:
    rules = rules_of(worker_count=2, replica_count=2, max_restarts=1)
    assert isinstance(rules.judge(server(), 2), RestartRole)
    assert rules.judge(server(returncode=1, was_ready=False), 2) == GoOn(
        "server 1 ended with exit code 1 before it served again; the others go on"
    )
    assert isinstance(rules.judge(server(returncode=1, was_ready=False), 0), RunEnd)


def test_a_cluster_without_workers_of_its_own_goes_on_too() -> None:
    rules = rules_of(worker_count=1, replica_count=2)
    assert "go on at their backups" in message_of(rules.judge(server(), 1))
    assert isinstance(rules.judge(scheduler(2), 2), RunEnd)
