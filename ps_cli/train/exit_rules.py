"""Rules for the end of a role: the run ends, goes on, or starts the role again.

    worker, finished               -> the run ends well if all have finished; else it goes on
    worker that died               -> started again while restarts are left; else the run ends
    worker that lost another one   -> likewise; all that end with it are one restart together
    worker that was refused        -> the run ends
    server that died, with backups -> started again while restarts are left; the run goes on anyway
    server that died, with a log   -> started again while restarts are left; else the run ends
    server that died, without      -> the run ends: nothing can bring its values back
    scheduler that died            -> started again, with its journal, while it has restarts left
    scheduler that never served    -> the run ends

Rules:
    - Values are lost when a server that had served dies and ranges have one replica and no update
      log, or when no server is left that serves: a restart would train on from nothing.
    - A server that never served has lost nothing. If it cannot be started again, the cluster never
      has its number of servers, and the run ends.
    - Pushes and pulls need no scheduler: its restarts cost nothing and have a count of their own.
    - A role that was refused (a setting, the join secret) is not started again: it would be refused
      again.
    - A role that dies soon after its start is started again later each time: at once, after 1 s,
      2 s, 4 s ... up to `MAX_PAUSE_S`, because the cause may last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ps_cli.console.options import LOGGED_RESTARTS
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import RoleExit, describe_exit
from ps_runtime.system.process_end import REFUSED_EXIT_CODE, WORKER_LOST_EXIT_CODE

FAILURE_EXIT_CODE = 1

SCHEDULER_RESTARTS = 20
"""Restarts of a scheduler. It loses nothing by them; the limit ends a run where it always dies."""

STEADY_S = 60.0
"""A role that ran this long did not die of its start."""

MAX_PAUSE_S = 30.0

_CANNOT_GO_ON = "and the run cannot go on"


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The run ends with the tool's exit code; `message` is the reason, for a person."""

    exit_code: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class GoOn:
    """The run goes on; `message` is for a person, empty if there is nothing to tell."""

    message: str = ""


@dataclass(frozen=True, slots=True)
class RestartRole:
    """The role is started again after a pause, and the run goes on."""

    message: str
    after_s: float = 0.0


Verdict = RunEnd | GoOn | RestartRole
"""The consequence of a role's end."""


