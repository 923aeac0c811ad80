"""The setting that `pushpull tables set` gives each of the tables that a pattern names.

A model's tables change together: those of its parameters, and those of its buffers, which have no
stale steps. So all of them are checked before the first changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidConfig
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction

_UNCHANGED = "No table has changed"


def new_settings(
    tables: Iterable[Table], names: Collection[str], wanted: Consistency
) -> dict[str, Consistency]:
    """The setting of each of these names, for the tables of one run. Tables of values, such as
    buffers, get `wanted` without its policy for stale steps.

    Raises:
        InvalidConfig: one of them cannot have it; or a late worker would skip steps on them that it
            does not skip on rows of an Embedding.
    """
    run = list(tables)
    if wanted.backup_workers and (rows := next((t for t in run if t.spec.rows), None)):
        raise InvalidConfig(
            f"a table would be under {wanted}, and the run has rows of '{rows.spec.name}': a "
            "worker whose step came too late would skip clocks that the rows do not, and all its "
            "later steps would be discarded; expected bsp without backup workers, ssp or asp. "
            f"{_UNCHANGED}"
        )
    found = {}
    for table in run:
        if table.spec.name in names:
            found[table.spec.name] = _new_setting(table, wanted)
    return found


def _new_setting(table: Table, wanted: Consistency) -> Consistency:
    spec = table.spec
    has_values = spec.optimizer.kind is OptimizerKind.ASSIGN
    setting = wanted.without_policy() if has_values else wanted
    try:
        replace(spec, consistency=setting).validated()
    except InvalidConfig as error:
        raise InvalidConfig(f"{error.message}. {_UNCHANGED}") from None
    is_averaged = has_values and spec.reduction is Reduction.MEAN
    if is_averaged and table.consistency.mode is Mode.BSP is not setting.mode:
        raise InvalidConfig(
            f"table '{spec.name}' has the mean of the workers' values (buffers='mean'), and under "
            f"{setting} nothing is averaged: expected bsp. {_UNCHANGED}"
        )
    return setting
