"""Pulls that bring only what has changed: the same bits as a pull of everything, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import ps_worker as ps
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    ReplicatedCluster,
    replicated_cluster,
    together,
)
from tests.integration.training_models import differing, values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

T = TypeVar("T")

WORKERS = 2
BLOCK = 64
USED, UNUSED = 8, 32
"""Blocks of each layer."""


class Partly(nn.Module):
    """Half a dozen blocks of it are used, and many are not, as a mixture of experts has them."""

    def __init__(self, fill: float = 0.5) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.full((USED, BLOCK), fill))
        self.unused = nn.Parameter(torch.full((UNUSED, BLOCK), fill))

    def forward(self, x: torch.Tensor, *, uses_all: bool = False) -> torch.Tensor:
        found = (self.used @ x).square().sum()
        return found + (self.unused @ x).sum() if uses_all else found


@pytest.fixture(scope="module")
def cluster() -> Iterator[ReplicatedCluster]:
    # A range that moves comes whole once more, and on a busy machine leases of a second may end.
    with replicated_cluster(servers=3, workers=WORKERS, lease_s=3.0) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["grpc", pytest.param("shm", marks=pytest.mark.second_lane)])
def clients(
    request: pytest.FixtureRequest, cluster: ReplicatedCluster
) -> Iterator[list[ps.Client]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                ps.connect(cluster.address, lane=request.param, request_deadline_s=DEADLINE_S)
            )
            for _ in range(WORKERS)
        ]


def at_all(each: Iterable[T], work: Callable[[T], Any]) -> list[Any]:
    return together(partial(work, one) for one in each)


class Trainer:
    """One worker. After each step its model is as a pull of the whole table has it."""

    def __init__(self, client: ps.Client, name: str, **options: Any) -> None:
        self.client, self.model, self.name = client, Partly(), name
        options = {"optimizer": ps.SGD(lr=0.01), "block_elements": BLOCK, **options}
        self.optimizer = ps.DistributedOptimizer(
            client, self.model, options.pop("optimizer"), name=name, **options
        )
        self._step_count = 0

    def step(self, *, uses_all: bool = False, gradient: float | None = None) -> tuple[int, int]:
        """Take a step; returns the blocks that came, and those that were unchanged."""
        self.optimizer.zero_grad()
        noise = torch.Generator().manual_seed(100 * self.client.rank + self._step_count)
        self._step_count += 1
        self.model(torch.randn(BLOCK, generator=noise), uses_all=uses_all).backward()
        if gradient is not None:
            for each in self.model.parameters():
                if each.grad is not None:
                    each.grad.fill_(gradient)
        before = self.client.progress()
        try:
            self.optimizer.step()
            self.optimizer.wait()
        finally:
            after = self.client.progress()
        self.check()
        width = self.table.codecs.pull
        block_bytes = 4 * BLOCK if width is None else width.payload_bytes(BLOCK)
        return (
            (after.pulled_bytes - before.pulled_bytes) // block_bytes,
            (after.unchanged_bytes - before.unchanged_bytes) // block_bytes,
        )

    @property
    def table(self) -> ps.TableHandle:
        return self.client.table(f"{self.name}/0/float32")

    def check(self) -> None:
        """The script's own pull names nothing: all of it comes."""
        served = torch.from_numpy(self.client.pull(self.table))
        flat = torch.cat([each.detach().flatten() for each in self.model.parameters()])
        assert torch.equal(flat.view(torch.int32), served.view(torch.int32))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlap_pull": True},
    "int8": {"pull_codec": "int8"},
    "bf16": {"pull_codec": "bf16", "push_codec": "bf16"},
    "adam": {"optimizer": ps.Adam(lr=0.01)},
    "clipped": {"clip_norm": 0.1},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [
        each if each in ("plain", "clipped") else pytest.param(each, marks=pytest.mark.thorough)
        for each in OPTIONS
    ],
)
def test_a_layer_that_no_backward_pass_reaches_comes_once(
    clients: list[ps.Client], kind: str
) -> None:
    def train(client: ps.Client) -> list[tuple[int, int]]:
        trainer = Trainer(client, f"partly {kind}", **OPTIONS[kind])
        found = [trainer.step() for _ in range(4)]
        found.append(trainer.step(uses_all=True))
        return [*found, trainer.step()]

    for (came, unchanged), *later in at_all(clients, train):
        assert came + unchanged == USED + UNUSED
        assert later == [(USED, UNUSED)] * 3 + [(USED + UNUSED, 0), (USED, UNUSED)]


