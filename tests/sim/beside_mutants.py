"""Deliberate bugs that are seen where features meet; see `mutants`."""

from __future__ import annotations

from tests.sim.mutation import Mutant

BESIDE_MUTANTS = (
    Mutant(
        "a table that is made has no late joiner from its beginning",
        "S6",
        "scheduler/machine/cluster.py",
        "        joins = self.changes.joined_before(session.run, view.worker_count)\n",
        "        joins = ()\n",
        ("tables-joins",),
    ),
    Mutant(
        "who ends in the middle of its work has left in order",
        "S6",
        "scheduler/machine/membership.py",
        "            return self._declare_gone(member.node, 0.0)\n        return self._leave(",
        "            return self._leave(member.node, reason)\n        return self._leave(",
        ("growth",),
    ),
    Mutant(
        "backups hear of the last of several updates that are decided at once",
        "S8",
        "ps_server/replication/output_commit.py",
        "                into.changes.append(Put(record, None if is_kept else accumulator))\n",
        "                into.changes[:] = [Put(record, None if is_kept else accumulator)]\n",
        ("batches",),
    ),
    Mutant(
        "sums of a restored table are counted from its restore",
        "S12",
        "ps_server/ranges/read_gate.py",
        "            event.clock if is_sum and event.incarnation is not None else state.clock,\n",
        "            event.clock - state.first_clock\n"
        "            if is_sum and event.incarnation is not None else state.clock,\n",
        ("restores-sums",),
    ),
    Mutant(
        "who was promoted is taken for who served once another is promoted in its place",
        "S13",
        "scheduler/machine/configurations.py",
        "            if source.promoted_epoch is None:\n                promoted_epoch",
        "            if source.promoted_epoch is not None:\n"
        "                source = LogSource(old.primary, source.promoted_epoch)\n"
        "            if source.promoted_epoch is None:\n                promoted_epoch",
        ("mixed-logs",),
    ),
)
