"""What a worker keeps of its embedding rows in a checkpoint, and when: a run goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ps_worker as ps
from tests.integration.resumed_training import DEADLINE_S, Position

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

IDS = torch.arange(3)


class Passes:
    """A loop over two tables of rows in no model, which knows how many passes it has made."""

    def __init__(self, client: ps.Client) -> None:
        self.position = Position()
        self.rows = [
            ps.Embedding(client, name, 2, optimizer=ps.SGD(lr=1.0), init=ps.Zeros())
            for name in ("users", "items")
        ]
        client.attach_state("position", self.position)

    @property
    def clocks(self) -> list[int]:
        return [each.table.clock for each in self.rows]

    def take(self, *, zeroes: bool) -> None:
        for each in self.rows if zeroes else ():
            each.zero_grad()
        torch.stack([each(IDS) for each in self.rows]).sum().backward()
        for each in self.rows:
            each.step()
        self.position.seen += 1


@pytest.mark.thorough
@pytest.mark.parametrize("zeroes", [False, True])
def test_a_loop_that_steps_rows_by_themselves_has_a_save_point_in_each_pass(
    tmp_path: Path, zeroes: bool
) -> None:
    """It calls no `save_point`. The checkpoint is of a whole pass, and made while it trains on."""
    with (
        ps.local_cluster(1, 1, checkpoint_url=str(tmp_path)) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
        ps.connect(cluster.address, role="operator") as operator,
    ):
        loop = Passes(client)
        loop.take(zeroes=zeroes)
        ticket = operator.checkpoint("for the test")
        while not (made := list(tmp_path.glob("*/manifest.json"))):
            loop.take(zeroes=zeroes)
            assert loop.position.seen < 1_000, "no checkpoint within so many passes"
        url = ticket.wait(DEADLINE_S).url
        assert made == [Path(url) / "manifest.json"]
    with (
        ps.local_cluster(2, 1, resume=url) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        loop = Passes(client)
        seen = loop.position.seen
        assert seen > 0
        assert loop.clocks == [seen, seen]
        assert [each(IDS)[0, 0].item() for each in loop.rows] == [-seen, -seen]


class Rated:
    """Two Embeddings of one table, each with a rate of its own, beside or in a model."""

    def __init__(self, client: ps.Client, *, is_in_model: bool) -> None:
        first, second = (
            ps.Embedding(client, "users", 2, optimizer=ps.SGD(lr=1.0), init=ps.Zeros())
            for _ in range(2)
        )
        self.both = (first, second)
        self.optimizer = None
        if is_in_model:
            self.optimizer = ps.DistributedOptimizer(client, nn.Sequential(first), ps.SGD(lr=1.0))

    def step(self) -> float:
        """The change of a row by a step of each."""
        first, second = self.both
        before: float = first(IDS)[0, 0].item()
        first(IDS).sum().backward()
        first.step() if self.optimizer is None else self.optimizer.step()
        second(IDS).sum().backward()
        second.step()
        after: float = first(IDS)[0, 0].item()
        return before - after


@pytest.mark.thorough
@pytest.mark.parametrize("is_in_model", [False, True])
def test_a_run_goes_on_with_the_hyperparameters_that_rows_had(
    tmp_path: Path, is_in_model: bool
) -> None:
    with (
        ps.local_cluster(1, 1, checkpoint_url=str(tmp_path)) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        loop = Rated(client, is_in_model=is_in_model)
        assert loop.step() == 2.0
        for rows, rate in zip(loop.both, (0.25, 0.5), strict=True):
            rows.hyperparameters["lr"] = rate
        assert loop.step() == 0.75
        url = client.checkpoint("for the test").wait(DEADLINE_S).url
    with (
        ps.local_cluster(2, 1, resume=url) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        loop = Rated(client, is_in_model=is_in_model)
        assert loop.step() == 0.75
        loop.both[0].hyperparameters["lr"] = 1.0  # the script's own wish
        assert loop.step() == 1.5
