"""`pushpull checkpoint export --since`: with its file the earlier export becomes the later one, bit
by bit, and the file has no more than dictionaries say. `diff` counts the same rows.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from numpy.typing import NDArray

import ps_worker as ps
from ps_core.rows import partition_of
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import RowsSpec, TableSpec, TensorSpec
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_runtime.checkpoint.store import CheckpointStore
from tests.integration.command_line import run, run_here
from tests.unit.checkpoint_files import CLUSTER_ID, block_count, saved

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

Rows = dict[int, NDArray[Any]]
Content = dict[str, Any]
"""By table: rows by id, or a dense table's vector."""

DIM, PARTITIONS = 3, 4
SGD = OptimizerSpec(OptimizerKind.SGD)
FIRST, SECOND = (f"0000000{number}-{CLUSTER_ID[:8]}" for number in (1, 2))
ELEMENTS = {DType.FLOAT64: ("<f8", "F64")}


def rows_spec(
    name: str, dtype: DType = DType.FLOAT32, dim: int = DIM, count: int = PARTITIONS, seed: int = 0
) -> TableSpec:
    return TableSpec(name, dtype, dim, SGD, rows=RowsSpec(count, seed)).validated()


def dense_spec(name: str, dtype: DType, *tensors: TensorSpec) -> TableSpec:
    count = tensors[-1].offset + tensors[-1].element_count
    return TableSpec(name, dtype, count, SGD, 64, tensors).validated()


USERS, WIDE = rows_spec("users"), rows_spec("wide", DType.FLOAT64)
MODEL = dense_spec(
    "model", DType.FLOAT32,
    TensorSpec("first", (10, 10), 0),  # it ends in the second of seven blocks
    TensorSpec("empty", (0, 3), 100),
    TensorSpec("scalar", (), 100),
    TensorSpec("last", (299,), 101),
)  # fmt: skip
HALF = dense_spec(
    "half", DType.BFLOAT16, TensorSpec("low", (60,), 0), TensorSpec("high", (60,), 60)
)
BUFFERS = dense_spec(
    "buffers", DType.FLOAT64, TensorSpec("seen", (70,), 0), TensorSpec("left", (30,), 70)
)
SPECS = (USERS, WIDE, MODEL, HALF, BUFFERS)


@dataclass(frozen=True)
class Made:
    """A checkpoint to write, and by whom; a table without content has none but zeros."""

    number: int
    content: Content = field(default_factory=dict)
    specs: Sequence[TableSpec] = SPECS
    timeline: bytes = b"t" * 16
    lineage: tuple[bytes, ...] = ()

    def write(self, root: Path) -> Path:
        """Write it as one server's part; returns its directory."""
        directory = CheckpointStore(str(root)).directory(self.number, CLUSTER_ID)
        directory.create()
        path = directory.begin("server-1.safetensors")
        writer = PartWriter(
            path, [PlannedTable(s.name, 100, ("values", "ids")) for s in self.specs]
        )
        counts = {spec.name: self._append(writer, spec) for spec in self.specs}
        part = writer.finish(self.number, CLUSTER_ID)
        directory.commit("server-1.safetensors", path)
        manifest = saved(self.specs, "server-1.safetensors", part, counts)
        named = replace(manifest, number=self.number, timeline=self.timeline)
        directory.write_manifest(replace(named, lineage=self.lineage))
        return root / directory.name

    def _append(self, writer: PartWriter, spec: TableSpec) -> int:
        element, dtype = ELEMENTS.get(spec.dtype, ("<f4", "F32"))
        length = spec.block_elements
        for block in range(block_count(spec)):
            if spec.rows is not None:
                found = self.content.get(spec.name, {})
                ids = [each for each in found if partition_of(each, spec.rows) == block]
                values = np.array([found[each] for each in ids], element)
                writer.append(spec.name, block, "ids", np.array(ids, "<u8").tobytes(), "U64")
            else:
                vector = self.content.get(spec.name, np.zeros(spec.element_count, element))
                values = vector[block * length : (block + 1) * length]
            writer.append(spec.name, block, "values", values.tobytes(), dtype)
            writer.note_block(spec.name, block, self.number, [0])
        return block_count(spec)


def place_of(row_id: int) -> int:
    """The partition of a user."""
    assert USERS.rows is not None
    return partition_of(row_id, USERS.rows)


