"""What a worker keeps of its embedding rows in a checkpoint, and when: a run goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
