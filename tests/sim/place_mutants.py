"""The deliberate bugs of the place at which a late joiner begins (S6)."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_PLACES = "ps_worker/spec/loop_places.py"
_IN_TURN = ("in-turn", "in-turn-replaced")

PLACE_MUTANTS = (
    Mutant(
        "who joins a loop waits for nobody to come to its place",
        "S6",
        _PLACES,
        "        if not any(report.place.in_turn for report in living):\n",
        "        if living:\n",
        _IN_TURN,
    ),
    Mutant(
        "who joins a loop ends no step that others have sealed",
        "S6",
        _PLACES,
        "                    self.clocks[table] = clock\n",
        "                    pass\n",
        _IN_TURN,
    ),
    Mutant(
        "a loop begins with each step of the model that is stepped first",
        "S6",
        _PLACES,
        "        elif self._has_others:\n",
        "        else:\n",
        _IN_TURN,
    ),
    Mutant(
        "a model that was stepped a few times is taken for the only one",
        "S6",
        _PLACES,
        "_ALONE_AFTER = 8\n",
        "_ALONE_AFTER = 0\n",
        _IN_TURN,
    ),
    Mutant(
        "a place that is behind is taken for one that the others have come to",
        "S6",
        _PLACES,
        "                    self.clocks[table] <= clock <= self._joined[table] + "
        "MOST_FOLLOWED_CLOCKS\n",
        "                    clock <= self._joined[table] + MOST_FOLLOWED_CLOCKS\n",
        _IN_TURN,
    ),
)
