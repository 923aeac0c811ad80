"""The settings that `pushpull tables set` gives the tables of a model, all of them or none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_cli.tables.new_settings import new_settings
from ps_core.consistency import parsed
from ps_core.errors import InvalidConfig
from ps_core.keys import TableId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction, RowsSpec, TableSpec

SGD, ASSIGN = OptimizerSpec(OptimizerKind.SGD), OptimizerSpec(OptimizerKind.ASSIGN)
MODEL = TableSpec(name="model/0/float32", dtype=DType.FLOAT32, element_count=64, optimizer=SGD)
BUFFERS = replace(MODEL, name="model/buffers/float32", optimizer=ASSIGN, reduction=Reduction.SUM)
MEAN = replace(BUFFERS, reduction=Reduction.MEAN)
ROWS = replace(MODEL, name="users", rows=RowsSpec(8))


def settings_of(text: str, *specs: TableSpec, names: str = "") -> dict[str, str]:
    """What the tables of one run become, those of these names, or all."""
    tables = [Table(TableId(1 + n), 100 * n, spec) for n, spec in enumerate(specs)]
    changed = names.split() or [spec.name for spec in specs]
    return {name: str(new) for name, new in new_settings(tables, changed, parsed(text)).items()}


@pytest.mark.parametrize("text", ["asp:divide", "asp:reject=8", "asp:compensate=0.04"])
def test_buffers_have_no_policy_for_stale_steps(text: str) -> None:
    """Else they stay synchronous, and the parameters beside them are not: workers would wait."""
    assert settings_of(text, MODEL, BUFFERS) == {MODEL.name: text, BUFFERS.name: "asp"}


def test_no_table_changes_if_one_of_them_cannot() -> None:
    sums = replace(MODEL, name="sums", optimizer=OptimizerSpec(OptimizerKind.AGGREGATE))
    with pytest.raises(InvalidConfig, match=r"'sums': AGGREGATE needs BSP.*No table has changed"):
        settings_of("asp", MODEL, sums)
    assert settings_of("asp", MODEL, sums, names=MODEL.name) == {MODEL.name: "asp"}


def test_a_mean_of_buffers_stays_under_bsp() -> None:
    """Elsewhere each worker's replace the others'."""
    for text in ("asp", "ssp:2"):
        with pytest.raises(InvalidConfig, match=f"under {text} nothing is averaged: expected bsp"):
            settings_of(text, MODEL, MEAN)
    backup = "bsp:backup=1"
    assert settings_of(backup, MODEL, MEAN) == {MODEL.name: backup, MEAN.name: backup}


@pytest.mark.parametrize("names", ["users", "model/0/float32"])
def test_no_backup_workers_beside_rows(names: str) -> None:
    """Every step of a worker that was late once would be discarded from then on."""
    with pytest.raises(InvalidConfig, match=r"rows of 'users'.*No table has changed"):
        settings_of("bsp:backup=1", MODEL, ROWS, names=names)
    assert settings_of("ssp:2", MODEL, ROWS) == {MODEL.name: "ssp:2", ROWS.name: "ssp:2"}
