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
        "        if not live or not best.in_turn or self._has_come(live):\n",
        "        if best:\n",
        _IN_TURN,
    ),
    Mutant(
        "who joins a loop ends no step that others have sealed",
        "S6",
        _PLACES,
        "                self.clocks[table] = max(self.clocks.get(table, clock), clock)\n",
        "                pass\n",
        _IN_TURN,
    ),
    Mutant(
        "a loop begins with each step of the model that is stepped first",
        "S6",
        _PLACES,
        "        if self._has_others or (not self._in_turn and (is_only or self._count > "
        "_ALONE_AFTER)):\n",
        "        if True:\n",
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
        "            if not shared or any(shared[t] < self.clocks[t] for t in stepped):\n",
        "            if not shared:\n",
        _IN_TURN,
    ),
)
