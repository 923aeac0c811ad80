"""Custom updates from an installed package, on real servers: training, and all that goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ps_worker as ps
from ps_server.values.custom_updates import CheckedUpdate, checked
from tests.integration.training_models import Branched, batches, differing, seeded, values
from tests.unit.package_folder import install

pytestmark = pytest.mark.slow

WORKERS = 2
BLOCK = 64
ELEMENTS = 6 * BLOCK

ZOO = """
import torch


class Lion:
    hyperparameters = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
    slots = {"momentum": 0.0}

    def update(self, values, state, gradient, numbers, step):
        momentum, beta1, beta2 = state["momentum"], numbers["beta1"], numbers["beta2"]
        direction = momentum.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        values.mul_(1 - numbers["lr"] * numbers["weight_decay"])
        values.add_(direction, alpha=-numbers["lr"] / step)
        return values, {"momentum": momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)}


class Plain:
    hyperparameters = {"lr": 1.0}
    slots = {}

    def update(self, values, state, gradient, numbers, step):
        return values.sub_(gradient, alpha=numbers["lr"]), state


class Fragile(Plain):
    # Works, until a third step is by a gradient of 2.

    def update(self, values, state, gradient, numbers, step):
        values.sub_(gradient)
        is_broken = step == 3 and (gradient == 2.0).any()
        return self.broken(values, state) if is_broken else (values, state)

    def broken(self, values, state):
        raise ArithmeticError("two is too many")


class Shrinking(Fragile):
    def broken(self, values, state):
        return values[:-1], state


class Widening(Fragile):
    def broken(self, values, state):
        return values.double(), state


class Exploding(Fragile):
    def broken(self, values, state):
        return values / 0.0, state
"""

NAMES = ("Lion", "Plain", "Fragile", "Shrinking", "Widening", "Exploding")
_numbers = count()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    updates = {name.lower(): f"zoo_updates:{name}" for name in NAMES} | {"lost": "zoo_lost:Lost"}
    folder = tmp_path_factory.mktemp("zoo")
    return install(folder, "zoo-updates", "1.0", {"zoo_updates": ZOO}, updates)


class Team:
    """The workers of one cluster, each with its own thread."""

    def __init__(self, cluster: ps.LocalCluster, lane: str) -> None:
        self.cluster = cluster
        self.clients = [
            ps.connect(cluster.address, rank=rank, lane=lane, request_deadline_s=30.0)
            for rank in range(WORKERS)
        ]

    def run(self, work: Callable[[ps.Client], Any]) -> list[Any]:
        """What each worker's work gives, or raises; all run at once."""

        def caught(client: ps.Client) -> Any:
            try:
                return work(client)
            except ps.PushpullError as error:
                return error

        with ThreadPoolExecutor(WORKERS) as threads:
            return list(threads.map(caught, self.clients))

    def tables(self, update: str, consistency: str = "bsp", **numbers: float) -> list[Any]:
        """A new table, as each worker sees it."""
        name = f"{update} {next(_numbers)}"
        optimizer: Any = ps.Custom(update, **numbers) if update else ps.SGD(lr=1.0)
        return [
            client.create_table(
                name, ELEMENTS, optimizer=optimizer, consistency=consistency, block_elements=BLOCK
            )
            for client in self.clients
        ]

    def step(self, tables: list[ps.TableHandle], value: float) -> list[Any]:
        """Every worker pushes a step of one value, waits for it and pulls."""

        def work(client: ps.Client) -> Any:
            table = tables[client.rank]
            client.wait(client.push(table, np.full(ELEMENTS, value, np.float32)))
            return client.pull(table)

        return self.run(work)

    def assert_alive(self) -> None:
        for name, process_id in self.cluster.process_ids.items():
            os.kill(process_id, 0)
            state = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
            assert state != "Z", name


@pytest.fixture(scope="module", params=["shm", "grpc"])
def team(request: pytest.FixtureRequest, zoo: Path) -> Iterator[Team]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(zoo), os.environ.get("PYTHONPATH", "")]))
        cluster = ps.local_cluster(servers=2, workers=WORKERS)
    with cluster:
        team = Team(cluster, str(request.param))
        yield team
        for client in team.clients:
            client.close(leave=False)


@pytest.fixture(scope="module")
def lion(zoo: Path) -> CheckedUpdate:
    """The same code, in this process."""
    names: dict[str, Any] = {}
    exec((zoo / "zoo_updates.py").read_text(), names)  # noqa: S102 - the test wrote it
    return checked("lion", names["Lion"])


# --- training


def branched(client: ps.Client, model: Any, step: int, x: torch.Tensor) -> None:
    model(x, is_long=(step * client.rank) % 2 == 0).square().mean().backward()


