"""The deliberate bugs of hand-overs (S9).

Two pairs of rules guard the same, so no simulation shows that one of a pair is missing, and
`test_handed_over_ranges.py` does: a former primary gives its lease up, and its target needs its
grant; what is released, and all that waited, each backup has acknowledged. That a change
is prepared without a range that has stopped is left to `test_output_commit.py`: advice ends when
one begins.
"""

from __future__ import annotations

from tests.sim.mutation import Mutant

_HAND_OVERS = ("handovers",)
_CHANGES = ("handovers", "handovers-replacements")
_LOG = "ps_server/replication/replication_log.py"
_PRIMARY = "ps_server/replication/primary.py"
_REPLICATION = "ps_server/replication/range_roles.py"

HAND_OVER_MUTANTS = (
    Mutant(
        "a range is taken into while it is handed over",
        "S9",
        _REPLICATION,
        " self.primaries.items() if each.is_stopped}",
        " self.primaries.items() if False}",
        _HAND_OVERS,
    ),
    Mutant(
        "a primary asks for its target before it has drained",
        "S9",
        _LOG,
        "        return has_all and not (self._entries or self._is_past)",
        "        return True",
        _HAND_OVERS,
    ),
    Mutant(
        "who has asked goes on after a moment",
        "S9",
        _PRIMARY,
        "        if not self.is_stopped or self.log.is_given_up:",
        "        if not self.is_stopped:",
        _HAND_OVERS,
    ),
    Mutant(
        "a target need not be in sync",
        "S9",
        _PRIMARY,
        "        if target in self._configured and self._may_stop:",
        "        if target is not None and self._may_stop:",
        _HAND_OVERS,
    ),
    Mutant(
        "a range is handed over while a table changes",
        "S6",
        "scheduler/machine/cluster.py",
        "may_hand_over=not self._is_busy",
        "may_hand_over=True",
        _CHANGES,
    ),
    Mutant(
        "a former primary's log is of another term than its target's",
        "S9",
        _REPLICATION,
        "        log.term = replica.term\n",
        "",
        _HAND_OVERS,
    ),
    Mutant(
        "a target takes the others for up to date whatever came before",
        "S8",
        "ps_server/replication/backup.py",
        "        self.is_handed_over = term == self.term",
        "        self.is_handed_over = True",
        _HAND_OVERS,
    ),
)
