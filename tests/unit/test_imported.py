"""Which values of an imported state dict a table begins with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Imported, imported_name
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec, TensorSpec

URL = "/runs/7/00000001-imported"
SGD = OptimizerSpec(OptimizerKind.SGD)


def table(name: str, *tensors: TensorSpec, dtype: DType = DType.FLOAT32) -> TableSpec:
    count = sum(tensor.element_count for tensor in tensors)
    return TableSpec(name, dtype, count, SGD, 64, tensors).validated()


def tensors(**shapes: tuple[int, ...]) -> tuple[TensorSpec, ...]:
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


def test_nothing_imported_has_no_prefix() -> None:
    assert Imported.of(URL, []) == Imported(URL, "", {})
    assert replace(imported(), prefix="x").is_for("x")
