"""Deliberate bugs of tables of rows."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_STORE = "ps_server/values/row_store.py"
_LAYOUT = "ps_server/values/row_layout.py"
_ARRAYS = "ps_server/rows/row_arrays.py"
_INDEX = "ps_server/rows/row_index.py"
_TIERS = "ps_server/rows/tiered_arrays.py"
_FILE = "ps_server/rows/row_file.py"
_CANDIDATES = "ps_server/rows/row_candidates.py"
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
        "            yield from total.scaling(terms.update_scale)\n",
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
        _LAYOUT,
        "self._step(arrays.slab(names, slab), numbers",
        "own = {n: a if n == VALUES else a.copy() for n, a in arrays.slab(names, slab).items()}\n"
        "                self._step(own, numbers",
        _STEPS,
    ),
    Mutant(
        "a row that is missing stays so",
        "S11",
        _STORE,
        "            numbers[missing] = yield from partition.adding(new, first)",
        "            if partition.index.count == 0:\n"
        "                numbers[missing] = yield from partition.adding(new, first)\n"
        "            numbers[missing] = 0",
        _STEPS,
    ),
    Mutant(
        "a backup that joins begins with the rows' first state",
        "S11",
        _STORE,
        "            yield from self._adding(each.block, self._piece_of(each))",
        "            piece = self._piece_of(each)\n"
        "            if piece.are_rows:\n"
        "                first = self._layout.first_arrays(piece.ids)\n"
        "                piece.arrays.update({**first, VALUES: piece.arrays[VALUES]})\n"
        "            yield from self._adding(each.block, piece)",
        _FAILOVER,
    ),
    Mutant(
        "a sum that waits for its scale is not copied",
        "S11",
        _STORE,
        "self._accumulators.items() if each.is_reduced)",
        "self._accumulators.items() if not each.is_reduced)",
        _FAILOVER,
    ),
    Mutant(
        "nothing is evicted",
        "S11",
        _STORE,
        "            if leaves.any():",
        "            if False:",
        _STEPS,
    ),
    Mutant(
        "a row that moves leaves its optimizer state behind",
        "S11",
        _ARRAYS,
        "                self.put(name, own_places, self.get(name, places, len(of)))",
        "                if name == 'values':\n"
        "                    self.put(name, own_places, self.get(name, places, len(of)))",
        _STEPS,
    ),
    Mutant(
        "a row that moves is found where it was",
        "S11",
        _INDEX,
        "            self._ids[to] = self._ids[of]",
        "            pass",
        _STEPS,
    ),
    Mutant(
        "a row is as old as when it was made",
        "S11",
        _STORE,
        "            self._tally(partition, places, len(numbers))\n",
        "",
        _STEPS,
    ),
    Mutant(
        "a backup that joins takes all rows for old",
        "S11",
        _STORE,
        "            arrays = self._layout.as_stored(piece.arrays)\n",
        "            arrays = self._layout.as_stored(piece.arrays)\n"
        "            arrays |= {n: a * 0 for n, a in arrays.items() if n == UPDATED}\n",
        _FAILOVER,
    ),
    Mutant(
        "rows are rounded by draws of this server's own",
        "S11",
        _LAYOUT,
        "        draws = rounding_draws(mixed_ids(ids, self._salt), version, self._length)",
        "        mixed = mixed_ids(ids, self._salt) ^ np.uint64(id(self) % 2**32)\n"
        "        draws = rounding_draws(mixed, version, self._length)",
        _FAILOVER,
    ),
    Mutant(
        "a backup that joins has rows rounded once more",
        "S11",
        _LAYOUT,
        "        return {**arrays, VALUES: self.storage.packed(arrays[VALUES])}",
        "        return {**arrays, VALUES: self.storage.packed(arrays[VALUES] * 1.01)}",
        _FAILOVER,
    ),
    Mutant(
        "a change of rounded rows is lost",
        "S11",
        _LAYOUT,
        "        self._step(taken, ",
        "        self._step({name: rows.copy() for name, rows in taken.items()}, ",
        _STEPS,
    ),
    Mutant(
        "a backup that joins knows no candidate",
        "S11",
        _STORE,
        "                for begin in begins_of(known):",
        "                for begin in ():",
        _FAILOVER,
    ),
    Mutant(
        "a candidate's gradients are kept from its first one on",
        "S11",
        _CANDIDATES,
        "        is_admitted: Leaves = counts[:, 0] >= self._admit_after",
        "        is_admitted: Leaves = counts[:, 0] >= 1",
        _STEPS,
    ),
    Mutant(
        "a row that was evicted is admitted again at once",
        "S11",
        _CANDIDATES,
        "        counts[is_admitted] = 0\n",
        "",
        _STEPS,
    ),
    Mutant(
        "rows that changed while they were written are left to the disk",
        "S11",
        _TIERS,
        "        same = self._get_frames(_POSITION, frames) == transfer.positions\n",
        "        same = self._get_frames(_OWNER, frames) >= 0\n"
        "        self._put_frames(_POSITION, frames[same], transfer.positions[same])\n",
        _STEPS,
    ),
    Mutant(
        "rows on disk have no optimizer state",
        "S11",
        _TIERS,
        "            records[:, span] = rows.view(np.uint8).reshape(len(frames), -1)",
        "            records[:, span] = rows.view(np.uint8).reshape(len(frames), -1)\n"
        "            records[:, span] *= name == 'values'",
        _STEPS,
        20,
    ),
    Mutant(
        "a disk that is full takes rows",
        "S11",
        _TIERS,
        "        if transfer.failure is None:\n            self._tier.took(may_grow)",
        "        if True:\n            self._tier.took(may_grow)",
        _STEPS,
    ),
    Mutant(
        "a frame that moves forgets whose it is",
        "S11",
        _TIERS,
        "            if name != _WRITING:",
        "            if name not in (_WRITING, _OWNER):",
        _STEPS,
    ),
    Mutant(
        "a row that changes is left to the disk as it was",
        "S11",
        _LAYOUT,
        "            arrays.change(places, len(ids))\n",
        "",
        _STEPS,
        10,
    ),
    Mutant(
        "rows come from the disk in another order",
        "S11",
        _FILE,
        "_Read(records, positions[order], order, [])",
        "_Read(records, positions[order], np.arange(len(order)), [])",
        _STEPS,
        20,
    ),
)
