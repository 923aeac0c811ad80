"""Deliberate bugs that are seen where features meet; see `mutants`."""

from __future__ import annotations

from tests.sim.mutation import Mutant

BESIDE_MUTANTS = (
    Mutant(
        "backups hear of the last of several updates that are decided at once",
        "S8",
        "ps_server/replication/output_commit.py",
        "                into.changes.append(Put(record, None if is_kept else accumulator))\n",
        "                into.changes[:] = [Put(record, None if is_kept else accumulator)]\n",
        ("batches",),
    ),
)
