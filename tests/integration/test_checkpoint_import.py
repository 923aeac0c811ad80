"""`pushpull checkpoint import`: a run starts with a file's tensors, on any number of servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import ps_worker as ps
from ps_runtime.checkpoint.store import resolve
from tests.file_limits import no_file_above
from tests.integration.command_line import run_here
from tests.integration.resumed_training import DEADLINE_S, Recipe, together, train

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]


class Model(nn.Module):
    """Parameters of two types and two groups, one frozen, and buffers that float and count."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(90, 11)
        self.low = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm.get_buffer("running_mean").uniform_()
        self.norm.get_buffer("num_batches_tracked").fill_(seed)


def start(client: ps.Client, model: nn.Module, name: str = "model", **options: Any) -> Any:
    """The optimizer of a run in two groups; the model has its first parameters."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 3e-3},
    ]
    optimizer = options.pop("optimizer", ps.Adam(lr=1e-2))
    return ps.DistributedOptimizer(
        client, groups, optimizer, module=model, name=name, block_elements=64, **options
    )


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def imported(tmp_path: Path, file: Path, *options: str) -> str:
    root = tmp_path / "imported"
    ended = run_here("checkpoint", "import", str(file), str(root), *options, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert str(root / "00000001-imported") in ended.stdout
    return str(root)


def test_a_full_disk_leaves_no_half_file_and_the_next_attempt_succeeds(tmp_path: Path) -> None:
    file, root, out = tmp_path / "model.pt", tmp_path / "imported", tmp_path / "out.safetensors"
    torch.save({"users.weight": torch.randn(20_000, 8), "head.weight": torch.randn(3)}, file)
    export = functools.partial(run_here, "checkpoint", "export", str(root), str(out), cwd=tmp_path)
    with no_file_above(100_000):
        ended = run_here("checkpoint", "import", str(file), str(root), cwd=tmp_path)
    assert ended.returncode != 0
    assert "imported.safetensors.tmp cannot be written: File too large" in ended.stderr
    assert [each for each in root.rglob("*") if each.is_file()] == []
    imported(tmp_path, file)
    with no_file_above(100_000):
        ended = export()
    assert ended.returncode != 0
    assert "out.safetensors cannot be written: File too large" in ended.stderr
    assert [each.name for each in tmp_path.iterdir() if "out" in each.name] == []
    assert export().returncode == 0
    assert out.stat().st_size > 640_000


def test_what_was_exported_is_what_the_next_run_starts_with(tmp_path: Path) -> None:
    """Trained on one server, exported, imported elsewhere, and pulled by two workers from three."""
    root = str(tmp_path / "trained")
    work = functools.partial(train, recipe=Recipe(), until=3, save_at=3)
    with ps.local_cluster(1, 2, checkpoint_url=root) as cluster:
        trained, _ = together(cluster.address, 2, work)
    file = tmp_path / "model.safetensors"
    assert run_here("checkpoint", "export", root, str(file), cwd=tmp_path).returncode == 0
    url = imported(tmp_path, file)
    expected = trained.state_dict()

    def first(client: ps.Client) -> nn.Module:
        model = train(client, Recipe(), until=0)
        assert not client.restored_state("optimizer/model")
        return model

    with ps.local_cluster(3, 2, resume=url) as cluster:
        for model in together(cluster.address, 2, first):
            assert_same(model, expected)
    plain = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 6))
    again = tmp_path / "again.safetensors"
    assert run_here("checkpoint", "export", url, str(again), cwd=tmp_path).returncode == 0
    plain.load_state_dict(safetensors.torch.load_file(again))
    assert_same(plain, expected)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: ps.Adam(lr=1e-2),
    "aggregate": lambda: ps.Aggregate(lambda groups: torch.optim.SGD(groups, lr=1e-2)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_torch_file_starts_any_optimizer_as_if_the_script_had_loaded_it(
    tmp_path: Path, kind: str
) -> None:
    source, steps = Model(5), 3
    torch.save(source.state_dict(), tmp_path / "model.pt")
    url = imported(tmp_path, tmp_path / "model.pt")

    def steps_of(client: ps.Client, model: Model) -> nn.Module:
        optimizer = start(client, model, optimizer=OPTIMIZERS[kind]())
        if client.restored_from:
            assert_same(model, source.state_dict())
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 4 * 90).reshape(4, 90) * (step + 1)
            model.layer(x).square().mean().backward()
            optimizer.step()
        return model

    def loaded() -> Model:
        model = Model(9)
        model.load_state_dict(source.state_dict())
        return model

    with ps.local_cluster(1, 1) as cluster:
        (expected,) = together(cluster.address, 1, lambda client: steps_of(client, loaded()))
    with ps.local_cluster(2, 1, resume=url) as cluster:
        (found,) = together(cluster.address, 1, lambda client: steps_of(client, Model(9)))
    assert_same(found, expected.state_dict())


@pytest.mark.thorough
def test_a_prefix_keeps_it_from_the_tables_of_others(tmp_path: Path) -> None:
    source = Model(5)
    safetensors.torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    url = imported(tmp_path, tmp_path / "model.safetensors", "--prefix", "critic")

    def both(client: ps.Client) -> None:
        actor, critic = Model(1), Model(2)
        start(client, actor, "actor")
        start(client, critic, "critic")
        assert_same(actor, Model(1).state_dict())
        assert_same(critic, source.state_dict())
        counted = client.create_table(
            "counted", (7,), optimizer=ps.SGD(lr=1.0), init=ps.Constant(3.0)
        )
        assert np.array_equal(np.asarray(client.pull(counted)), np.full(7, 3.0, np.float32))

    with ps.local_cluster(2, 1, resume=url) as cluster:
        together(cluster.address, 1, both)


@pytest.mark.thorough
def test_a_run_goes_on_from_the_checkpoints_that_it_makes(tmp_path: Path) -> None:
    torch.save(Model(5).state_dict(), tmp_path / "model.pt")
    url = imported(tmp_path, tmp_path / "model.pt")

    def step(client: ps.Client) -> str:
        optimizer = start(client, model := Model(9))
        optimizer.zero_grad()
        model.layer(torch.ones(2, 90)).sum().backward()
        optimizer.step()
        return str(client.checkpoint().wait(DEADLINE_S).url)

    for clock in (1, 2):
        with ps.local_cluster(2, 1, checkpoint_url=url, resume=url) as cluster:
            (made,) = together(cluster.address, 1, step)
        with resolve(url).reader as reader:
            assert reader.directory.url == made
            assert max(table.clock for table in reader.manifest.tables) == clock
            assert not reader.manifest.is_imported


# --- what is refused


def one_less(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name != "norm.bias"}


def one_more(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state | {"head.weight": torch.zeros(3)}


ANOTHER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one less": (one_less, r"'norm.bias' of table 'model/1/float32' is not in .*00000001-imported"),
    "one more": (one_more, r"has 'head.weight', which model 'model' does not have"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", ANOTHER)
def test_another_models_file_is_refused(tmp_path: Path, what: str) -> None:
    change, words = ANOTHER[what]
    torch.save(change(Model(5).state_dict()), tmp_path / "model.pt")
    url = imported(tmp_path, tmp_path / "model.pt")
    with ps.local_cluster(1, 1, resume=url) as cluster, ps.connect(cluster.address) as client:
        with pytest.raises(ps.InvalidCheckpoint, match=words):
            start(client, Model(9))
        client.close(leave=False)


def test_what_was_imported_is_shown_and_verified(tmp_path: Path) -> None:
    torch.save(Model(5).state_dict(), tmp_path / "model.pt")
    url = imported(tmp_path, tmp_path / "model.pt")
    shown = run_here("checkpoint", "show", url, cwd=tmp_path)
    assert ": imported from model.pt; " in shown.stdout
    assert "table float32: 1,049 elements of float32 in 1 blocks, any optimizer" in shown.stdout
    assert run_here("checkpoint", "verify", url, cwd=tmp_path).returncode == 0


class Tastes(nn.Module):
    """Rows of users, and a head over them."""

    def __init__(self, users: nn.Module) -> None:
        super().__init__()
        self.users = users
        torch.manual_seed(3)
        self.head = nn.Linear(6, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.users(ids))
        return found


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [ps.Adagrad(lr=0.1), ps.SGD(lr=0.1)])
def test_rows_of_a_state_dict_train_on_and_are_exported_and_imported_again(
    tmp_path: Path, optimizer: ps.Adagrad | ps.SGD
) -> None:
    """torch's `nn.Embedding` on one process is what the servers' rows are compared with."""
    twin, everything = Tastes(nn.Embedding(40, 6)), torch.arange(40)
    file = tmp_path / "model.pt"
    torch.save(twin.state_dict(), file)
    made = torch.optim.Adagrad if isinstance(optimizer, ps.Adagrad) else torch.optim.SGD
    reference = made(twin.parameters(), lr=0.1)

    def run(url: str, root: str, steps: range) -> tuple[torch.Tensor, str]:
        with (
            ps.local_cluster(2, 1, resume=url, checkpoint_url=root) as cluster,
            ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
        ):
            users = ps.Embedding(
                client, "users", 6, optimizer=optimizer, init=ps.Normal(1.0), max_rows=1_000
            )
            model = Tastes(users)
            trained = ps.DistributedOptimizer(client, model, optimizer, name="tastes")
            for step in steps:
                for each, stepper in ((model, trained), (twin, reference)):
                    stepper.zero_grad()
                    each(everything[step :: 3 + step]).square().mean().backward()
                    stepper.step()
            return users(everything).detach(), client.checkpoint().wait().url

    rows, checkpoint = run(imported(tmp_path, file), str(tmp_path / "one"), range(4))
    torch.testing.assert_close(rows, twin.get_parameter("users.weight").data)
    out = tmp_path / "trained.safetensors"
    ended = run_here("checkpoint", "export", checkpoint, str(out), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    reference = made(twin.parameters(), lr=0.1)  # an import has no optimizer state
    (tmp_path / "imported").rename(tmp_path / "first")
    again, _ = run(imported(tmp_path, out), str(tmp_path / "two"), range(4))
    torch.testing.assert_close(again, twin.get_parameter("users.weight").data)
