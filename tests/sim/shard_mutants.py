"""Deliberate bugs in what the scheduler knows of data shards (S20); see `mutants`."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_SHARDS = ("shards",)
_RESTORES = ("shards-restores",)
_MACHINE = "scheduler/machine/data_shards.py"

SHARD_MUTANTS = (
    Mutant(
        "shards of a worker that is gone stay its",
        "S20",
        "scheduler/machine/cluster.py",
        "                further += self._data_shards.ended(transition.node)\n",
        "",
        _SHARDS,
    ),
    Mutant(
        "leases that end without a report are not counted",
        "S20",
        _MACHINE,
        "reissued_count=self.reissued_count + len(lost),",
        "reissued_count=self.reissued_count,",
        _SHARDS,
    ),
    Mutant(
        "a report that is repeated is refused",
        "S20",
        _MACHINE,
        " or self.reports.get(worker) == report:",
        ":",
        _SHARDS,
    ),
    Mutant(
        "a pass is over when its last shard is issued",
        "S20",
        _MACHINE,
        "        if after.done_count < self.spec.shard_count:\n",
        "        if after.issued_count < self.spec.shard_count:\n",
        _SHARDS,
    ),
    Mutant(
        "leases are forgotten at a start",
        "S20",
        "scheduler/journal/records.py",
        "        data_set = from_json(DataSet, body)\n",
        "        data_set = dataclasses.replace(from_json(DataSet, body), leases={})\n",
        _SHARDS,
    ),
    Mutant(
        "shards that are leased at a cut count as done",
        "S20",
        _MACHINE,
        "        is_open = (*self.returned, *self.leases)\n",
        "        is_open = self.returned\n",
        _RESTORES,
    ),
    Mutant(
        "a checkpoint has what is done when it is written",
        "S20",
        "scheduler/machine/checkpoints.py",
        "        attempt.is_written = True\n",
        "        attempt.is_written = True\n"
        "        data_sets = self._state.data_sets.values()\n"
        "        attempt.data_sets = tuple(each.saved() for each in data_sets)\n",
        (*_RESTORES, *_SHARDS),
    ),
    Mutant(
        "a restore begins its pass anew",
        "S20",
        "scheduler/machine/state.py",
        'data_sets={("", each.spec.name): DataSet.restored(each) for each in saved},',
        "data_sets={},",
        _RESTORES,
    ),
)
