"""Deliberate bugs of tables of rows."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_STORE = "ps_server/values/row_store.py"
_GRADIENTS = "ps_server/values/row_gradients.py"
_STEPS = ("steps",)
_FAILOVER = ("failover",)

ROW_MUTANTS = (
    Mutant(
        "of several workers' rows the last ones count",
        "S11",
        _GRADIENTS,
        "        self.sums.setdefault(part.block, RowSum()).parts.append((part.ids, part.values))",
        "        self.sums[part.block] = RowSum([(part.ids, part.values)])",
        _STEPS,
    ),
    Mutant(
        "a mean divides by who had the row",
        "S11",
        _STORE,
        "            yield from total.scaling(1.0 / contributor_count)",
        "            yield from total.scaling(1.0 / len(total.parts))",
        _STEPS,
    ),
    Mutant(
        "an update's scale is left out",
        "S11",
        _STORE,
        "            yield from total.scaling(update_scale)\n",
        "",
        _STEPS,
    ),
    Mutant(
        "a worker's factor is left out",
        "S11",
        _STORE,
        "            if scale != 1.0:\n",
        "            if False:\n",
        _STEPS,
    ),
    Mutant(
        "rows are made of what is in their worker's memory later",
        "S11",
        _STORE,
        "copies = is_shared or not view.readonly",
        "copies = False",
        _STEPS,
    ),
    Mutant(
        "an update that makes a row forgets its state",
        "S11",
        _STORE,
        "            for name, rows in state.items():",
        "            for name, rows in ():",
        _STEPS,
    ),
    Mutant(
        "a row that is missing stays so",
        "S11",
        _STORE,
        "            numbers[missing] = yield from partition.adding(new, arrays)",
        "            numbers[missing] = 0\n            yield from partition.adding(ids[:0], {})",
        _STEPS,
    ),
    Mutant(
        "a backup that joins begins with the rows' first state",
        "S11",
        _STORE,
        "            yield from partition.adding(*self._rows_of(each))",
        "            ids, arrays = self._rows_of(each)\n"
        "            arrays |= self._optimizer.first_state(len(ids), self._dtype)\n"
        "            yield from partition.adding(ids, arrays)",
        _FAILOVER,
    ),
    Mutant(
        "a sum that waits for its scale is not copied",
        "S11",
        _STORE,
        "            if accumulator.is_reduced\n",
        "            if not accumulator.is_reduced\n",
        _FAILOVER,
    ),
)
