"""Deliberate bugs in how a server leaves that was told to stop (S8); see `mutants`."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_DEPARTURES = ("departures",)
_LOGS = ("departures-logs",)
_RESTORES = ("departures-restores",)
_SCHEDULER = "scheduler/machine/departures.py"

DEPARTURE_MUTANTS = (
    Mutant(
        "who has the only copy may leave",
        "S8",
        _SCHEDULER,
        "return () if finished else self._configurations.held_alone(node_id, doubted)",
        "return ()",
        _DEPARTURES,
    ),
    Mutant(
        "of two that are told to stop both may leave",
        "S8",
        "scheduler/machine/configurations.py",
        "            and sure.isdisjoint(r.in_sync)",
        "            and len(r.in_sync) < 2",
        _DEPARTURES,
    ),
    Mutant(
        "who is being brought up to date has all of a range",
        "S8",
        "scheduler/machine/configurations.py",
        "            and sure.isdisjoint(r.in_sync)",
        "            and sure.isdisjoint(r.holders)",
        _DEPARTURES,
    ),
    Mutant(
        "who may be dead is relied on",
        "S8",
        _SCHEDULER,
        "        if not relied_on:\n",
        "        if True:\n",
        _DEPARTURES,
    ),
    Mutant(
        "what the dead had sent is a sign of life",
        "S8",
        "scheduler/machine/cluster.py",
        "            self._departures.heard(node.node_id, view_number)\n",
        "            self._departures.heard(node.node_id, self._state.view_number)\n",
        _DEPARTURES,
    ),
    Mutant(
        "a sign of life counts for as long as another is waited for",
        "S8",
        _SCHEDULER,
        "        if asked is None or now_s - asked.since_s > limit_s:",
        "        if asked is None:",
        _DEPARTURES,
    ),
    Mutant(
        "a restored cluster needs nobody for what its checkpoint has",
        "S8",
        _SCHEDULER,
        "        finished = self._state.finished\n",
        "        finished = self._state.finished or self._settings.restored\n",
        _RESTORES,
    ),
    Mutant(
        "an update log has what was taken over a moment ago",
        "S8",
        "scheduler/machine/configurations.py",
        "                and r.range_id not in self._state.failed_over\n",
        "",
        _LOGS,
    ),
    Mutant(
        "who may be dead takes over what an update log has",
        "S8",
        "scheduler/machine/configurations.py",
        "                and living.isdisjoint(r.in_sync)\n",
        "",
        _LOGS,
    ),
    Mutant(
        "who was told to stop does not wait",
        "S8",
        "ps_server/replication/departure_machine.py",
        "            self.awaited = error.message\n            return DepartureStep.STAYS",
        "            self.awaited = error.message\n            return DepartureStep.LEAVES",
        _DEPARTURES,
    ),
    Mutant(
        "who was told to stop waits for a scheduler that is not there",
        "S8",
        "ps_server/replication/departure_machine.py",
        "        if isinstance(error, Recovering) and error.retry_after_ms:",
        "        if isinstance(error, Recovering):",
        _DEPARTURES,
    ),
)
