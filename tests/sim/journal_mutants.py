"""Deliberate bugs in what the scheduler writes down, reads again and tells (S18); see `mutants`."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_STARTS = ("starts",)
_RESTORES = ("starts-restores",)
_RECORDS = "scheduler/journal/records.py"

JOURNAL_MUTANTS = (
    Mutant(
        "what is decided while a write is on its way is answered with that",
        "S18",
        "scheduler/journal/decision_buffer.py",
        "        return DurableBatch(batch.number,",
        "        return DurableBatch(self._count,",
        _STARTS,
        first_seed=45116,
    ),
    Mutant(
        "a record is written once",
        "S18",
        _RECORDS,
        "                if before.get(number) is not value:\n",
        "                if before.get(number) is None:\n",
        _STARTS,
    ),
    Mutant(
        "a proposal is forgotten, and its number given again",
        "S18",
        _RECORDS,
        '        if body["change_count"]:\n',
        "        if False:\n",
        _STARTS,
        first_seed=316,
    ),
    Mutant(
        "an incarnation is given twice",
        "S18",
        _RECORDS,
        '    scalars["ranges"] = []\n',
        '    scalars |= {"ranges": [], "next_incarnation": settings.first_incarnation}\n',
        _STARTS,
    ),
    Mutant(
        "the view's number goes back",
        "S18",
        _RECORDS,
        '    scalars["ranges"] = []\n',
        '    scalars |= {"ranges": [], "view_number": 1}\n',
        _STARTS,
    ),
    Mutant(
        "a table has no first clock for who joined it",
        "S18",
        _RECORDS,
        "        state.tables[table.key] = table\n",
        "        table = Table(**{**vars(table), 'joins': ()})\n"
        "        state.tables[table.key] = table\n",
        _STARTS,
    ),
    Mutant(
        "restored members are not found silent",
        "S18",
        "scheduler/machine/membership.py",
        "self._detector.expect(node.node_id, now_s, is_silent=is_silent)",
        "self._detector.expect(node.node_id, now_s, is_silent=True)",
        _STARTS,
    ),
    Mutant(
        "restored members are judged at once",
        "S18",
        "ps_core/failure_detector.py",
        "        if is_silent:\n            self._silent.add(node_id)\n",
        "        self._lease_s, self._last_look_s = 1e-9, now_s\n",
        _STARTS,
    ),
    Mutant(
        "what is decided is withdrawn when the scheduler starts",
        "S18",
        "scheduler/machine/changes.py",
        "return [self._withdraw(table, reason) for table, _ in self._undecided()]",  # CH-2
        "tables = [t for t in self._state.tables.values() if t.proposed]\n"
        "        return [self._withdraw(table, reason) for table in tables]",
        _STARTS,
    ),
    Mutant(
        "what was written of the cluster before a restore stays",
        "S18",
        _RECORDS,
        "            if len(before) != len(found) or before.keys() != found.keys():\n",
        "            if False:\n",
        _RESTORES,
    ),
    Mutant(
        "settings are written once",
        "S18",
        _RECORDS,
        "                if before.get(number) is not value:\n",
        "                is_kept = kind == 'settings' and before\n"
        "                if before.get(number) is not value and not is_kept:\n",
        _RESTORES,
    ),
    Mutant(
        "which timelines were replaced is forgotten at a start",
        "S18",
        _RECORDS,
        '    settings = from_json(ClusterSettings, bodies["settings"])\n',
        '    settings = from_json(ClusterSettings, bodies["settings"])\n'
        "    settings = dataclasses.replace(settings, replaced_timelines=frozenset())\n",
        _RESTORES,
    ),
)
