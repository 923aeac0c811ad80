"""Which values of an imported state dict a table begins with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Imported, ImportedRows, has_ids, imported_name
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import RowsSpec, TableSpec, TensorSpec

URL = "/runs/7/00000001-imported"
SGD = OptimizerSpec(OptimizerKind.SGD)


def table(name: str, *tensors: TensorSpec, dtype: DType = DType.FLOAT32) -> TableSpec:
    count = sum(tensor.element_count for tensor in tensors)
    return TableSpec(name, dtype, count, SGD, 64, tensors).validated()


def tensors(**shapes: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    return _placed(shapes)


def _placed(shapes: dict[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    found, end = [], 0
    for name, shape in shapes.items():
        found.append(TensorSpec(name, shape, end))
        end += found[-1].element_count
    return tuple(found)


def imported(prefix: str = "") -> Imported:
    return Imported.of(
        URL,
        [
            table(imported_name(prefix, DType.FLOAT32), *tensors(a=(2, 3), b=(5,), c=())),
            table(
                imported_name(prefix, DType.FLOAT64), *tensors(n=(1,), m=(2,)), dtype=DType.FLOAT64
            ),
        ],
    )


def test_tables_are_named_by_their_type() -> None:
    assert imported_name("", DType.BFLOAT16) == "bfloat16"
    assert imported_name("model", DType.FLOAT32) == "model/float32"


def test_tensors_are_found_by_name_wherever_they_lie() -> None:
    found = imported().places(table("model/0/float32", *tensors(c=(), b=(5,))))
    assert found == {"c": ("float32", 11), "b": ("float32", 6)}
    wide = table("model/buffers/integer", *tensors(m=(2,)), dtype=DType.FLOAT64)
    assert imported("model").places(wide) == {"m": ("model/float64", 1)}


def test_a_tensor_without_elements_is_not_looked_for() -> None:
    assert imported().places(table("t", *tensors(nothing=(0, 4), a=(2, 3)))).keys() == {"a"}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (
            table("t", *tensors(a=(2, 3), x=(2,))),
            (
                f"tensor 'x' of table 't' is not in {URL}, which was imported for all tables; "
                "expected all of the table's tensors, or an import with --prefix, the name of one "
                "model"
            ),
        ),
        (
            table("t", *tensors(a=(3, 2))),
            f"tensor 'a' of table 't' is (2, 3) of float32 in {URL}; expected (3, 2) of float32",
        ),
        (
            table("t", *tensors(a=(2, 3)), dtype=DType.FLOAT16),
            f"tensor 'a' of table 't' is (2, 3) of float32 in {URL}; expected (2, 3) of float16",
        ),
    ],
)
def test_what_is_not_there_or_is_another_is_refused(wanted: TableSpec, words: str) -> None:
    with pytest.raises(InvalidCheckpoint) as refused:
        imported().places(wanted)
    assert refused.value.message == words


def test_a_prefix_is_named_in_the_refusal() -> None:
    with pytest.raises(InvalidCheckpoint, match="imported for the tables of 'model'; expected"):
        imported("model").places(table("model/0", *tensors(x=(2,))))


@pytest.mark.parametrize(
    ("prefix", "name", "expected"),
    [
        ("", "anything", True),
        ("model", "model", True),
        ("model", "model/0/float32", True),
        ("model", "models/0/float32", False),
        ("model", "other/model/0", False),
    ],
)
def test_it_is_for_the_tables_of_its_prefix(prefix: str, name: str, expected: bool) -> None:
    assert imported(prefix).is_for(name) is expected
    assert imported(prefix).prefix == prefix


def test_what_nobody_knows_is_named() -> None:
    assert list(imported().unknown(["a", "c", "m", "z"])) == ["b", "n"]


# --- rows


def rows_table(name: str, length: int = 3, dtype: DType = DType.FLOAT32) -> TableSpec:
    return TableSpec(name, dtype, length, SGD, rows=RowsSpec(16)).validated()


def imported_rows(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> Imported:
    """Rows of float32, and ids, which are float64 by name."""
    ids = {name: shape for name, shape in shapes.items() if name.endswith("ids")}
    rows = {name: shape for name, shape in shapes.items() if name not in ids}
    found = [table(imported_name(prefix, DType.FLOAT32), *_placed(rows))]
    if ids:
        wide = imported_name(prefix, DType.FLOAT64)
        found.append(table(wide, *_placed(ids), dtype=DType.FLOAT64))
    return Imported.of(URL, found)


EXPORTED = {"t/rows": (5, 3), "t/ids": (5,)}


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (EXPORTED, ImportedRows("t/rows", "t/ids")),
        ({"t.weight": (4, 3)}, ImportedRows("t.weight")),
        ({"t": (2, 3)}, ImportedRows("t")),
        ({"t": (2, 3), "t.weight": (4, 3), **EXPORTED}, ImportedRows("t/rows", "t/ids")),
        ({"t": (2, 3), "t.weight": (4, 3)}, ImportedRows("t.weight")),
        ({"t/rows": (5, 3), "t": (2, 3)}, ImportedRows("t")),
    ],
)
def test_rows_are_called_what_export_calls_them_or_torch(
    shapes: dict[str, tuple[int, ...]], expected: ImportedRows
) -> None:
    """An export has ids beside the rows: alone, they are none of it."""
    found = imported_rows(shapes)
    assert found.rows_of(rows_table("t")) == expected
    found.check(rows_table("t"))


def test_rows_of_one_model_are_found_with_its_name_and_without() -> None:
    spec = rows_table("model/t")
    short = imported_rows(EXPORTED, "model")
    assert short.rows_of(spec) == ImportedRows("t/rows", "t/ids")
    both = imported_rows({"t.weight": (4, 3), "model/t.weight": (4, 3)}, "model")
    assert both.rows_of(spec) == ImportedRows("model/t.weight")
    with pytest.raises(InvalidCheckpoint):
        imported_rows(EXPORTED).rows_of(spec)


@pytest.mark.parametrize(
    ("shapes", "spec", "words"),
    [
        (
            EXPORTED,
            rows_table("x"),
            (
                f"the rows of table 'x' are not in {URL}, which was imported for all tables; "
                "expected 'x/rows' or 'x.weight' or 'x', or an import with --prefix, the name of "
                "one model"
            ),
        ),
        (
            EXPORTED,
            rows_table("t", length=4),
            (
                f"tensor 't/rows', with the rows of table 't', is (5, 3) of float32 in {URL}; "
                "expected (rows, 4) of float32"
            ),
        ),
        (
            EXPORTED,
            rows_table("t", dtype=DType.FLOAT64),
            (
                f"tensor 't/rows', with the rows of table 't', is (5, 3) of float32 in {URL}; "
                "expected (rows, 3) of float64"
            ),
        ),
        (
            {**EXPORTED, "t/ids": (4,)},
            rows_table("t"),
            f"tensor 't/ids' is (4,) in {URL}; expected (5,), as many as 't/rows' has rows",
        ),
    ],
)
def test_rows_that_are_not_there_or_are_others_are_refused(
    shapes: dict[str, tuple[int, ...]], spec: TableSpec, words: str
) -> None:
    with pytest.raises(InvalidCheckpoint) as refused:
        imported_rows(shapes).check(spec)
    assert refused.value.message == words


def test_a_table_without_rows_is_checked_by_its_tensors() -> None:
    imported().check(table("t", *tensors(a=(2, 3))))
    with pytest.raises(InvalidCheckpoint, match="tensor 'x' of table 't' is not in"):
        imported().check(table("t", *tensors(x=(2, 3))))


@pytest.mark.parametrize(
    ("name", "beside", "expected"),
    [
        ("t/ids", "t/rows", True),
        ("model/t/ids", "model/t/rows", True),
        ("t/ids", "rows", False),
        ("t/rows", "t/rows", False),
        ("ids", "rows", False),
    ],
)
def test_ids_lie_beside_their_rows(name: str, beside: str, expected: bool) -> None:
    assert has_ids(name, {name, beside}) is expected


def test_nothing_imported_has_no_prefix() -> None:
    assert Imported.of(URL, []) == Imported(URL, "", {})
    assert replace(imported(), prefix="x").is_for("x")