def in_one_process(lion: CheckedUpdate, steps: int) -> list[dict[str, torch.Tensor]]:
    """Gradients summed in rank order, one multiply, and the update on each tensor by itself."""
    model = seeded(Branched)
    inputs = [list(batches(steps, rank=rank)) for rank in range(WORKERS)]
    state: dict[str, Any] = {}
    counts: dict[str, int] = {}
    history = []
    for step in range(steps):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(WORKERS):
            model.zero_grad()
            is_long = (step * rank) % 2 == 0
            model(inputs[rank][step], is_long=is_long).square().mean().backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name] = sums[name] + p.grad if name in sums else p.grad.clone()
        for name, p in model.named_parameters():
            if name not in sums:
                continue
            counts[name] = counts.get(name, 0) + 1
            numbers = dict(lion.defaults) | {"lr": 0.02 * 0.5 ** (step // 2)}
            numbers["weight_decay"] = 0.1 if name.endswith("weight") else 0.0
            flat = p.detach().reshape(-1).clone()
            before = state.get(name, {"momentum": torch.zeros_like(flat)})
            gradient = sums[name].reshape(-1) * torch.tensor(1.0 / WORKERS)
            new, state[name] = lion.call(flat, before, gradient, numbers, counts[name])
            with torch.no_grad():
                p.copy_(new.view_as(p))
        history.append(values(model))
    return history


def test_training_is_what_one_process_computes_bit_for_bit(team: Team, lion: CheckedUpdate) -> None:
    steps = 6
    name = f"model {next(_numbers)}"

    def train(client: ps.Client) -> list[dict[str, torch.Tensor]]:
        model = models[client.rank]
        parameters = list(model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in parameters if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in parameters if not n.endswith("weight")]},
        ]
        optimizer = ps.DistributedOptimizer(
            client, groups, ps.Custom("lion", lr=0.02), name=name, block_elements=BLOCK
        )
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert {group["beta2"] for group in optimizer.param_groups} == {0.99}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        history = []
        for step, x in enumerate(batches(steps, rank=client.rank)):
            optimizer.zero_grad()
            branched(client, model, step, x)
            optimizer.step()
            schedule.step()
            history.append(values(model))
        return history

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        models = [seeded(Branched) for _ in range(WORKERS)]  # torch has one generator
        expected = in_one_process(lion, steps)
        for history in team.run(train):
            assert isinstance(history, list), history
            for step in range(steps):
                assert differing(history[step], expected[step]) == [], step
    finally:
        torch.set_num_threads(before)


