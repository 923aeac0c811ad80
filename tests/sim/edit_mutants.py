"""Deliberate bugs of steps that are edits."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_FORMING = "ps_server/forming.py"
_GATE = "ps_server/update_gate.py"
_STEPS = ("steps",)

EDIT_MUTANTS = (
    Mutant(
        "workers that disagree about an edit make one",
        "S16",
        _FORMING,
        "        if edits[0] == edits[1]:",
        "        if True:",
        _STEPS,
    ),
    Mutant(
        "who changed nothing goes along with an edit",
        "S16",
        _FORMING,
        "        if edits[0] == edits[1]:",
        "        if edits[0] == edits[1] or not all(edits):",
        _STEPS,
    ),
    Mutant(
        "one worker's edit is taken where no step is all workers'",
        "S16",
        "ps_server/range_state.py",
        "return is_shared or (len(self.ranks) == 1 and setting.mode is not Mode.BSP)",
        "return True",
        (*_STEPS, "changes"),
    ),
    Mutant(
        "an edit without a step of all workers leaves the clock where it was",
        "S16",
        _GATE,
        '        step.edit, step.skip = b"", True\n',
        '        step.edit = b""\n',
        (*_STEPS, "changes"),
    ),
    Mutant(
        "what a disputed update had summed stays",
        "S16",
        _FORMING,
        "                out.append(Drop(record))\n            self._records.commit(record, out)",
        "                pass\n            self._records.commit(record, out)",
        _STEPS,
    ),
    Mutant(
        "a gradient that was refused spoils the edit of its clock",
        "S16",
        _GATE,
        "        invalid = step.invalid_values if seal.terms.edit else step.invalid",
        "        invalid = step.invalid",
        _STEPS,
    ),
)
