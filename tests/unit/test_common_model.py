"""The outer steps of a meeting: who takes them, and at which clock."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest

from ps_core.errors import EditRefused
from ps_worker.client.client import Client
from ps_worker.spec.optimizers import SGD
from ps_worker.training.common_model import (
    CommonModel,
    Share,
    enough_for_all,
    least_clock_of_all,
    may_be_behind,
    outer_takers,
)
from ps_worker.training.local_optimizer import OuterNeeds
from ps_worker.training.planned_edits import PlannedEdits
from tests.unit.table_client import TableClient, parameter, trained_tables


def shares_of(moved: tuple[bool, ...], *needs: OuterNeeds) -> list[Share]:
    """Those of the first workers; all have the same needs, or each its own."""
    each = needs * len(moved) if len(needs) == 1 else needs
    return [Share(rank, *found) for rank, found in enumerate(zip(moved, each, strict=True))]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_with_backup_workers_no_mover_is_pushed_out_by_one_that_stays(workers: int) -> None:
    """Either all that take the step are in the update, or all that do have moved."""
    for enough, moved in product(range(1, workers), product((False, True), repeat=workers)):
        takers = outer_takers(shares_of(moved, OuterNeeds(True, 4, enough)))
        movers = {rank for rank, has_moved in enumerate(moved) if has_moved}
        assert len(takers) == len(set(takers)) == (max(len(movers), enough) if movers else 0)
        assert movers <= set(takers)


def test_else_all_take_it_if_it_waits_for_others() -> None:
    for moved in ((True, False, False), (False, True, True)):
        assert sorted(outer_takers(shares_of(moved, OuterNeeds(True, 4, 0)))) == [0, 1, 2]
    assert outer_takers(shares_of((False, True, False), OuterNeeds(False, 0, 0))) == [1]
    assert outer_takers(shares_of((False, False), OuterNeeds(True, 4, 0))) == []


def test_the_setting_is_that_of_the_worker_that_is_furthest_on() -> None:
    """Others pass the clocks up to its own first. Its view may lack a worker that joins."""
    behind, on, joined = OuterNeeds(True, 3, 2), OuterNeeds(True, 5, 1), OuterNeeds(True, 4, 2)
    shares = shares_of((True, False, False), behind, on, joined)
    assert (least_clock_of_all(shares), enough_for_all(shares)) == (5, 2)
    shares = shares_of((True, False), behind, OuterNeeds(True, 5, 0))
    assert (least_clock_of_all(shares), enough_for_all(shares)) == (5, 0)


def test_where_views_differ_all_take_it() -> None:
    """One has heard that the next update has the steps of all."""
    enough, whole = OuterNeeds(True, 5, 2), OuterNeeds(True, 5, 0)
    for needs in ((enough, whole, enough), (whole, enough, enough), (enough, enough, whole)):
        assert sorted(outer_takers(shares_of((False, False, True), *needs))) == [0, 1, 2]


def test_who_took_no_part_in_the_last_step_with_backup_workers_passes_its_clock() -> None:
    """The next ones need all, and the others are a clock on."""
    on, behind = OuterNeeds(True, 6, 0), OuterNeeds(True, 5, 2)
    shares = shares_of((False, False, False), on, on, behind)
    assert outer_takers(shares) == []
    assert may_be_behind(shares)
    assert least_clock_of_all(shares) == 6
    assert not may_be_behind(shares_of((False, False), on))


def refused(edits: PlannedEdits, *, is_frozen: bool) -> str:
    """The words of `synchronize` about a change that autograd does not see."""
    changed, client = parameter(5.0), TableClient()
    changed.requires_grad_(not is_frozen)
    tables = trained_tables(SGD(lr=1.0), [changed], client=client)
    for table in tables:
        table.write_parameters()
    changed.data.fill_(2.0)
    common = CommonModel(cast(Client, client), "m", tables, [], edits)
    assert edits.found(tables, 3) == ({} if is_frozen else {tables[0]: [0]})
    with pytest.raises(EditRefused) as error:
        common.meet(None, is_pulled=True, outer=None)
    assert edits.found(tables, 3) == {tables[0]: [0]}, "the step that is the remedy takes it"
    assert edits.found(tables, 3) == {tables[0]: [0]}, "also after a wait"
    assert edits.found(tables, 4) == ({} if is_frozen else {tables[0]: [0]})
    return error.value.message


def test_a_change_of_frozen_parameters_that_synchronize_refuses_is_found_by_the_next_step() -> None:
    words = refused(PlannedEdits(), is_frozen=True)
    assert "Undo the change, or take a step() under BSP first. It is frozen: where" in words
    assert "give the optimizer only the parameters that it trains" in words
    words = refused(PlannedEdits(), is_frozen=False)
    assert words.endswith("Undo the change, or take a step() first")
