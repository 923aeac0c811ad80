"""Deliberate bugs in what a restore begins and ends (S10); see `mutants`."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_RESTORES = ("restores",)
_UNREADABLE = ("restores-unreadable", "restores-unreadable-logs")
_CLUSTER = "scheduler/machine/cluster.py"
_RANGES = "ps_server/checkpoint/restored_ranges.py"

RESTORE_MUTANTS = (
    Mutant(
        "a server takes a caller of an older timeline",
        "S10",
        "ps_server/service/node.py",
        "if session not in self._known:",
        "if session.timeline == self._own.timeline and session not in self._known:",
        _RESTORES,
    ),
    Mutant(
        "who is of an older timeline has a wrong token",
        "S10",
        "ps_server/service/node.py",
        "if session.timeline != self._own.timeline:",
        "if False:",
        _RESTORES,
    ),
    Mutant(
        "servers of an older timeline are taken for another cluster's",
        "S10",
        "scheduler/machine/membership.py",
        "if session.timeline in ours.replaced_timelines:",
        "if False:",
        _RESTORES,
    ),
    Mutant(
        "a scheduler takes a caller of an older timeline",
        "S10",
        "scheduler/machine/membership.py",
        "        self._check_genuine(session)\n        if session.role is Role.OPERATOR:",
        "        if session.role is Role.OPERATOR:",
        _RESTORES,
    ),
    Mutant(
        "a restored cluster gives its numbers again",
        "S10",
        _CLUSTER,
        "            first_incarnation=self._state.next_incarnation,\n",
        "",
        _RESTORES,
    ),
    Mutant(
        "a range is restored that backups have something of",
        "S10",
        _RANGES,
        "if replicas is not None and not replicas.is_without_replicas(key[1]):",
        "if False:",
        _RESTORES,
    ),
    Mutant(
        "who backed up a range before it was restored counts as having it",
        "S10",
        "ps_server/replication/replication_log.py",
        "        self.number += 1\n        self._anew = self.number\n",
        "",
        _RESTORES,
    ),
    Mutant(
        "a restored range waits for servers that wait for it",
        "S10",
        "ps_server/replication/primary.py",
        "is_done = log.is_drained or log.is_short",
        "is_done = log.is_drained",
        _RESTORES,
    ),
    Mutant(
        "a restored range waits for a log that waits for it",
        "S10",
        "ps_server/replication/primary.py",
        " or log.needs_snapshot",
        "",
        ("restores-logs",),
    ),
    Mutant(
        "a range whose restored table has failed stays closed",
        "S10",
        "ps_server/replication/range_roles.py",
        "                primary.reopen()\n",
        "                pass\n",
        _UNREADABLE,
    ),
    Mutant(
        "the values of a table that has failed are waited for",
        "S10",
        "ps_server/ranges/range_state.py",
        "        return is_restored and not self.initialized and self.failure is None\n",
        "        return is_restored and not self.initialized\n",
        _UNREADABLE,
    ),
    Mutant(
        "a table that has failed is served where its range goes",
        "S10",
        "ps_server/ranges/range_copy.py",
        "    state.initialized, state.failure = facts.initialized, facts.failure\n",
        "    state.initialized, state.failure = facts.initialized or bool(facts.failure), None\n",
        _UNREADABLE,
    ),
    Mutant(
        "who joins a restored model puts its tables at one clock",
        "S10",
        "ps_worker/steps/steps.py",
        "taken = [clock - first for clock, first in zip(clocks, first_clocks, strict=True)]",
        "taken = list(clocks)",
        _RESTORES,
        first_seed=19,
    ),
)