class ExitRules:
    """The rules of one run. `max_restarts` counts workers and servers together; None is
    `LOGGED_RESTARTS` of servers with an update log, and no other.
    """

    def __init__(self, shape: ClusterShape, max_restarts: int | None = None) -> None:
        self._worker_count = shape.worker_count
        self._replica_count = shape.replica_count
        self._has_update_log = bool(shape.update_log.path)
        self._max_restarts = max_restarts or 0
        self._max_server_restarts = self._max_restarts
        if max_restarts is None and self._has_update_log:
            self._max_server_restarts = LOGGED_RESTARTS
        self._quick_ends: Counter[str] = Counter()
        self._followers: set[str] = set()  # may end because a worker that was counted did
        self._is_cause_due = False  # the worker that those which ended have lost is still to end
        self._restart_count = 0
        self._scheduler_count = 0
        self._finished_count = 0
        self._served: set[str] = set()

    def judge(self, role_exit: RoleExit, serving_count: int) -> Verdict:
        """Decide what follows from an end that nobody asked for; `serving_count` servers serve."""
        kind = role_exit.command.kind
        if kind == "worker":
            return self._of_worker(role_exit)
        has_served = role_exit.was_ready or role_exit.command.name in self._served
        if has_served:
            self._served.add(role_exit.command.name)
        is_refused = role_exit.returncode == REFUSED_EXIT_CODE
        if kind == "server":
            return self._of_server(role_exit, serving_count, has_served, is_refused)
        if not has_served or is_refused or self._scheduler_count == SCHEDULER_RESTARTS:
            return self._the_end(role_exit, _CANNOT_GO_ON)
        self._scheduler_count += 1
        of = f"restart {self._scheduler_count} of {SCHEDULER_RESTARTS}"
        return self._again(role_exit, "it goes on from its journal, and", of)

    def _of_worker(self, role_exit: RoleExit) -> Verdict:
        if role_exit.returncode == 0:
            self._finished_count += 1
            return RunEnd(0) if self._finished_count == self._worker_count else GoOn()
        consequence = ", and takes its rank over"
        is_refused = role_exit.returncode == REFUSED_EXIT_CODE
        if not is_refused and self._was_counted(role_exit):
            of = f"part of restart {self._restart_count} of {self._max_restarts}"
            return self._again(role_exit, "it", of, consequence)
        if not is_refused and self._restart_count < self._max_restarts:
            workers = {f"worker {index}" for index in range(self._worker_count)}
            self._followers = workers - {role_exit.command.name}
            self._is_cause_due = role_exit.returncode == WORKER_LOST_EXIT_CODE
            return self._restart(role_exit, "it", consequence)
        return self._the_end(role_exit, _CANNOT_GO_ON)

    def _was_counted(self, role_exit: RoleExit) -> bool:
        """True if the worker ends together with one whose restart was counted: because it lost that
        one, or because that one lost it, whose own end came to light first.
        """
        name = role_exit.command.name
        has_lost = role_exit.returncode == WORKER_LOST_EXIT_CODE
        if name not in self._followers or not (has_lost or self._is_cause_due):
            return False
        self._followers.discard(name)
        if not has_lost:
            self._is_cause_due = False
        return True

    def _of_server(
        self, role_exit: RoleExit, serving_count: int, has_served: bool, is_refused: bool
    ) -> Verdict:
        if has_served and not self._has_update_log:
            lost = ""
            if role_exit.was_ready and self._replica_count == 1:
                lost = "its values are lost: no other server had a copy (--replicas 2 keeps one)"
            elif not serving_count:
                lost = "no server is left that serves, and the values are lost"
            if lost:
                return self._the_end(role_exit, f"{_CANNOT_GO_ON}: {lost}")
        if not is_refused and self._restart_count < self._max_server_restarts:
            who = self._who_goes_on(role_exit) if has_served else "it"
            return self._restart(role_exit, who)
        if not has_served:
            return self._the_end(role_exit, "before it served")
        if self._has_update_log and (self._replica_count == 1 or not serving_count):
            return self._the_end(role_exit, f"{_CANNOT_GO_ON}: its values are in its update log")
        if not role_exit.was_ready:
            return GoOn(f"{_fate(role_exit, ' before it served again')}; the others go on")
        return GoOn(f"{_fate(role_exit)}; its ranges go on at their backups")

    def _who_goes_on(self, role_exit: RoleExit) -> str:
        if self._has_update_log:
            return "it goes on from its update log, and"
        return "its ranges go on at their backups, and it" if role_exit.was_ready else "it"

    def _restart(self, role_exit: RoleExit, who: str, consequence: str = "") -> RestartRole:
        self._restart_count += 1
        is_server = role_exit.command.kind == "server"
        most = self._max_server_restarts if is_server else self._max_restarts
        return self._again(role_exit, who, f"restart {self._restart_count} of {most}", consequence)

    def _again(
        self, role_exit: RoleExit, who: str, count_words: str, consequence: str = ""
    ) -> RestartRole:
        name = role_exit.command.name
        if role_exit.ran_s >= STEADY_S:
            self._quick_ends[name] = 0
        quick_count = self._quick_ends[name]
        self._quick_ends[name] += 1
        after_s = min(2.0 ** (quick_count - 1), MAX_PAUSE_S) if quick_count else 0.0
        later = f" in {after_s:g} s" if after_s else ""
        told = f"{_fate(role_exit)}; {who} is started again{later} ({count_words}){consequence}"
        return RestartRole(told, after_s)

    def _the_end(self, role_exit: RoleExit, when: str) -> RunEnd:
        if self._restart_count:
            when = f"after {self._restart_count} restarts (see --max-restarts) {when}"
        return RunEnd(FAILURE_EXIT_CODE, describe_exit(role_exit, when))


def _fate(role_exit: RoleExit, when: str = "") -> str:
    """The role's name, how it ended, and its reason if it gave one."""
    command = role_exit.command
    where = f" ({role_exit.address})" if role_exit.address and command.kind == "server" else ""
    why = f" ({role_exit.reason})" if role_exit.reason else ""
    return f"{command.name}{where} {role_exit.fate}{when}{why}"
