"""The deliberate bugs of runs on the same servers, of which one meets another (S19)."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_RUNS = ("runs",)
_LOGS = ("runs-logs",)
_DEPARTURES = ("runs-departures",)
_RESTORES = ("runs-restores",)
_EMPTIED = ("runs-emptied",)
_EMPTIED_LOGS = ("runs-emptied-logs",)
_SERVER = "ps_server/ranges/server_machine.py"
_CHANGES = "scheduler/machine/changes.py"

RUN_SEPARATION_MUTANTS = (
    Mutant(
        "the end of a worker reaches the tables of other runs",
        "S19",
        _SERVER,
        "            for shard in self.shards.values():\n"
        "                if node.run == shard.state.table.run:  # SM-6\n",
        "            for shard in self.shards.values():\n                if True:\n",
        _RUNS,
    ),
    Mutant(
        "a range that moves hears of the dead of other runs",
        "S19",
        _SERVER,
        "            for node in self._ended.values():\n"
        "                if node.run == shard.state.table.run:  # SM-6\n",
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
        "        if table.run != run:\n",
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
    Mutant(
        "a change is withdrawn when a server dies that has nothing of it",
        "S19",
        _CHANGES,
        "            if moved & table.blocks_by_range(len(self._state.ranges)).keys()\n",
        "            if moved\n",
        _RUNS,
    ),
    Mutant(
        "an update log brings a removed table back",
        "S19",
        "ps_server/replication/range_roles.py",
        "self._machine.removed_by(view) | (named - view.tables_by_id.keys())",
        "self._machine.removed_by(view)",
        _LOGS,
    ),
    Mutant(
        "what an update log only names has memory for ever",
        "S19",
        "ps_server/replication/range_roles.py",
        "        named |= self._logged_tables if self._view is None else set()\n",
        "",
        _LOGS,
    ),
    Mutant(
        "who comes back with its log keeps the run without a name alone",
        "S19",
        "ps_server/replication/range_roles.py",
        "self._machine.removed_by(view) | (named - view.tables_by_id.keys())",
        "self._machine.removed_by(view) | (named - view.of_run('').tables_by_id.keys())",
        _LOGS,
    ),
    Mutant(
        "who begins a range that was placed anew is of its first term",
        "S8",
        "ps_server/replication/range_roles.py",
        "        term = max(assignment.placed_epoch, PLACED_EPOCH)  # of its first primary\n",
        "        term = PLACED_EPOCH\n",
        _EMPTIED,
    ),
    Mutant(
        "a server knows by its views alone that a range was placed anew",
        "S8",
        "ps_server/replication/range_roles.py",
        "            if self._had.get(r.range_id, r.placed_epoch) < r.placed_epoch\n",
        "            if self._view is not None and r.range_id in self._had\n"
        "            and (r.primary is None or (self._node_id in r.initial_holders and\n"
        "            self._node_id not in self._view.ranges[r.range_id].initial_holders))\n",
        _EMPTIED,
        first_seed=110,
    ),
    Mutant(
        "an update log brings back what was there before a range was placed anew",
        "S13",
        "scheduler/machine/state.py",
        "        return known.get(assignment.range_id, least) >= least\n",
        "        return True\n",
        _EMPTIED_LOGS,
    ),
    Mutant(
        "a log goes on with a range that was placed anew",
        "S13",
        "ps_server/replication/range_roles.py",
        "        lost = [*sorted(self.placed_anew), *self._not_given_back(view)]\n",
        "        lost = self._not_given_back(view)\n",
        _EMPTIED_LOGS,
    ),
    Mutant(
        "a range without values waits for update logs",
        "S8",
        "scheduler/machine/configurations.py",
        "is_awaited = self._may_come_back if has_values else self._is_member\n",
        "is_awaited = self._may_come_back\n",
        _EMPTIED_LOGS,
    ),
    Mutant(
        "what is withheld of a range that is not placed stays in the log",
        "S13",
        "ps_server/replication/range_roles.py",
        "        if assignment.primary in (self._node_id, None):\n",
        "        if assignment.primary == self._node_id:\n",
        _EMPTIED_LOGS,
    ),
    Mutant(
        "who does not get on holds a range while another is asked for",
        "S8",
        "ps_server/replication/primary.py",
        "            if is_useless and node_id not in self._in_question:\n",
        "            if is_useless and self._asked is None:\n",
        ("runs-emptied-starts",),
        first_seed=63418,
    ),
    Mutant(
        "the work is done when the run without a name is",
        "S19",
        "scheduler/machine/departures.py",
        "        finished = self._state.finished\n",
        "        finished = not any(n.state.is_member for n in self._state.workers_of(''))\n",
        _DEPARTURES,
    ),
    Mutant(
        "a cluster is restored while runs that have a name train",
        "S19",
        "scheduler/machine/cluster.py",
        "        names = [name for name in self._state.runs if not self.members.is_over(name)]\n",
        "        names = [name for name in self._state.runs if name is None]\n",
        _RESTORES,
    ),
    Mutant(
        "a checkpoint's table is that of any run that has one of its name",
        "S19",
        "scheduler/machine/tables.py",
        "None if run else self._restored(spec)",
        "self._restored(spec)",
        _RESTORES,
    ),
)
