"""`pushpull checkpoint` with files: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner

from ps_cli.__main__ import app
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec, TensorSpec
from ps_runtime.checkpoint.directory import CheckpointDirectory
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_runtime.checkpoint.store import CheckpointStore
from tests.integration.command_line import ROOT, environment, run, run_here
from tests.unit.checkpoint_files import CLUSTER_ID, saved, spec_json, write_checkpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

FIRST, SECOND, THIRD = (f"0000000{number}-3fa9c1d2" for number in (1, 2, 3))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two good checkpoints, and a third that was not completed."""
    store = CheckpointStore(str(tmp_path / "root"))
    for number in (1, 2):
        write_checkpoint(store.directory(number, CLUSTER_ID), number)
    store.directory(3, CLUSTER_ID).create()
    return tmp_path / "root"


def damage(root: Path, name: str, file: str = "server-2.safetensors") -> None:
    """The last byte of a file is another."""
    path = root / name / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_list_says_what_there_is_and_why_something_is_not_good(root: Path) -> None:
    ended = run_here("checkpoint", "list", "root", cwd=root.parent)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert re.match(
        rf"{SECOND} +2026-11-22T10:20:00Z +41 +\d+\.\d KiB +every 100 steps +good", lines[2]
    )
    assert re.match(rf"{THIRD} .*{THIRD} has no manifest.json: it was not completed", lines[3])
    assert len(lines) == 4
    nothing = run_here("checkpoint", "list", str(root / "nowhere"), cwd=root)
    assert (nothing.returncode, nothing.stdout) == (0, f"no checkpoint is under {root}/nowhere\n")


def test_show_takes_a_root_or_a_checkpoint(root: Path) -> None:
    newest = run_here("checkpoint", "show", str(root), cwd=root)
    assert newest.returncode == 0, newest.stderr
    assert newest.stdout.startswith(f"{root}/{SECOND}\n")
    assert "table model/0/float32: 150 elements of float32 in 3 blocks, adam, bsp" in newest.stdout
    assert "worker 1: clock 41, its state is lost: it was killed" in newest.stdout
    assert f"passed over: {root}/{THIRD} has no manifest.json" in newest.stderr
    first = run_here("checkpoint", "show", f"file://{root}/{FIRST}", "--json", cwd=root)
    assert json.loads(first.stdout)["number"] == 1


def test_verify_names_the_file_and_the_reason(root: Path) -> None:
    good = run_here("checkpoint", "verify", str(root), cwd=root)
    assert good.returncode == 0, good.stderr
    assert f"{root}/{SECOND}: good, " in good.stdout
    assert f"{root}/{THIRD}: not completed, passed over" in good.stdout
    damage(root, SECOND)
    bad = run_here("checkpoint", "verify", str(root / SECOND), cwd=root)
    assert bad.returncode == 1
    reason = (
        f"{root}/{SECOND}/server-2.safetensors: tensor 'model/0/float32/1/exp_avg_sq' is damage"
    )
    assert reason in bad.stderr
    assert run_here("checkpoint", "verify", str(root / THIRD), cwd=root).returncode == 1
    assert run_here("checkpoint", "verify", str(root / "nowhere"), cwd=root).returncode == 1


def test_verify_passes_over_what_is_removed_while_it_is_read(root: Path) -> None:
    """As `--checkpoint-keep` of a running cluster removes the oldest, which is read first."""

    def look(frame: FrameType, event: str, _: object) -> None:
        if (event, frame.f_code.co_name) == ("call", "problems_of"):
            sys.setprofile(None)
            CheckpointStore(str(root)).named(FIRST).remove()

    sys.setprofile(look)
    try:
        ended = CliRunner().invoke(app, ["checkpoint", "verify", str(root)])
    finally:
        sys.setprofile(None)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert f"{root}/{FIRST}: removed while it was read, passed over" in ended.stdout
    assert f"{root}/{SECOND}: good, " in ended.stdout


def test_opening_a_bad_one_names_the_newest_good_one(root: Path) -> None:
    (root / SECOND / "server-1.safetensors").unlink()
    ended = run_here("checkpoint", "show", str(root / SECOND), cwd=root)
    assert ended.returncode == 1
    assert re.search(
        rf"{SECOND}/server-1.safetensors cannot be read: No such file.*; {root}/{FIRST} is good",
        ended.stderr,
    )


