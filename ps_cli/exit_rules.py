"""What the end of a role means for a run: that it ends, goes on, or starts the role again.

    worker, finished               -> all have: the run ends well; else it goes on
    worker that died               -> started again while restarts are left; else the end
    server that died, with backups -> started again while restarts are left; it goes on in any case
    server that died, with a log   -> started again, however often, if it had served
    server that died, without      -> the end: nothing can bring its values back
    scheduler                      -> the end

Rules:
    - Values are lost when a server that had served dies where ranges have one replica and no update
      log, or when none that serves is left: then a restart would train on from nothing, and is not
      made.
    - A server that never served has lost nothing; if it cannot be started again, the cluster that
      was asked for does not come to be, and the run ends.

What it deliberately does not do: start or stop anything (the supervisor does).
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_runtime.launcher import RoleExit, describe_exit

FAILURE_EXIT_CODE = 1

_CANNOT_GO_ON = "and the run cannot go on"


@dataclass(frozen=True, slots=True)
class Ending:
    """The run ends: with the tool's exit code, and why, for a person."""

    exit_code: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class GoOn:
    """The run goes on; `message` is for a person, empty if there is nothing to tell."""

    message: str = ""


@dataclass(frozen=True, slots=True)
class StartAgain:
    """The role is started again, and the run goes on."""

    message: str


Meaning = Ending | GoOn | StartAgain
"""What follows from the end of a role."""


class ExitRules:
    """The rules of one run.

    Args:
        worker_count: the workers that it starts; when all have finished it ends well.
        replica_count: servers that hold each range.
        max_restarts: how many dead roles may be started again, all in all.
        has_update_log: whether a server that is started again has what it had.
    """

    def __init__(
        self,
        worker_count: int,
        replica_count: int = 1,
        max_restarts: int = 0,
        *,
        has_update_log: bool = False,
    ) -> None:
        self._worker_count = worker_count
        self._replica_count = replica_count
        self._max_restarts = max_restarts
        self._has_update_log = has_update_log
        self._restart_count = 0
        self._finished_count = 0
        self._served: set[str] = set()

    def judge(self, role_exit: RoleExit, serving_count: int) -> Meaning:
        """What the end of a role that nobody asked to end means.

        Args:
            role_exit: which, and how.
            serving_count: the servers that serve now.
        """
        kind = role_exit.command.kind
        if kind == "worker":
            return self._of_worker(role_exit)
        if kind == "server":
            return self._of_server(role_exit, serving_count)
        return self._the_end(role_exit, _CANNOT_GO_ON)

    def _of_worker(self, role_exit: RoleExit) -> Meaning:
        if role_exit.returncode == 0:
            self._finished_count += 1
            return Ending(0) if self._finished_count == self._worker_count else GoOn()
        if self._may_restart():
            consequence = "and has its rank when the scheduler has declared the old one gone"
            return self._restart(role_exit, "it", consequence)
        return self._the_end(role_exit, _CANNOT_GO_ON)

    def _of_server(self, role_exit: RoleExit, serving_count: int) -> Meaning:
        name = role_exit.command.name
        was_part = role_exit.was_ready or name in self._served
        if role_exit.was_ready:
            self._served.add(name)
            if self._has_update_log:  # who dies before it served again is judged as without one
                return StartAgain(f"{name} {role_exit.fate}; it goes on from its update log")
            if self._replica_count == 1:
                lost = "its values are lost, which no other server had (--replicas 2 keeps copies)"
                return self._the_end(role_exit, f"{_CANNOT_GO_ON}: {lost}")
        if was_part and not serving_count:
            lost = "no server is left that serves, and the values are lost"
            return self._the_end(role_exit, f"{_CANNOT_GO_ON}: {lost}")
        if self._may_restart():
            backups = "its ranges go on at their backups, and it" if role_exit.was_ready else "it"
            return self._restart(role_exit, backups, "")
        if not was_part:
            return self._the_end(role_exit, "before it served")
        if not role_exit.was_ready:
            return GoOn(f"{name} {role_exit.fate} before it served again; the others go on")
        return GoOn(f"{name} {role_exit.fate}; its ranges go on at their backups")

    def _may_restart(self) -> bool:
        return self._restart_count < self._max_restarts

    def _restart(self, role_exit: RoleExit, who: str, consequence: str) -> StartAgain:
        self._restart_count += 1
        restarts = f"(restart {self._restart_count} of {self._max_restarts})"
        told = f"{role_exit.command.name} {role_exit.fate}; {who} is started again {restarts}"
        return StartAgain(f"{told}, {consequence}" if consequence else told)

    def _the_end(self, role_exit: RoleExit, when: str) -> Ending:
        if self._max_restarts and not self._may_restart():
            when = f"after {self._max_restarts} restarts, {when}"
        return Ending(FAILURE_EXIT_CODE, describe_exit(role_exit, when))