def drawn(draws: np.random.Generator) -> Content:
    """Content of all tables. Some rows differ only in their bits, and not as numbers do."""
    found: Content = {}
    for spec, element in ((USERS, np.float32), (WIDE, np.float64)):
        ids = [*map(int, draws.choice(10**6, 40, replace=False)), 2**63 + 5, 2**64 - 1]
        values = np.array([0.0, -0.0, np.nan, 1.5], element)
        found[spec.name] = {each: draws.choice(values, DIM) for each in ids}
    for spec in (MODEL, HALF, BUFFERS):
        vector = draws.standard_normal(spec.element_count)
        found[spec.name] = vector.astype(ELEMENTS.get(spec.dtype, ("<f4", ""))[0])
    return found


def later_than(before: Content, draws: np.random.Generator) -> Content:
    """The content after training: rows changed, came, went and moved; four tensors of eight
    changed in an element.
    """
    found: Content = {}
    for name in (USERS.name, WIDE.name):
        ids = list(before[name])
        draws.shuffle(ids)
        rows = {each: before[name][each].copy() for each in ids[6:]}
        for each in ids[6:12]:
            rows[each][1] = -rows[each][1]
        new = {2**40 + each: np.ones(DIM, rows[ids[6]].dtype) for each in range(5)}
        found[name] = new | rows
    for spec, places in ((MODEL, [99, 110]), (HALF, [3]), (BUFFERS, [99])):
        found[spec.name] = before[spec.name].copy()
        found[spec.name][places] += 1
    return found