def test_a_step_that_all_skip_brings_nothing(clients: list[ps.Client]) -> None:
    def train(client: ps.Client) -> tuple[int, int]:
        trainer = Trainer(client, "skipped")
        trainer.step(uses_all=True)
        before = client.progress()
        with pytest.raises(ps.InvalidTensor, match="skipped"):
            trainer.step(uses_all=True, gradient=float("nan"))
        after = client.progress()
        trainer.check()
        return (
            after.pulled_bytes - before.pulled_bytes,
            after.unchanged_bytes - before.unchanged_bytes,
        )

    for found in at_all(clients, train):
        assert found == (0, 4 * BLOCK * (USED + UNUSED))


def test_an_edit_brings_everything_once(clients: list[ps.Client]) -> None:
    def train(client: ps.Client) -> list[tuple[int, int]]:
        trainer = Trainer(client, "edited")
        trainer.step()
        trainer.model.unused.data.fill_(0.25)
        # The step is two clocks: the edit's pull brings everything, and the gradients' what they
        # have changed.
        found = [trainer.step(), trainer.step()]
        assert trainer.model.unused.eq(0.25).all()
        return found

    for found in at_all(clients, train):
        assert found == [(USED + UNUSED + USED, UNUSED), (USED, UNUSED)]


def test_what_a_refused_edit_has_left_is_not_taken_for_the_servers(
    clients: list[ps.Client],
) -> None:
    def train(client: ps.Client) -> tuple[int, int]:
        trainer = Trainer(client, "refused")
        trainer.step()
        kept = trainer.model.unused.detach().clone()
        if client.rank == 0:
            trainer.model.unused.data.fill_(0.25)
        with pytest.raises(ps.EditRefused):
            trainer.step()
        trainer.model.unused.data.copy_(kept)
        return trainer.step()

    for found in at_all(clients, train):
        assert found == (USED, UNUSED)


@pytest.mark.thorough
def test_outer_steps_bring_what_they_changed(clients: list[ps.Client]) -> None:
    """Its pseudo-gradient counts from what was pulled, and of the unused layer it is zero: that is
    an update, too.
    """
    inner = partial(torch.optim.SGD, lr=0.01)

    def train(client: ps.Client) -> list[tuple[int, int]]:
        trainer = Trainer(client, "outer", optimizer=ps.Outer(inner, inner_steps=1))
        return [trainer.step() for _ in range(3)]

    for found in at_all(clients, train):
        assert found[1:] == [(USED + UNUSED, 0)] * 2


def test_a_killed_server_leaves_nobody_with_old_values(
    cluster: ReplicatedCluster, clients: list[ps.Client]
) -> None:
    """The server that takes its ranges over has the versions, and counts edits anew: to a reader
    that has values from before an edit it says the numbers that these had.
    """
    cluster.have(3)
    cluster.healed()
    trainers = at_all(clients, partial(Trainer, name="killed"))

    def edit(trainer: Trainer, value: float) -> None:
        trainer.model.unused.data.fill_(value)
        trainer.step()

    with ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as reader:
        evaluated = Partly()

        def poll() -> list[str]:
            ps.pull_model(reader, evaluated, "killed")
            return differing(values(evaluated), values(trainers[0].model))

        at_all(trainers, Trainer.step)
        assert poll() == []
        at_all(trainers, partial(edit, value=0.25))
        dying = cluster.a_primary()
        cluster.kill(dying)
        cluster.taken_over_from(dying)
        assert poll() == []
        at_all(trainers, partial(edit, value=0.75))
        assert poll() == []


@pytest.mark.thorough
@pytest.mark.parametrize("lane", ["grpc", pytest.param("shm", marks=pytest.mark.second_lane)])
def test_a_restore_brings_everything_as_it_was(tmp_path: Path, lane: str) -> None:
    with ps.local_cluster(2, 1, checkpoint_url=str(tmp_path)) as cluster:
        client = ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S)
        trainer = Trainer(client, "restored")
        trainer.step(uses_all=True)
        client.checkpoint().wait()
        then = values(trainer.model)
        trainer.step(uses_all=True)
        client = client.restore()
        trainer = Trainer(client, "restored")
        assert differing(values(trainer.model), then) == []
        assert [trainer.step() for _ in range(2)] == [(USED, UNUSED)] * 2
        client.close()


@pytest.mark.thorough
def test_a_reader_that_polls_pulls_what_has_changed(
    cluster: ReplicatedCluster, clients: list[ps.Client]
) -> None:
    trainers = at_all(clients, partial(Trainer, name="polled"))
    with ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as reader:
        found = []
        for steps in (1, 0, 2, 0):
            for _ in range(steps):
                at_all(trainers, Trainer.step)
            evaluated = Partly(fill=7.0)  # what the caller's model has does not count
            before = reader.progress()
            ps.pull_model(reader, evaluated, "polled")
            after = reader.progress()
            found.append(after.pulled_bytes - before.pulled_bytes)
            assert differing(values(evaluated), values(trainers[0].model)) == []
    used, all_blocks = 4 * BLOCK * USED, 4 * BLOCK * (USED + UNUSED)
    assert found == [all_blocks, 0, used, 0]
