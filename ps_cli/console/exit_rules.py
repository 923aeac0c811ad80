"""What the end of a role means for a run: that it ends, goes on, or starts the role again.

    worker, finished               -> all have: the run ends well; else it goes on
    worker that died               -> started again while restarts are left; else the end
    server that died, with backups -> started again while restarts are left; it goes on in any case
    server that died, with a log   -> started again while restarts are left; it goes on from its log
    server that died, without      -> the end: nothing can bring its values back
    scheduler that died            -> started again, with its journal, while it has restarts left
    scheduler that never served    -> the end

Rules:
    - Values are lost when a server that had served dies where ranges have one replica and no update
      log, or when none that serves is left: then a restart would train on from nothing, and is not
      made.
    - A server that never served has lost nothing; if it cannot be started again, the cluster that
      was asked for does not come to be, and the run ends.
    - Who pushes and pulls needs no scheduler: its restarts are no one's loss, and counted by
      themselves.
    - What is refused (a setting, the join secret) is refused again: a role that ends so is not
      started again.
    - A role that dies soon after its start is started again later each time: at once, after 1 s,
      2 s, 4 s ... up to `MAX_PAUSE_S`. What ails it may last.

What it deliberately does not do: start or stop anything (the supervisor does).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ps_runtime.launch.launcher import RoleExit, describe_exit

FAILURE_EXIT_CODE = 1

REFUSED_EXIT_CODE = 2
"""With which a role ends that was refused, by the scheduler or for its settings."""

LOGGED_RESTARTS = 5
"""How often servers with an update log are started again, where nobody says how often."""

SCHEDULER_RESTARTS = 20
"""How often a scheduler is started again: it loses nothing, and one that dies all the time is told
from one that was killed."""

STEADY_S = 60.0
"""A role that ran for so long did not die of its start."""

MAX_PAUSE_S = 30.0

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
    """The role is started again after a pause, in seconds, and the run goes on."""

    message: str
    after_s: float = 0.0


Meaning = Ending | GoOn | StartAgain
"""What follows from the end of a role."""


class ExitRules:
    """The rules of one run.

    Args:
        worker_count: the workers that it starts; when all have finished it ends well.
        replica_count: servers that hold each range.
        max_restarts: how many dead roles may be started again, all in all; None: servers with an
            update log `LOGGED_RESTARTS` times, and nobody else.
        has_update_log: whether a server that is started again has what it had.
    """

    def __init__(
        self,
        worker_count: int,
        replica_count: int = 1,
        max_restarts: int | None = None,
        *,
        has_update_log: bool = False,
    ) -> None:
        self._worker_count = worker_count
        self._replica_count = replica_count
        self._max_restarts = max_restarts or 0
        self._max_server_restarts = self._max_restarts
        if max_restarts is None and has_update_log:
            self._max_server_restarts = LOGGED_RESTARTS
        self._quick_ends: Counter[str] = Counter()
        self._has_update_log = has_update_log
        self._restart_count = 0
        self._scheduler_count = 0
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
        return self._of_scheduler(role_exit)

    def _of_scheduler(self, role_exit: RoleExit) -> Meaning:
        self._served |= {role_exit.command.name} if role_exit.was_ready else set()
        is_refused = role_exit.returncode == REFUSED_EXIT_CODE
        has_served = role_exit.command.name in self._served
        if not has_served or is_refused or self._scheduler_count == SCHEDULER_RESTARTS:
            return self._the_end(role_exit, _CANNOT_GO_ON)
        self._scheduler_count += 1
        of = f"restart {self._scheduler_count} of {SCHEDULER_RESTARTS}"
        return self._again(role_exit, "it goes on from its journal, and", of)

    def _of_worker(self, role_exit: RoleExit) -> Meaning:
        if role_exit.returncode == 0:
            self._finished_count += 1
            return Ending(0) if self._finished_count == self._worker_count else GoOn()
        if self._restart_count < self._max_restarts:
            return self._restart(role_exit, "it", ", and takes its rank over")
        return self._the_end(role_exit, _CANNOT_GO_ON)

    def _of_server(self, role_exit: RoleExit, serving_count: int) -> Meaning:
        name = role_exit.command.name
        was_part = role_exit.was_ready or name in self._served
        if role_exit.was_ready:
            self._served.add(name)
        if was_part and not self._has_update_log:
            if role_exit.was_ready and self._replica_count == 1:
                lost = "its values are lost, which no other server had (--replicas 2 keeps copies)"
                return self._the_end(role_exit, f"{_CANNOT_GO_ON}: {lost}")
            if not serving_count:
                lost = "no server is left that serves, and the values are lost"
                return self._the_end(role_exit, f"{_CANNOT_GO_ON}: {lost}")
        is_refused = role_exit.returncode == REFUSED_EXIT_CODE
        if not is_refused and self._restart_count < self._max_server_restarts:
            who = self._who_goes_on(role_exit) if was_part else "it"
            return self._restart(role_exit, who)
        if not was_part:
            return self._the_end(role_exit, "before it served")
        if self._has_update_log and (self._replica_count == 1 or not serving_count):
            return self._the_end(role_exit, f"{_CANNOT_GO_ON}: what it has is in its update log")
        if not role_exit.was_ready:
            return GoOn(f"{_fate(role_exit, ' before it served again')}; the others go on")
        return GoOn(f"{_fate(role_exit)}; its ranges go on at their backups")

    def _who_goes_on(self, role_exit: RoleExit) -> str:
        if self._has_update_log:
            return "it goes on from its update log, and"
        return "its ranges go on at their backups, and it" if role_exit.was_ready else "it"

    def _restart(self, role_exit: RoleExit, who: str, consequence: str = "") -> StartAgain:
        self._restart_count += 1
        is_server = role_exit.command.kind == "server"
        most = self._max_server_restarts if is_server else self._max_restarts
        return self._again(role_exit, who, f"restart {self._restart_count} of {most}", consequence)

    def _again(
        self, role_exit: RoleExit, who: str, count_words: str, consequence: str = ""
    ) -> StartAgain:
        name = role_exit.command.name
        if role_exit.ran_s >= STEADY_S:
            self._quick_ends[name] = 0
        quick_count = self._quick_ends[name]
        self._quick_ends[name] += 1
        after_s = min(2.0 ** (quick_count - 1), MAX_PAUSE_S) if quick_count else 0.0
        later = f" in {after_s:g} s" if after_s else ""
        told = f"{_fate(role_exit)}; {who} is started again{later} ({count_words}){consequence}"
        return StartAgain(told, after_s)

    def _the_end(self, role_exit: RoleExit, when: str) -> Ending:
        if self._restart_count:
            when = f"after {self._restart_count} restarts (see --max-restarts) {when}"
        return Ending(FAILURE_EXIT_CODE, describe_exit(role_exit, when))


def _fate(role_exit: RoleExit, when: str = "") -> str:
    """Says which role ended, how, and why if it said so."""
    command = role_exit.command
    where = f" ({role_exit.address})" if role_exit.address and command.kind == "server" else ""
    why = f" ({role_exit.reason})" if role_exit.reason else ""
    return f"{command.name}{where} {role_exit.fate}{when}{why}"