@dataclass(frozen=True)
class File:
    """An exported file: each tensor's dtype, shape and bytes, and of each table of rows these."""

    notes: dict[str, str]
    dense: dict[str, tuple[str, list[int], bytes]]
    rows: dict[str, dict[int, bytes]]
    gone: dict[str, list[int]]

    @classmethod
    def read(cls, path: Path) -> File:
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        notes, found = header.pop("__metadata__"), {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            payload = content[begin + first : begin + end]
            found[name] = entry["dtype"], entry["shape"], payload
        assert set(safetensors.torch.load_file(path)) == set(found)
        rows, gone = dict[str, dict[int, bytes]](), dict[str, list[int]]()
        for table in [name.removesuffix("/ids") for name in found if name.endswith("/ids")]:
            ids = np.frombuffer(found.pop(f"{table}/ids")[2], np.uint64).tolist()
            _, shape, payload = found.pop(f"{table}/rows")
            width = len(payload) // max(1, shape[0])
            own = [payload[at * width : (at + 1) * width] for at in range(shape[0])]
            assert len(set(ids)) == len(ids)
            rows[table] = dict(zip(ids, own, strict=True))
            if f"{table}/gone" in found:
                gone[table] = np.frombuffer(found.pop(f"{table}/gone")[2], np.uint64).tolist()
        return cls(notes, found, rows, gone)

    def applied_to(self, earlier: File) -> File:
        """The earlier export with this file's differences."""
        rows = {table: dict(found) for table, found in earlier.rows.items()}
        for table, changed in self.rows.items():
            for each in self.gone[table]:
                del rows[table][each]
            rows.setdefault(table, {}).update(changed)
        return File(earlier.notes, earlier.dense | self.dense, rows, {})


@dataclass(frozen=True)
class Exports:
    """The exports of two checkpoints, and of the difference; `said` is its output."""

    earlier: File
    later: File
    since: File
    said: str


def exported(first: Path, second: Path, *options: str) -> Exports:
    files, said = list[File](), ""
    for url, more in ((first, ()), (second, ()), (second, ("--since", str(first)))):
        out = first.parent.with_name(f"{len(files)}.safetensors")
        ended = run_here(
            "checkpoint", "export", str(url), str(out), *options, *more, cwd=first.parent
        )
        assert ended.returncode == 0, ended.stderr
        files.append(File.read(out))
        said = ended.stdout
    earlier, later, since = files
    return Exports(earlier, later, since, said)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints 1 and 2 of a run."""
    draws = np.random.default_rng(3)
    before = drawn(draws)
    Made(1, before).write(tmp_path / "root")
    Made(2, later_than(before, draws)).write(tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_the_earlier_export_becomes_the_later_one(seed: int, tmp_path: Path) -> None:
    draws = np.random.default_rng(seed)
    before = drawn(draws)
    after = later_than(before, draws)
    first, second = (Made(n, c).write(tmp_path / "root") for n, c in ((1, before), (2, after)))
    found = exported(first, second)
    assert found.since.applied_to(found.earlier) == found.later
    for name in (USERS.name, WIDE.name):
        was, now = ({i: r.tobytes() for i, r in each[name].items()} for each in (before, after))
        assert found.since.rows[name] == {i: r for i, r in now.items() if was.get(i) != r}
        assert sorted(found.since.gone[name]) == sorted(was.keys() - now.keys())
        words = "11 of 41 rows changed (5 of them new), 6 of 42 are gone"
        assert f"{name}: {words}\n" in found.said
    assert set(found.since.dense) == {"first", "last", "low", "left"}
    assert "model: 2 of 4 tensors differ\n" in found.said
    assert found.since.notes == {"format": "pt", "since": FIRST, "checkpoint": SECOND}
    assert found.said.endswith(
        f"2.safetensors: 10 tensors that turn the export of {first} into that of {second}\n"
    )


def test_rows_in_another_order_are_no_difference(tmp_path: Path) -> None:
    before = drawn(np.random.default_rng(0))
    after = before | {USERS.name: dict(reversed(before[USERS.name].items()))}
    first, second = (Made(n, c).write(tmp_path / "root") for n, c in ((1, before), (2, after)))
    found = exported(first, second)
    assert found.since.applied_to(found.earlier) == found.later
    assert found.since.rows == {"users": {}, "wide": {}}
    assert found.since.gone == {"users": [], "wide": []}
    assert not found.since.dense
    assert "users: 0 of 42 rows changed (0 of them new), 0 of 42 are gone\n" in found.said


def test_an_id_in_the_place_of_another_with_the_same_values_is_a_difference(tmp_path: Path) -> None:
    before = drawn(np.random.default_rng(0))
    old = next(iter(before["users"]))
    new = next(each for each in range(2**41, 2**42) if place_of(each) == place_of(old))
    rows = {new if each == old else each: row for each, row in before["users"].items()}
    after = before | {"users": rows}
    first, second = (Made(n, c).write(tmp_path / "root") for n, c in ((1, before), (2, after)))
    found = exported(first, second)
    assert found.since.applied_to(found.earlier) == found.later
    assert (list(found.since.rows["users"]), found.since.gone["users"]) == ([new], [old])


@pytest.mark.thorough
def test_every_row_of_a_table_may_go_and_come_again(tmp_path: Path) -> None:
    full = drawn(np.random.default_rng(0))
    none = full | {USERS.name: {}}
    paths = [Made(n, c).write(tmp_path / "root") for n, c in ((1, full), (2, none), (3, full))]
    for first, second, words in (
        (paths[0], paths[1], "0 of 0 rows changed (0 of them new), 42 of 42 are gone"),
        (paths[1], paths[2], "42 of 42 rows changed (42 of them new), 0 of 0 are gone"),
        (paths[0], paths[2], "0 of 42 rows changed (0 of them new), 0 of 42 are gone"),
    ):
        found = exported(first, second)
        assert found.since.applied_to(found.earlier) == found.later
        assert f"users: {words}\n" in found.said


def test_a_table_that_is_new_is_there_whole(tmp_path: Path) -> None:
    content = drawn(np.random.default_rng(0))
    first = Made(1, content, (USERS, HALF, BUFFERS)).write(tmp_path / "root")
    found = exported(first, Made(2, content).write(tmp_path / "root"))
    assert found.since.applied_to(found.earlier) == found.later
    assert set(found.since.dense) == {"first", "empty", "scalar", "last"}
    assert not found.since.rows["users"]
    assert "wide: 42 of 42 rows changed (42 of them new), 0 of 0 are gone\n" in found.said


def test_one_models_tables_are_taken_alone(root: Path) -> None:
    found = exported(root / FIRST, root / SECOND, "--prefix", "users")
    assert (set(found.since.rows), set(found.since.dense)) == ({"users"}, set())


def test_a_run_that_went_on_under_another_root_is_the_same_run(root: Path) -> None:
    after = Made(1, drawn(np.random.default_rng(9)), timeline=b"u" * 16, lineage=(b"t" * 16,))
    found = exported(root / SECOND, after.write(root.with_name("next")))
    assert found.since.applied_to(found.earlier) == found.later


def spoil(checkpoint: Path, tensor: str) -> None:
    """Another first byte of a tensor."""
    path = checkpoint / "server-1.safetensors"
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin + json.loads(content[8:begin])[tensor]["data_offsets"][0]] ^= 1
    path.write_bytes(content)


@pytest.mark.thorough
def test_what_is_the_same_in_both_is_not_read(tmp_path: Path) -> None:
    before = drawn(np.random.default_rng(0))
    changed = next(each for each in before["users"] if place_of(each) == 2)
    after = before | {"users": before["users"] | {changed: np.zeros(DIM, np.float32)}}
    after["model"] = before["model"].copy()
    after["model"][200] += 1  # in block 3
    first, second = (Made(n, c).write(tmp_path / "root") for n, c in ((1, before), (2, after)))
    for tensor in ("users/1/values", "users/3/ids", "wide/0/values", "model/0/values"):
        spoil(first, tensor)
    out = tmp_path / "out.safetensors"
    command = ("checkpoint", "export", str(second), str(out), "--since", str(first))
    ended = run(*command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert list(File.read(out).rows["users"]) == [changed]
    spoil(first, "users/2/values")
    ended = run_here(*command, cwd=tmp_path)
    assert ended.returncode == 1
    assert re.search(
        rf"{FIRST}/server-1.safetensors: tensor 'users/2/values' is damaged: .*; expected --since "
        "of a good checkpoint, or export all of it, without --since",
        ended.stderr,
    )
    spoil(first, "users/2/values")
    spoil(second, "users/2/values")
    ended = run_here(*command, cwd=tmp_path)
    assert ended.returncode == 1
    assert f"{SECOND}/server-1.safetensors: tensor 'users/2/values' is damaged" in ended.stderr
    assert "--since" not in ended.stderr


def test_ids_and_rows_that_do_not_fit_are_refused(root: Path) -> None:
    content = {"users": {each: np.zeros(DIM + 1, np.float32) for each in range(40)}}
    second = Made(3, content).write(root)
    command = ("checkpoint", "export", str(second), "out.safetensors")
    ended = run_here(*command, "--since", str(root / FIRST), cwd=root.parent)
    assert ended.returncode == 1
    words = r"partition 0 of table 'users' has (\d+) bytes of ids and (\d+) of values; expected row"
    found = re.search(words, ended.stderr)
    assert found, ended.stderr
    assert int(found[2]) == int(found[1]) // 8 * 4 * (DIM + 1)


OTHERS = {
    "another run": (Made(1, timeline=b"o" * 16), f"{SECOND} is of another run than .*{FIRST}"),
    "an import": (Made(1, timeline=b""), f"{SECOND} is of another run than .*{FIRST}"),
    "a branch": (
        Made(1, timeline=b"o" * 16, lineage=(b"a" * 16,)),
        f"{SECOND} is of another run than .*{FIRST}",
    ),
    "a newer run": (
        Made(1, timeline=b"o" * 16, lineage=(b"t" * 16,)),
        f"{FIRST}, which --since names, is newer than .*{SECOND}; expected them the other way",
    ),
    "a newer one": (Made(3), f"-3fa9c1d2, which --since names, is newer than .*{SECOND}"),
    "wider rows": (
        Made(1, specs=(rows_spec("users", dim=4), *SPECS[1:])),
        "'users' is rows of 3 elements of float32 in 4 partitions with seed 0 in .*, and rows of 4",
    ),
    "rows of another type": (
        Made(1, specs=(rows_spec("users", DType.FLOAT64), *SPECS[1:])),
        "and rows of 3 elements of float64 in 4 partitions",
    ),
    "other partitions": (
        Made(1, specs=(rows_spec("users", count=8), *SPECS[1:])),
        "and rows of 3 elements of float32 in 8 partitions",
    ),
    "another seed": (
        Made(1, specs=(rows_spec("users", seed=5), *SPECS[1:])),
        "and rows of 3 elements of float32 in 4 partitions with seed 5 in",
    ),
    "a dense table of rows' name": (
        Made(1, specs=(dense_spec("users", DType.FLOAT32, TensorSpec("x", (3,), 0)), *SPECS[1:])),
        "and 3 elements of float32 in 1 blocks and 1 tensors in",
    ),
    "another shape": (
        Made(
            1,
            specs=(
                *SPECS[:3],
                BUFFERS,
                dense_spec(
                    "half", DType.BFLOAT16, TensorSpec("low", (60,), 0),
                    TensorSpec("high", (6, 10), 60),
                ),
            ),
        ),
        "and 120 elements of bfloat16 in 2 blocks and 2 tensors with other names or shapes in",
    ),
    "a table more": (
        Made(1, specs=(*SPECS, rows_spec("more"))),
        f"table 'more' of .*{FIRST} is not in .*{SECOND}",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_one_that_it_cannot_be_compared_with_is_refused(name: str, tmp_path: Path) -> None:
    made, words = OTHERS[name]
    other = made.write(tmp_path / "other" / "root")
    later = Made(2).write(tmp_path / "root")
    command = ("checkpoint", "export", str(later), "out.safetensors", "--since", str(other))
    ended = run_here(*command, cwd=tmp_path)
    assert ended.returncode == 1
    assert re.search(words, ended.stderr)
    assert "; expected " in ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"root", "other"}


def test_a_since_that_names_no_checkpoint_is_refused(root: Path) -> None:
    def refused(code: int, *options: str) -> str:
        command = ("checkpoint", "export", str(root), "out.safetensors", *options)
        ended = run_here(*command, cwd=root.parent)
        assert ended.returncode == code, ended.stderr
        assert not (root.parent / "out.safetensors").exists()
        return ended.stderr

    said = refused(2, "--since", str(root))
    assert f"for example {root / SECOND}" in said
    assert "URL is empty" in refused(2, "--since", "")
    said = refused(2, "--since", str(root / FIRST), "--optimizer", "state.safetensors")
    assert "--optimizer and --since: expected one of them" in said
    said = refused(1, "--since", str(root / "00000007-3fa9c1d2"))
    assert "expected --since of a good checkpoint, or export all of it, without --since" in said


def test_a_file_that_cannot_be_written_is_named(root: Path) -> None:
    out = str(root.parent / "nowhere" / "out.safetensors")
    command = ("checkpoint", "export", str(root), out, "--since", str(root / FIRST))
    ended = run_here(*command, cwd=root)
    assert ended.returncode == 2
    assert f"{out} cannot be written: No such file or directory" in ended.stderr


def test_diff_counts_rows(root: Path) -> None:
    ended = run_here("checkpoint", "diff", str(root / FIRST), str(root / SECOND), cwd=root)
    assert ended.returncode == 1
    assert (
        "users: 4 of 4 partitions differ in rows or their state (0-3): of 42 rows 6 have other "
        "values and 6 are gone; 5 are new\n"
    ) in ended.stdout
    other = Made(3, specs=(rows_spec("users", seed=1),)).write(root)
    ended = run_here("checkpoint", "diff", str(root / FIRST), str(other), cwd=root)
    assert "users: its rows are spread over other partitions, and are not compared" in ended.stdout


@pytest.mark.thorough
def test_rows_of_a_cluster_that_evicts(tmp_path: Path) -> None:
    """Through incremental checkpoints, and a restore on one server more."""
    draws = np.random.default_rng(7)

    def create(client: ps.Client) -> tuple[ps.TableHandle, ps.TableHandle]:
        options: dict[str, Any] = {"optimizer": ps.Adagrad(lr=0.1), "init": ps.Uniform(1.0)}
        return (
            client.create_embedding("kept", 4, max_rows=60, partitions=4, **options),
            client.create_embedding("still", 4, partitions=4, **options),
        )

    def train(client: ps.Client, table: ps.TableHandle, ids: NDArray[Any]) -> None:
        gradients = draws.standard_normal((len(ids), 4)).astype(np.float32)
        client.wait(client.push_rows(table, ids, gradients))

    made = list[Path]()
    root = tmp_path / "root"
    with (
        ps.local_cluster(2, 1, checkpoint_url=str(root)) as cluster,
        ps.connect(cluster.address) as client,
    ):
        kept, still = create(client)
        train(client, still, np.arange(50))
        for begin in (0, 20, 25):
            for step in range(3):
                train(client, kept, draws.integers(begin, begin + 60, 30) + step)
            made.append(Path(client.checkpoint().wait().url))
    with (
        ps.local_cluster(3, 1, checkpoint_url=str(root), resume=str(root)) as cluster,
        ps.connect(cluster.address) as client,
    ):
        kept, still = create(client)
        train(client, kept, draws.integers(200, 220, 30))
        made.append(Path(client.checkpoint().wait().url))
    have = exported(made[0], made[0]).earlier
    for first, second in itertools.pairwise(made):
        found = exported(first, second)
        have = found.since.applied_to(have)
        assert have == found.later
        was, now = found.earlier.rows["kept"], found.later.rows["kept"]
        assert found.since.rows["kept"] == {i: r for i, r in now.items() if was.get(i) != r}
        assert set(found.since.gone["kept"]) == was.keys() - now.keys() != set()
        assert now.keys() - was.keys()
        assert not found.since.rows["still"]
        counts = re.search(r"kept: (\d+) of (\d+) rows .*, (\d+) of (\d+) are gone", found.said)
        assert counts
        assert [*map(int, counts.groups())] == [
            len(found.since.rows["kept"]), len(now), len(was.keys() - now.keys()), len(was),
        ]  # fmt: skip