SETTINGS = (
    "bsp", "bsp:backup=1", "ssp:1", "asp", "asp:reject=8", "asp:damp=0.5", "asp:divide",
    "asp:compensate=1,adaptive",
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", SETTINGS)
def test_it_works_under_every_consistency(team: Team, consistency: str) -> None:
    ours, theirs = team.tables("plain", consistency), team.tables("", consistency)
    assert ours[0].spec.optimizer.label == "custom:plain"
    for value in (1.0, -0.5):
        for tables in (ours, theirs):
            tickets = []
            for client in team.clients:
                step = np.full(ELEMENTS, value + client.rank, np.float32)
                tickets.append(client.push(tables[client.rank], step))
                if consistency != "bsp":  # in the order of the ranks: both tables do the same
                    client.wait(tickets[-1])
            for client, ticket in zip(team.clients, tickets, strict=True):
                client.wait(ticket)
                client.pull(tables[client.rank])
    mine, plain = (team.clients[1].pull(tables[1]) for tables in (ours, theirs))
    assert plain[0] != 0.0
    np.testing.assert_array_equal(mine, plain)


def test_its_consistency_may_change_and_a_failed_tables_too(team: Team) -> None:
    """Nobody waits for the promise of a server where the table has failed."""
    one, two = team.clients
    tables = team.tables("fragile", "asp")
    team.step(tables, 1.0)
    assert one.set_consistency(tables[0], "ssp:4", timeout_s=20.0) >= 1
    values = np.full(ELEMENTS, 2.0, np.float32)
    with pytest.raises(ps.UpdateFailed):  # the third update of each element
        two.wait(two.push(tables[1], values))
    assert two.set_consistency(tables[1], "asp", timeout_s=20.0) >= 1
    with pytest.raises(ps.UpdateFailed):
        one.wait(one.push(tables[0], values))
    team.assert_alive()


# --- refused when it is made


def test_a_name_that_no_server_has_is_refused(team: Team) -> None:
    with pytest.raises(ps.InvalidConfig) as refused:
        team.tables("tiger")
    for words in ("the custom update 'tiger'", "server node ", "it has 'exploding', 'fragile'"):
        assert words in refused.value.message


def test_one_that_could_not_be_loaded_is_refused_with_the_reason(team: Team) -> None:
    with pytest.raises(ps.InvalidConfig, match=r"cannot run it: zoo_lost:Lost of zoo-updates 1\.0"):
        team.tables("lost")


def test_a_number_that_it_does_not_have_is_refused(team: Team) -> None:
    words = "custom:lion has no hyperparameter 'betas1'; it has beta1, beta2, lr, weight_decay"
    with pytest.raises(ps.InvalidConfig, match=words):
        team.tables("lion", betas1=0.9)
    with pytest.raises(ps.InvalidConfig, match="lr is 'fast'; expected a number"):
        ps.Custom("lion", lr="fast")  # type: ignore[arg-type]
    model = torch.nn.Linear(2, 2)
    groups = [{"params": list(model.parameters()), "momentun": 0.5}]
    with pytest.raises(ps.InvalidConfig, match="no hyperparameter 'momentun'"):
        ps.DistributedOptimizer(team.clients[0], groups, ps.Custom("lion"), name="misspelt")
    (table, _) = team.tables("lion")
    with pytest.raises(ps.InvalidConfig, match="custom:lion has no hyperparameter 'alpha'"):
        team.clients[0].push(table, np.zeros(ELEMENTS), hyperparameters={"alpha": 1.0})


# --- broken in a step

WORDS = {
    "fragile": r"it raised ArithmeticError: two is too many \(zoo_updates.py:\d+\)",
    "shrinking": r"values came back with shape \(63,\) and dtype torch.float32",
    "widening": r"values came back with shape \(64,\) and dtype torch.float64",
    "exploding": "values came back with an infinity or a NaN",
}


@pytest.mark.thorough
@pytest.mark.parametrize("update", WORDS)
def test_what_breaks_ends_in_an_error_for_every_worker(team: Team, update: str) -> None:
    broken, sound = team.tables(update), team.tables("plain")
    for _ in range(2):
        team.step(broken, 1.0)
    reader = ps.connect(team.cluster.address, role="reader", request_deadline_s=20.0)
    np.testing.assert_array_equal(
        reader.pull(reader.table(broken[0].name)), np.full(ELEMENTS, -2.0, np.float32)
    )
    for _ in range(2):  # at once, and whatever is tried later
        for error in team.step(broken, 2.0):
            assert isinstance(error, ps.UpdateFailed), error
            error_matches(error, f"table '{broken[0].name}' has failed: .*{WORDS[update]}")
    for client in team.clients:
        with pytest.raises(ps.UpdateFailed, match="has failed"):
            client.pull(broken[client.rank])
    with pytest.raises(ps.UpdateFailed, match="has failed"):
        reader.pull(reader.table(broken[0].name))
    reader.close()
    for pulled in team.step(sound, 1.0):
        np.testing.assert_array_equal(pulled, np.full(ELEMENTS, -1.0, np.float32))
    team.assert_alive()


def error_matches(error: ps.PushpullError, pattern: str) -> None:
    with pytest.raises(type(error), match=pattern):
        raise error


@pytest.mark.parametrize("consistency", ["ssp:4", "asp"])
def test_without_bsp_the_others_hear_of_it_with_their_next_step(
    team: Team, consistency: str
) -> None:
    one, two = team.clients
    tables = team.tables("fragile", consistency)
    values = np.full(ELEMENTS, 2.0, np.float32)
    one.wait(one.push(tables[0], values))
    two.wait(two.push(tables[1], values))
    with pytest.raises(ps.UpdateFailed):
        one.wait(one.push(tables[0], values))
    with pytest.raises(ps.UpdateFailed):
        two.wait(two.push(tables[1], values))
    reader = ps.connect(team.cluster.address, role="reader", request_deadline_s=20.0)
    for consistent in (False, True):
        with pytest.raises(ps.UpdateFailed):
            reader.pull(reader.table(tables[0].name), consistent=consistent)
    reader.close()
    team.assert_alive()


def test_an_optimizer_says_so_at_each_step_and_never_hangs(team: Team) -> None:
    name = f"model {next(_numbers)}"
    models = [torch.nn.Linear(3, 2) for _ in range(WORKERS)]

    def train(client: ps.Client) -> list[str]:
        model = models[client.rank]
        optimizer = ps.DistributedOptimizer(client, model, ps.Custom("exploding"), name=name)
        told = []
        for _ in range(5):
            optimizer.zero_grad(set_to_none=False)
            try:
                (model(torch.ones(1, 3)).sum() * 2.0).backward()
                optimizer.step()
                told.append("fine")
            except ps.UpdateFailed:
                told.append("failed")
        return told

    assert team.run(train) == [["fine"] * 2 + ["failed"] * 3] * WORKERS
    team.assert_alive()
