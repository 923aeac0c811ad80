"""Deliberate bugs that are seen by what was told before under the same number; see `mutants`."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_CONFIGURATIONS = "scheduler/machine/configurations.py"

GIVEN_MUTANTS = (
    Mutant(
        "a range has other backups under the same epoch",
        "S8",
        _CONFIGURATIONS,
        "        epochs = _HAND_OVER_EPOCHS if is_handed_over else 1\n",
        "        epochs = _HAND_OVER_EPOCHS if is_handed_over else 1\n"
        "        epochs -= before.primary == assignment.primary\n",
        ("failover",),
    ),
    Mutant(
        "a range that is handed over moves by one epoch",
        "S9",
        _CONFIGURATIONS,
        "_HAND_OVER_EPOCHS = 2\n",
        "_HAND_OVER_EPOCHS = 1\n",
        ("handovers",),
    ),
    Mutant(
        "a checkpoint's number is given again",
        "S18",
        "scheduler/journal/records.py",
        '    scalars["ranges"] = []\n',
        '    scalars |= {"ranges": [], "checkpoint_count": 0}\n',
        ("starts",),
    ),
)
