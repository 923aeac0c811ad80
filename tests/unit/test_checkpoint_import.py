"""`pushpull checkpoint import`: what is written, what a table reads of it, what is refused."""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ps_cli.checkpoint.export import export
from ps_cli.checkpoint.import_weights import _empty_store, _opened, _Source, _write, import_model
from ps_cli.console.output import Output
from ps_core.errors import InvalidCheckpoint, InvalidConfig, InvariantViolation
from ps_core.keys import TableId
from ps_core.manifest import Imported
from ps_core.rows import partition_of
from ps_core.tables.elements import DType, Initializer
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, TableSpec, TensorSpec
from ps_runtime.checkpoint.reader import CheckpointReader, problems_of
from ps_runtime.checkpoint.store import resolve
from ps_server.checkpoint.restored_values import RestoredTables
from tests.unit.checkpoint_files import CLUSTER_ID, write_checkpoint

BLOCK = 640


def state() -> dict[str, torch.Tensor]:
    """Tensors that begin and end in the middle of blocks, here and there."""
    torch.manual_seed(0)
    return {
        "small": torch.randn(3, 5),
        "large": torch.randn(70, 2_000),
        "nothing": torch.empty(0, 3),
        "one": torch.tensor(7.5),
        "wide": torch.randn(999, dtype=torch.float64),
        "count": torch.tensor(2**53),
        "mask": torch.tensor([True, False]),
        "low": torch.randn(1_000).to(torch.bfloat16),
        "half": torch.randn(77).to(torch.float16),
    }


def imported(tmp_path: Path, found: Any, name: str = "model.pt", prefix: str = "") -> str:
    file = tmp_path / name
    if name.endswith(".pt"):
        torch.save(found, file)
    else:
        safetensors.torch.save_file(found, file)
    import_model(file, str(tmp_path / "root"), prefix, Output())
    return str(tmp_path / "root")


def table_of(dtype: DType, tensors: dict[str, torch.Tensor]) -> Table:
    specs, end = [], 0
    for name, tensor in tensors.items():
        specs.append(TensorSpec(name, tuple(tensor.shape), end))
        end += tensor.numel()
    optimizer = OptimizerSpec(OptimizerKind.ADAM)
    spec = TableSpec("t", dtype, end, optimizer, BLOCK, tuple(specs)).validated()
    return Table(TableId(1), 0, spec)


def values_of(reader: CheckpointReader, table: Table) -> torch.Tensor:
    """All of a table, block by block, in an order in which ranges may ask."""
    kept = torch.float64 if table.spec.dtype is DType.FLOAT64 else torch.float32
    blocks = RestoredTables(reader).blocks_of(table)
    found = torch.full((table.spec.element_count,), torch.nan, dtype=kept)
    for block in (*range(1, table.block_count, 2), *range(0, table.block_count, 2)):
        stored = blocks.stored(block)
        assert (stored.version, stored.steps, stored.tensors) == (0, (0,), ("values",))
        room = found[block * BLOCK :][: table.block_length(block)].numpy().data.cast("B")
        blocks.read_into(block, "values", room)
    return found


ASKED = {
    DType.FLOAT32: ("one", "large", "nothing", "small"),  # in another order than in the file
    DType.FLOAT64: ("mask", "count", "wide"),
    DType.BFLOAT16: ("low",),
    DType.FLOAT16: ("half",),
}


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("dtype", ASKED)
def test_a_table_reads_its_tensors_wherever_they_lie(
    tmp_path: Path, name: str, dtype: DType
) -> None:
    found = state()
    url = imported(tmp_path, found, name)
    tensors = {each: found[each] for each in ASKED[dtype]}
    with resolve(url).reader as reader:
        assert reader.manifest.is_imported
        assert {(table.name, table.clock) for table in reader.manifest.tables} == {
            (dtype.value, 0) for dtype in ASKED
        }
        values = values_of(reader, table_of(dtype, tensors))
    expected = torch.cat([tensor.reshape(-1).to(values.dtype) for tensor in tensors.values()])
    assert torch.equal(values, expected)


