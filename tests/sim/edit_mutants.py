"""Deliberate bugs of steps that are edits."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_AGGREGATION = "ps_server/ranges/aggregation.py"
_GATE = "ps_server/ranges/update_gate.py"
_ARRAYS = "ps_server/values/optimizer_arrays.py"
_STEPS = ("steps",)
_LOADS = ("loads",)
_LATE_JOINERS = "ps_worker/spec/late_joiners.py"

EDIT_MUTANTS = (
    Mutant(
        "workers that disagree about an edit make one",
        "S16",
        _AGGREGATION,
        "        if edits[0] == edits[1] and arrays[0] == arrays[1]:",
        "        if True:",
        _STEPS,
    ),
    Mutant(
        "who changed nothing goes along with an edit",
        "S16",
        _AGGREGATION,
        "        if edits[0] == edits[1] and arrays[0] == arrays[1]:",
        "        if (edits[0] == edits[1] and arrays[0] == arrays[1]) or not all(edits):",
        _STEPS,
    ),
    Mutant(
        "one worker's edit is taken where no step is all workers'",
        "S16",
        "ps_server/ranges/range_state.py",
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
        _AGGREGATION,
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
    Mutant(
        "workers that name different arrays of state make one edit",
        "S16",
        _AGGREGATION,
        "        if edits[0] == edits[1] and arrays[0] == arrays[1]:",
        "        if edits[0] == edits[1]:",
        _STEPS,
    ),
    Mutant(
        "optimizer state that was loaded becomes values",
        "S16",
        _AGGREGATION,
        "self._values, out, of=self._of)",
        "self._values, out)",
        _STEPS,
    ),
    Mutant(
        "steps that were loaded are those of tensors that were not, too",
        "S16",
        _ARRAYS,
        "    steps[here] = counts[here]",
        "    steps = counts",
        _STEPS,
    ),
    Mutant(
        "loaded steps of one tensor of a block are all others', too",
        "S16",
        _ARRAYS,
        "[state.bounds[:-1]]",
        "[state.bounds[:1].repeat(state.segment_count)]",
        _STEPS,
    ),
    Mutant(
        "a backup takes laid state for values",
        "S16",
        "ps_server/stores.py",
        "self.assigning(AssignValues(record, tuple(values.parts.items())))",
        'self.assigning(AssignValues(record._replace(array=""), tuple(values.parts.items())))',
        ("failover",),
    ),
    Mutant(
        "what was laid beside under another name is put in place",
        "S16",
        _ARRAYS,
        " and not slot.startswith(own)]",
        " and False]",
        _STEPS,
    ),
    Mutant(
        "an array is in place before the others are",
        "S16",
        _ARRAYS,
        "    contributions.copy_present(part, beside)\n",
        "    contributions.copy_present(part, beside)\n    _put_in_place(state, own)\n",
        _STEPS,
    ),
    Mutant(
        "who says an edit with nothing in it has no say",
        "S16",
        _AGGREGATION,
        "        if step.skip:\n            return\n",
        "        if step.skip or (step.edit and not step.pushes):\n            return\n",
        _LOADS,
    ),
    Mutant(
        "who loads passes no clocks",
        "S16",
        _LATE_JOINERS,
        "if join.incarnation in here and join.after_clock > clock\n",
        "if False\n",
        _LOADS,
    ),
    Mutant(
        "who loads waits for nobody",
        "S16",
        _LATE_JOINERS,
        "    if not before and all_have_joined(view, late_joiner.joined_ids):\n",
        "    if not before:\n",
        _LOADS,
    ),
    Mutant(
        "who joins others that have trained may load",
        "S16",
        _LATE_JOINERS,
        "    return any(later > earlier + 1 for earlier, later in pairwise(steps))\n",
        "    return any(later < earlier for earlier, later in pairwise(steps))\n",
        _LOADS,
    ),
    Mutant(
        "a clock that is ended with nothing is a step",
        "S16",
        _LATE_JOINERS,
        "    steps = sorted(max(taken) for",
        "    steps = sorted(sum(taken) for",
        _LOADS,
    ),
    Mutant(
        "who joins before anybody's first step waits for nobody",
        "S16",
        _LATE_JOINERS,
        "    silent_s, limit_s = late_joiner.limits_s\n",
        "    silent_s, limit_s = late_joiner.limits_s\n"
        "    if late_joiner.is_at_start:\n        return True\n",
        _LOADS,
    ),
    Mutant(
        "who may be dead is taken for one that trains",
        "S16",
        _LATE_JOINERS,
        "        return None if waited_s < silent_s else late_joiner.is_at_start\n",
        "        return late_joiner.is_at_start\n",
        _LOADS,
        first_seed=260,
    ),
)
