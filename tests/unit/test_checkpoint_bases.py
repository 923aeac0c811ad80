"""The scheduler's machine when checkpoints are made: which may refer to which."""

from __future__ import annotations

import pytest

from ps_core.cluster_view import Role
from ps_core.errors import InvalidConfig
from ps_core.keys import TableId
from ps_core.manifest import PartReport, ReportedTable
from scheduler.machine.checkpoint_state import CheckpointWritten
from scheduler.machine.cluster import Created
from tests.unit.cluster_harness import Harness

MODEL = TableId(1)


class Saving(Harness):
    """Two servers and a table; who has written what is up to the test."""

    def __init__(self, full_every: int) -> None:
        super().__init__(checkpoint_url="/runs/7", checkpoint_full_every=full_every)
        self.servers = [self.join(Role.SERVER) for _ in range(2)]
        workers = [self.join(Role.WORKER) for _ in range(2)]
        assert isinstance(self.create(workers[0]), Created)

    def begin(self) -> tuple[int, int]:
        """The number of a new checkpoint, and its base."""
        pending = self.cluster.begin_checkpoint("for the test", self.now_s).reply
        under_way = self.cluster.view.checkpoint
        assert under_way is not None
        assert under_way.number == pending.number
        return under_way.number, under_way.base

    def write(self, number: int) -> None:
        """Every server writes its part."""
        proposed = self.cluster.view.tables_by_name["model"].proposed
        assert proposed is not None
        for server in self.servers:
            self.cluster.prepare_change(server, MODEL, proposed.number, 5)
        table = self.cluster.view.tables_by_name["model"]
        blocks: dict[int, int] = {}
        for range_id, found in table.blocks_by_range(len(self.cluster.view.ranges)).items():
            primary = self.cluster.view.ranges[range_id].primary
            assert primary is not None
            blocks[primary] = blocks.get(primary, 0) + len(found)
        for server in self.servers:
            part = PartReport("file", 10, "", {MODEL: ReportedTable(blocks[server.node_id], 5)})
            decision = self.cluster.report_part(server, number, part)
        assert [type(each) for each in decision.transitions] == [CheckpointWritten]

    def make(self, problem: str = "") -> tuple[int, int]:
        number, base = self.begin()
        self.write(number)
        self.cluster.end_checkpoint(number, problem)
        return number, base


@pytest.mark.parametrize(
    ("full_every", "bases"), [(1, [0, 0, 0]), (2, [0, 1, 0, 3, 0]), (3, [0, 1, 2, 0, 4, 5, 0])]
)
def test_one_of_so_many_is_full(full_every: int, bases: list[int]) -> None:
    cluster = Saving(full_every)
    assert [cluster.make() for _ in bases] == list(enumerate(bases, 1))


def test_one_that_was_not_written_is_nobodys_base() -> None:
    cluster = Saving(9)
    cluster.make()
    assert cluster.begin() == (2, 1)
    cluster.pass_time(61, *cluster.servers)  # nobody promises anything
    assert cluster.cluster.view.checkpoint is None
    assert cluster.make() == (3, 1)
    assert cluster.make() == (4, 3)


def test_after_a_manifest_that_could_not_be_written_the_next_is_full() -> None:
    """It may have been for want of a base."""
    cluster = Saving(9)
    assert [cluster.make(), cluster.make(), cluster.make("its base is gone")] == [
        (1, 0), (2, 1), (3, 2),
    ]  # fmt: skip
    assert [cluster.make(), cluster.make()] == [(4, 0), (5, 4)]


def test_that_none_is_full_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="checkpoint_full_every is 0; expected at least 1"):
        Saving(0)
