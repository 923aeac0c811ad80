"""Deliberate bugs of pulls that say what their callers hold."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_EVENTS = "ps_server/ranges/events.py"
_HELD = "ps_worker/steps/held_values.py"
_STEPS = ("steps", "changes")

HELD_MUTANTS = (
    Mutant(
        "values that have had an update are unchanged",
        "S22",
        _EVENTS,
        "return (held_version, held_edit_count) == (self.versions[block], self.edit_count)",
        "return held_edit_count == self.edit_count",
        _STEPS,
    ),
    Mutant(
        "values that were edited are unchanged",
        "S22",
        "ps_server/ranges/aggregation.py",
        "        if record.is_assign and record.clock:  # initial values are no edit\n",
        "        if False:\n",
        _STEPS,
    ),
    Mutant(
        "a sum without a gradient is the sum before it",
        "S22",
        "ps_server/ranges/read_gate.py",
        "None if is_sum or state.table",
        "None if state.table",
        _STEPS,
    ),
    Mutant(
        "values of another epoch are claimed",
        "S22",
        _HELD,
        "        return value if is_of_epoch else None\n",
        "        return value\n",
        ("failover",),
        first_seed=96,
    ),
)
