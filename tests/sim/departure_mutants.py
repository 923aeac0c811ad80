"""Deliberate bugs in how a server leaves that was told to stop (S8); see `mutants`."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_DEPARTURES = ("departures",)
_SCHEDULER = "scheduler/departures.py"

DEPARTURE_MUTANTS = (
    Mutant(
        "who has the only copy may leave",
        "S8",
        _SCHEDULER,
        "        if alone:\n            self._since_s.pop",
        "        if False:\n            self._since_s.pop",
        _DEPARTURES,
    ),
    Mutant(
        "of two that are told to stop both may leave",
        "S8",
        "scheduler/configurations.py",
        "            and living.isdisjoint(r.in_sync)",
        "            and len(r.in_sync) < 2",
        _DEPARTURES,
    ),
    Mutant(
        "who is being brought up to date has all of a range",
        "S8",
        "scheduler/configurations.py",
        "            and living.isdisjoint(r.in_sync)",
        "            and living.isdisjoint(r.holders)",
        _DEPARTURES,
    ),
    Mutant(
        "who may be dead is relied on",
        "S8",
        _SCHEDULER,
        "        if relied_on:\n",
        "        if False:\n",
        _DEPARTURES,
    ),
    Mutant(
        "who was told to stop does not wait",
        "S8",
        "ps_server/departure_machine.py",
        "            self.awaited = error.message\n            return Step.STAYS",
        "            self.awaited = error.message\n            return Step.LEAVES",
        _DEPARTURES,
    ),
    Mutant(
        "who was told to stop waits for a scheduler that is not there",
        "S8",
        "ps_server/departure_machine.py",
        "        if isinstance(error, Recovering) and error.retry_after_ms:",
        "        if isinstance(error, Recovering):",
        _DEPARTURES,
    ),
)