def test_prune_keeps_the_newest_good_ones_and_what_is_newer(root: Path) -> None:
    store = CheckpointStore(str(root))
    write_checkpoint(store.directory(4, CLUSTER_ID), 4)
    store.directory(5, CLUSTER_ID).create()
    (root / "notes").mkdir()
    ended = run_here("checkpoint", "prune", str(root), "--keep", "2", cwd=root)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"removed {FIRST}\n4 left under {root}\n"
    run_here("checkpoint", "prune", str(root), "--keep", "1", cwd=root)
    assert [path.name for path in sorted(root.iterdir())] == [
        "00000004-3fa9c1d2", "00000005-3fa9c1d2", "notes",
    ]  # fmt: skip


def test_diff_says_which_blocks_and_how_far(root: Path) -> None:
    ended = run_here("checkpoint", "diff", str(root / FIRST), str(root / SECOND), cwd=root)
    assert ended.returncode == 1
    assert (
        "model/0/float32: 3 of 3 blocks differ (0-2): exp_avg by up to 500, "
        "exp_avg_sq by up to 333.333, values by up to 1000\n"
    ) in ended.stdout
    same = run_here("checkpoint", "diff", str(root / FIRST), str(root / FIRST), cwd=root)
    assert same.returncode == 0
    assert same.stdout.endswith("the same tables\n")


class Model(nn.Module):
    """Parameters in two types, a float buffer and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 11)
        self.low = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(7)


def table(
    name: str, dtype: DType, tensors: dict[str, torch.Tensor], kind: OptimizerKind
) -> TableSpec:
    specs, end = [], 0
    for key, tensor in tensors.items():
        specs.append(TensorSpec(key, tuple(tensor.shape), end))
        end += tensor.numel()
    optimizer = OptimizerSpec(kind)
    return TableSpec(name, dtype, end, optimizer, 64, tuple(specs)).validated()


def save(directory: CheckpointDirectory, tables: dict[str, tuple[TableSpec, torch.Tensor]]) -> None:
    """A checkpoint of whole vectors; of Adam's tables block 1 and what follows has taken steps."""
    directory.create()
    path = directory.begin("server-1.safetensors")
    states = ("values", "exp_avg", "delay_mean_square")
    planned = [PlannedTable(name, 100, states) for name in tables]
    writer = PartWriter(path, planned)
    counts = {}
    for name, (spec, vector) in tables.items():
        wide = spec.dtype is DType.FLOAT64
        flat = vector.numpy().astype(np.float64 if wide else np.float32)
        for block, begin in enumerate(range(0, len(flat), 64)):
            cut, dtype = flat[begin : begin + 64], "F64" if wide else "F32"
            writer.append(name, block, "values", cut.tobytes(), dtype)
            has_state = spec.optimizer.kind is OptimizerKind.ADAM and block > 0
            if has_state:
                writer.append(name, block, "exp_avg", (2 * cut).tobytes(), dtype)
                writer.append(name, block, "delay_mean_square", cut.tobytes(), dtype)  # no slot
            writer.note_block(name, block, 9, [9 if has_state else 0])
            counts[name] = block + 1
    written = writer.finish(1, CLUSTER_ID)
    directory.commit("server-1.safetensors", path)
    specs = [spec for spec, _ in tables.values()]
    directory.write_manifest(saved(specs, "server-1.safetensors", written, counts))


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().to(torch.float64).reshape(-1) for tensor in tensors.values()])