def test_what_was_imported_has_values_only(tmp_path: Path) -> None:
    table = table_of(DType.FLOAT32, {"small": torch.zeros(3, 5)})
    with resolve(imported(tmp_path, state())).reader as reader:
        blocks = RestoredTables(reader).blocks_of(table)
        with pytest.raises(InvariantViolation, match="RB-1"):
            blocks.read_into(0, "exp_avg", memoryview(bytearray(60)))


@pytest.mark.parametrize("written", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("name", ["model.bin", "model", "model.pt", "model.safetensors"])
def test_a_file_is_known_by_its_content_whatever_its_name(
    tmp_path: Path, written: str, name: str
) -> None:
    found = {"one": torch.tensor(7.5)}
    other = tmp_path / "other"
    other.mkdir()
    imported(other, found, written)
    (other / written).rename(tmp_path / name)
    import_model(tmp_path / name, str(tmp_path / "root"), "", Output())
    with resolve(str(tmp_path / "root")).reader as reader:
        assert values_of(reader, table_of(DType.FLOAT32, found)) == torch.tensor([7.5])


def nested(path: Path) -> None:
    torch.save({"model": {"layer.weight": torch.zeros(3)}, "epoch": 4}, path)


def torch_script(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("constants.pkl", "data.pkl", "version"):
            archive.writestr(f"model/{name}", "3\n")


BAD_FILES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no torch file": ("model.pt", lambda p: p.write_text("hello"), "cannot be read: .*expected a"),
    "no safetensors": (
        "m.safetensors",
        lambda p: p.write_bytes(b"x" * 30),
        "cannot be read: .*expected a safetensors file, or",
    ),
    "torn": (
        "model.bin",
        lambda p: p.write_bytes(safetensors.torch.save({"w": torch.zeros(3)})[:-1]),
        "cannot be read: Error while deserializing header",
    ),
    "gone": ("model.pt", lambda _: None, "cannot be read: .*No such file"),
    "code": (
        "model.pt",
        lambda p: torch.save({"w": torch.zeros(3), "when": Path("x")}, p),
        r"has a pickled pathlib.*Path, .* unpickled; .*model.state_dict\(\)",
    ),
    "a whole module": (
        "model.pt",
        lambda p: torch.save(torch.nn.Linear(2, 2), p),
        r"has a pickled torch.nn.modules.linear.Linear, .* of model.state_dict\(\) ",
    ),
    "a pickle": (
        "model.pt",
        lambda p: p.write_bytes(pickle.dumps(Path("x"), protocol=2)),
        r"has a pickled pathlib.PosixPath, .* of model.state_dict\(\) ",
    ),
    "TorchScript": (
        "model.pt",
        torch_script,
        r"is a TorchScript archive; .* of model.state_dict\(\) ",
    ),
    "a list": (
        "model.pt",
        lambda p: torch.save([torch.zeros(3)], p),
        "is a list; expected a state",
    ),
    "more than tensors": (
        "model.pt",
        nested,
        "'model' is a dict; expected names and tensors alone",
    ),
    "no table's type": (
        "model.pt",
        lambda p: torch.save({"z": torch.zeros(3, dtype=torch.complex64)}, p),
        "tensor 'z' is torch.complex64 .*; expected a dense one of float32",
    ),
    "sparse": (
        "model.pt",
        lambda p: torch.save({"s": torch.eye(3).to_sparse()}, p),
        r"tensor 's' is torch.float32 \(torch.sparse_coo\)",
    ),
    "large integers": (
        "model.pt",
        lambda p: torch.save({"n": torch.tensor(2**53 + 1)}, p),
        "'n' has integers that float64",
    ),
    "ids of rows that are no ids": (
        "model.pt",
        lambda p: torch.save({"u/ids": torch.zeros(3), "u/rows": torch.zeros(3, 2)}, p),
        r"'u/ids' is torch.float32 of shape \(3,\); expected int64 ids of rows",
    ),
    "nothing": ("model.pt", lambda p: torch.save({}, p), "has no tensor with elements"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_is_no_state_dict_is_refused(tmp_path: Path, what: str) -> None:
    name, write, words = BAD_FILES[what]
    write(tmp_path / name)
    with pytest.raises(InvalidConfig) as refused:
        import_model(tmp_path / name, str(tmp_path / "root"), "", Output())
    assert re.search(words, refused.value.message), refused.value.message
    assert "weights_only" not in refused.value.message
    assert refused.value.message.isprintable()
    assert not (tmp_path / "root").exists()


def row_table(name: str, length: int = 3, dtype: DType = DType.FLOAT32) -> Table:
    sgd, rows = OptimizerSpec(OptimizerKind.SGD), RowsSpec(5, seed=3)
    spec = TableSpec(name, dtype, length, sgd, initializer=Initializer(), rows=rows)
    return Table(TableId(1), 0, spec.validated())


@pytest.mark.parametrize("prefix", ["", "model"])
@pytest.mark.parametrize("form", ["rows with ids", "weights"])
def test_partitions_are_put_together_of_rows(tmp_path: Path, form: str, prefix: str) -> None:
    """Of many blocks of a file, beside other tensors; ids keep all their bits."""
    count, table = 50_000, row_table("model/users" if prefix else "users")
    rows = torch.randn(count, 3)
    ids = torch.arange(count)
    found = {"before": torch.randn(77), "users.weight": rows, "n": torch.tensor(7)}
    if form == "rows with ids":
        ids = torch.randint(-(2**63), 2**63 - 1, (count,))
        del found["users.weight"]
        found |= {"users/ids": ids, "users/rows": rows}
    with resolve(imported(tmp_path, found, prefix=prefix)).reader as reader:
        blocks = RestoredTables(reader).blocks_of(table)
        seen: dict[int, torch.Tensor] = {}
        assert table.spec.rows is not None
        for block in range(5):
            assert set(blocks.stored(block).tensors) == {"values", "ids"}
            memory = {n: bytearray(blocks.byte_count(block, n)) for n in ("ids", "values")}
            for name, target in memory.items():
                blocks.read_into(block, name, memoryview(target))
            own = torch.frombuffer(memory["ids"], dtype=torch.int64)
            assert all(
                partition_of(each % 2**64, table.spec.rows) == block for each in own[:9].tolist()
            )
            values = torch.frombuffer(memory["values"], dtype=torch.float32).reshape(-1, 3)
            seen |= dict(zip(own.tolist(), values, strict=True))
    assert len(seen) == count
    assert torch.equal(torch.stack([seen[each] for each in ids.tolist()]), rows)


def test_rows_that_do_not_fit_their_table_are_refused(tmp_path: Path) -> None:
    found = {"a.weight": torch.zeros(4, 2), "b/ids": torch.arange(5), "b/rows": torch.zeros(4, 3)}
    with resolve(imported(tmp_path, found)).reader as reader:
        specs = [table.spec for table in reader.tables.values()]
    cases = {
        row_table("a"): r"'a.weight', .* is \(4, 2\) of float32 .*; expected \(rows, 3\)",
        row_table("a", 2, DType.FLOAT64): "of float32 .* of float64",
        row_table("b"): r"'b/ids' is \(5,\) .*; expected \(4,\), as many as 'b/rows' has rows",
        row_table("c"): "rows of table 'c' are not in .*; expected 'c/rows' or 'c.weight' or 'c'",
    }
    for table, words in cases.items():
        with pytest.raises(InvalidCheckpoint, match=words):
            Imported.of("runs/8", specs).check(table.spec)


def test_a_place_that_has_checkpoints_is_refused(tmp_path: Path) -> None:
    url = imported(tmp_path, state())
    with pytest.raises(InvalidConfig, match=r"checkpoints already.*, the newest 00000001-imp"):
        imported(tmp_path, state())
    for one in (f"{url}/00000001-imported", f"{tmp_path}/00000007-none"):
        with pytest.raises(InvalidConfig, match="is a checkpoint's own directory; expected a root"):
            import_model(tmp_path / "model.pt", one, "", Output())
    with pytest.raises(InvalidConfig, match="prefix is '/model'; expected a name"):
        imported(tmp_path, state(), prefix="/model")


def test_a_runs_own_checkpoint_counts_as_newer(tmp_path: Path) -> None:
    url = imported(tmp_path, state())
    with resolve(url).reader as reader:
        write_checkpoint(reader.directory.sibling(f"00000002-{CLUSTER_ID[:8]}"), 2)
    with resolve(url).reader as reader:
        assert not reader.manifest.is_imported


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_what_goes_wrong_elsewhere_is_not_the_files_fault(tmp_path: Path, name: str) -> None:
    imported(tmp_path, {"a": torch.ones(3)}, name)
    with pytest.raises(RuntimeError, match="no memory"), _opened(tmp_path / name):
        raise RuntimeError("no memory")


def test_an_import_that_is_broken_off_leaves_nothing(tmp_path: Path) -> None:
    """Not even a directory, which the next one would take for a checkpoint."""

    def broken_off() -> torch.Tensor:
        raise KeyboardInterrupt

    store = _empty_store(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        _write(store, [_Source("a", DType.FLOAT32, (3,), broken_off)], "", "imported")
    assert not list(tmp_path.iterdir())
    _empty_store(str(tmp_path))


def test_an_import_goes_on_where_another_was_killed_and_waits_for_none_under_way(
    tmp_path: Path,
) -> None:
    """What a killed one leaves is no checkpoint, and nobody holds it."""
    root = tmp_path / "root"
    left = root / "00000001-imported"
    left.mkdir(parents=True)
    (left / ".imported.safetensors.tmp").write_bytes(b"torn" * 100_000)
    descriptor = os.open(left, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(InvalidCheckpoint, match=f"{left} is being written by another process"):
            imported(tmp_path, state())
        assert [each.name for each in left.iterdir()] == [".imported.safetensors.tmp"]
    finally:
        os.close(descriptor)
    imported(tmp_path, state())
    assert sorted(each.name for each in left.iterdir()) == ["imported.safetensors", "manifest.json"]
    with resolve(str(root)).reader as reader:
        assert problems_of(reader.directory) == []


def test_what_was_imported_is_exported_with_its_ids(tmp_path: Path) -> None:
    found = {
        "users/ids": torch.tensor([5, -3, 2**62 + 1]),
        "users/rows": torch.ones(3, 4),
        "wide": torch.randn(7, dtype=torch.float64),
        "posts/ids": torch.tensor([9, 2**63 - 1]),
        "posts/rows": torch.zeros(2, 3, dtype=torch.float64),
    }
    url, out = imported(tmp_path, found, "rows.safetensors"), tmp_path / "out.safetensors"
    assert export(url, out, "", None, Output()) == 0
    exported = safetensors.torch.load_file(out)
    assert {name: each.dtype for name, each in exported.items()} == {
        name: each.dtype for name, each in found.items()
    }
    for name, each in found.items():
        assert torch.equal(exported[name], each), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_table_of_rows_that_had_none_is_imported_with_none(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    found = {
        "users/ids": torch.zeros(0, dtype=torch.int64),
        "users/rows": torch.zeros((0, 3), dtype=dtype),
        "layer": torch.randn(7),
    }
    url, out = imported(tmp_path, found, "rows.safetensors"), tmp_path / "out.safetensors"
    own = DType.FLOAT64 if dtype is torch.float64 else DType.FLOAT32
    with resolve(url).reader as reader:
        blocks = RestoredTables(reader).blocks_of(row_table("users", dtype=own))
        memory = bytearray(blocks.byte_count(0, "values"))
        blocks.read_into(0, "values", memoryview(memory))
        assert not memory
    assert export(url, out, "", None, Output()) == 0
    exported = safetensors.torch.load_file(out)
    assert exported["users/ids"].dtype is torch.int64
    assert {name: each.shape for name, each in exported.items()} == {
        name: each.shape for name, each in found.items()
    }
