"""The deliberate bugs of runs on the same servers, of which one meets another (S19)."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_RUNS = ("runs",)
_SERVER = "ps_server/ranges/server_machine.py"
_CHANGES = "scheduler/machine/changes.py"

RUN_SEPARATION_MUTANTS = (
    Mutant(
        "the end of a worker reaches the tables of other runs",
        "S19",
        _SERVER,
        "            for part in self._parts.values():\n"
        "                if node.run == part.state.table.run:  # SM-6\n",
        "            for part in self._parts.values():\n                if True:\n",
        _RUNS,
    ),
    Mutant(
        "a range that moves hears of the dead of other runs",
        "S19",
        _SERVER,
        "            for node in self._ended.values():\n"
        "                if node.run == part.state.table.run:  # SM-6\n",
        "            for node in self._ended.values():\n                if True:\n",
        _RUNS,
    ),
    Mutant(
        "an update waits for as many as the run without a name has",
        "S19",
        _SERVER,
        "self._worker_counts.get(table.run, self._worker_count)",
        "self._worker_count",
        _RUNS,
    ),
    Mutant(
        "a table is served to workers of any run",
        "S19",
        _SERVER,
        "        if owner != run:\n",
        "        if False:\n",
        _RUNS,
    ),
    Mutant(
        "names of tables are the cluster's",
        "S19",
        "scheduler/machine/tables.py",
        "existing = self._state.tables.get((run, spec.name))",
        "existing = {name: t for (_, name), t in self._state.tables.items()}.get(spec.name)",
        _RUNS,
    ),
    Mutant(
        "a worker joins the tables of all runs",
        "S19",
        _CHANGES,
        "        for table in state.tables_of(run):\n            due =",
        "        for table in state.tables.values():\n            due =",
        _RUNS,
    ),
    Mutant(
        "a checkpoint holds the tables of other runs",
        "S19",
        "scheduler/machine/checkpoints.py",
        "        for table in state.tables_of(UNNAMED):\n            transitions",
        "        for table in list(state.tables.values()):\n            transitions",
        _RUNS,
    ),
    Mutant(
        "an operator ends the workers of all runs",
        "S19",
        "scheduler/machine/membership.py",
        "        for node in self._state.workers_of(name):\n            self._may_return",
        "        for node in self._state.nodes_of(Role.WORKER):\n            self._may_return",
        _RUNS,
    ),
    Mutant(
        "what was decided of a table is done when it is removed",
        "S19",
        "ps_server/replication/range_roles.py",
        "primary.log.take_out(lambda held: table_of(held) in table_ids)",
        "primary.log.take_out(lambda held: False)",
        _RUNS,
    ),
    Mutant(
        "a copy of a range brings a removed table back",
        "S19",
        "ps_server/replication/range_roles.py",
        "        gone = {table_id for table_id in snapshot.copies if self._is_removed(table_id)}\n",
        "        gone = set()\n",
        _RUNS,
    ),
)