@pytest.mark.thorough
def test_an_exported_model_is_the_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    state = model.state_dict()
    state["norm.num_batches_tracked"].fill_(7)
    kinds = {
        "model/0/float32": (
            DType.FLOAT32, OptimizerKind.ADAM,
            ("layer.weight", "layer.bias", "norm.weight", "norm.bias"),
        ),
        "model/0/bfloat16": (DType.BFLOAT16, OptimizerKind.SGD, ("low.weight", "low.bias")),
        "model/buffers/float32": (
            DType.FLOAT32, OptimizerKind.ASSIGN, ("norm.running_mean", "norm.running_var"),
        ),
        "model/buffers/integer": (
            DType.FLOAT64, OptimizerKind.ASSIGN, ("norm.num_batches_tracked",)
        ),
        "other": (DType.FLOAT32, OptimizerKind.SGD, ("layer.bias",)),
    }  # fmt: skip
    tables = {}
    for name, (dtype, kind, keys) in kinds.items():
        tensors = {key: state[key] for key in keys}
        tables[name] = table(name, dtype, tensors, kind), flat(tensors)
    store = CheckpointStore(str(tmp_path / "root"))
    save(store.directory(1, CLUSTER_ID), tables)

    command = ("checkpoint", "export", "root", "model.safetensors")
    twice = run_here(*command, cwd=tmp_path)
    assert twice.returncode == 2
    assert "tensor 'layer.bias' is in table 'model/0/float32' and in 'other'" in twice.stderr
    wrong = run_here(*command, "--prefix", "mod", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "no table to export whose name begins with 'mod'" in wrong.stderr
    options = ("--prefix", "model", "--optimizer", "state.safetensors")
    ended = run(*command, *options, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr

    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert loaded["low.weight"].dtype == torch.bfloat16
    assert loaded["norm.num_batches_tracked"].dtype == torch.float64
    again = Model()
    again.load_state_dict(loaded)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name]), name

    moments = safetensors.torch.load_file(tmp_path / "state.safetensors")
    said = json.loads((tmp_path / "state.json").read_text())
    # layer.weight has 99 elements: 64 in a block that has taken no step, the rest in one that has.
    expected = 2 * state["layer.weight"].reshape(-1)
    expected[:64] = 0
    assert torch.equal(moments["layer.weight/exp_avg"], expected.reshape(11, 9))
    assert torch.equal(moments["norm.bias/exp_avg"], 2 * state["norm.bias"])
    assert said["state"]["layer.weight"] == {"slots": ["exp_avg"], "step": 9, "steps": [0, 9]}
    assert said["state"]["low.bias"] == {"slots": [], "step": 0}
    assert said["groups"][1]["hyperparameters"]["beta1"] == 0.9
    assert {path.name for path in tmp_path.iterdir()} == {
        "root", "model.safetensors", "state.safetensors", "state.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("out", "state", "twice"),
    [
        ("m.safetensors", "m.safetensors", "m.safetensors"),
        ("m.safetensors", "linked/m.safetensors", "linked/m.safetensors"),
        ("m.json", "m.safetensors", "m.json"),
        ("m.safetensors", "state.json", "state.json"),
    ],
)
def test_an_export_writes_no_file_over_another(
    root: Path, tmp_path: Path, out: str, state: str, twice: str
) -> None:
    (tmp_path / "linked").symlink_to(tmp_path)
    (tmp_path / out).write_text("of before")
    found = run_here("checkpoint", "export", "root", out, "--optimizer", state, cwd=tmp_path)
    assert found.returncode == 2
    assert f"{twice} would be written twice" in found.stderr
    assert (tmp_path / out).read_text() == "of before"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([out, "linked", root.name])


@pytest.mark.thorough
def test_what_s3_needs_is_named() -> None:
    program = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from ps_cli.__main__ import main\n"
        "sys.argv = ['pushpull', 'checkpoint', 'list', 's3://bucket/root']\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "s3://bucket/root: 's3' needs s3fs, which comes with: pip install 'pushpull[s3]'" in (
        ended.stderr
    )


def test_a_url_of_no_filesystem_is_refused(tmp_path: Path) -> None:
    ended = run_here("checkpoint", "list", "nonsense://x", cwd=tmp_path)
    assert ended.returncode == 2
    assert "nonsense://x: Protocol not known: nonsense; expected a path" in ended.stderr


def test_specs_are_in_the_form_of_the_contract() -> None:
    spec = TableSpec("t", DType.FLOAT32, 10, OptimizerSpec(OptimizerKind.SGD)).validated()
    assert spec_json(spec)["element_count"] == "10"


@pytest.mark.thorough
@pytest.mark.timeout(30)
def test_create_says_soon_that_no_scheduler_answers(tmp_path: Path) -> None:
    """However long a checkpoint may take."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_here("checkpoint", "create", "--scheduler", address, cwd=tmp_path)
    assert ended.returncode == 1
    assert f"no scheduler answered at {address} within 5.0 s" in ended.stderr
