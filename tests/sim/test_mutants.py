"""The deliberate bugs can be put in: each text is there once. `make sim-mutants` runs them."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.mutation import Mutant

BITTEN = {
    "S1",
    "S2",
    "S3",
    "S4",
    "S5",
    "S6",
    "S7",
    "S8",
    "S9",
    "S10",
    "S11",
    "S12",
    "S13",
    "S15",
    "S16",
    "S18",
    "S19",
    "S20",
    "S21",
    "S22",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_a_program(mutant: Mutant) -> None:
    compile(mutant.source(), mutant.path, "exec", dont_inherit=True)


def test_every_rule_has_one() -> None:
    assert {mutant.rule for mutant in MUTANTS} == BITTEN
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
