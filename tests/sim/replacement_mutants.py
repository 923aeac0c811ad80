"""The deliberate bugs of workers that are replaced, leave and skip where a range moves (S1, S4, S6,
S7, S10).
"""

from __future__ import annotations

from tests.sim.mutation import Mutant

_REPLACEMENTS = ("replacements",)
_GATE = "ps_server/ranges/update_gate.py"
_COPY = "ps_server/ranges/range_copy.py"
_STATE = "ps_server/ranges/range_state.py"

REPLACEMENT_MUTANTS = (
    Mutant(
        "who comes with an identity leaves the one before a member",
        "S6",
        "scheduler/machine/membership.py",
        "        if predecessor is None or not predecessor.state.is_member:\n",
        "        if True:\n",
        _REPLACEMENTS,
    ),
    Mutant(
        "an identity is one in all runs",
        "S19",
        "scheduler/machine/state.py",
        "        for rank, node in self.workers_by_rank(request.run).items():\n",
        "        for rank, node in ((n.rank, n) for n in self.nodes_of(Role.WORKER)):\n",
        ("runs",),
    ),
    Mutant(
        "what the dead had sealed is moved undecided",
        "S6",
        _COPY,
        "        left = min(left, sealed)\n",
        "        sealed = worker.sealed_clock\n",
        _REPLACEMENTS,
    ),
    Mutant(
        "a sum that waits for its scale is no step where the range goes",
        "S6",
        _STATE,
        "        formed = max(self.formed_clock, self._unscaled_clock)\n",
        "        formed = self.formed_clock\n",
        ("runs-departures",),
        first_seed=170,
    ),
    Mutant(
        "who was replaced is forgotten with a step that is held",
        "S6",
        _STATE,
        "            if worker.steps or left is None or left > worker.done_clock:\n",
        "            if False:\n",
        _REPLACEMENTS,
    ),
    Mutant(
        "who replaces another is a member from the first clock",
        "S6",
        _COPY,
        "    worker.left_clock, worker.joined_clock = facts.left_clock, facts.joined_clock\n",
        "    worker.left_clock, worker.joined_clock = facts.left_clock, 0\n",
        _REPLACEMENTS,
    ),
    Mutant(
        "a goodbye is a step once a range has moved",
        "S10",
        _COPY,
        "    worker.final_seal_clock, worker.is_first = facts.final_seal_clock, "
        "facts.predecessor is None\n",
        "    worker.is_first = facts.predecessor is None\n",
        ("replacements", "failover"),
    ),
    Mutant(
        "what a carried seal skips is forgotten by its worker",
        "S4",
        "ps_worker/window/push_window.py",
        "is_skipped = step.skipped or (entries[0].carrier is not None and bool(step.invalid))",
        "is_skipped = step.skipped",
        ("replacements", "failover"),
    ),
    Mutant(
        "what a seal came with is forgotten where a range moves",
        "S4",
        _GATE,
        "if worker.ledger.outcome(seal.sequence - 1) in (Outcome.INVALID, Outcome.WITHDRAWN):",
        "if False:",
        ("replacements", "failover"),
    ),
    Mutant(
        "what a seal came with is forgotten when its worker has seen it",
        "S4",
        "ps_server/ranges/range_machine.py",
        "        self._gate.recall_carrier(worker, step, event)\n",
        "",
        _REPLACEMENTS,
    ),
    Mutant(
        "who joins a table is beyond what others have pulled for",
        "S6",
        "ps_server/ranges/schedule.py",
        "        return reached.by_anything if proposed.join is None else reached.by_updates\n",
        "        return reached.by_anything\n",
        ("sleepers", "sleepers-replaced"),
    ),
    Mutant(
        "who joins a table has reached the seals by which others left",
        "S6",
        "ps_server/ranges/range_state.py",
        "        return ReachedClocks(by_steps, max(by_steps, self.clock), by_anything)\n",
        "        return ReachedClocks(by_steps, self.reached_clock, by_anything)\n",
        ("sleepers", "sleepers-replaced"),
    ),
    Mutant(
        "who is late for an update of nothing clipped is told nothing",
        "S7",
        "ps_server/ranges/update_scales.py",
        "        return (0.0,) * len(self._state.blocks)\n",
        "        return ()\n",
        ("departures-replacements",),
        first_seed=121,  # two ranges must differ in who was late: one seed in hundreds
    ),
)
