"""Shards of data sets, at the scheduler's machine (SEMANTICS S20)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ps_core import limits
from ps_core.change import TableChange
from ps_core.cluster_view import Role, Session
from ps_core.consistency import parsed
from ps_core.errors import Fenced, InvalidConfig, NotPermitted
from ps_core.manifest import DataSetSpec, PartReport, SavedDataSet
from ps_worker.client.data_shards import check_apart
from scheduler.machine.changes import ChangeRequest, PendingProposal
from scheduler.machine.checkpoint_state import CheckpointWritten
from scheduler.machine.data_shards import (
    DataSet,
    DataShardsReturned,
    ShardLease,
    ShardRequest,
)
from scheduler.machine.state import Restored
from tests.unit.cluster_harness import SPEC as TABLE
from tests.unit.cluster_harness import Harness, refused
from tests.unit.test_cluster_checkpoints import Saving

SPEC = DataSetSpec("train", 100, 20, seed=7)
ORDER = [DataSet("", SPEC).shard_at(position) for position in range(SPEC.shard_count)]


def lease(
    harness: Harness, worker: Session, want_count: int, done: Sequence[int] = (), **fields: Any
) -> ShardLease:
    """A worker's call, of SPEC and pass 0 if `fields` do not say otherwise."""
    request = ShardRequest(SPEC, 0, tuple(done), want_count)
    request = replace(request, **fields)
    before = harness.cluster.view
    decision = harness.cluster.lease_data_shards(worker, request, harness.now_s)
    assert not decision.transitions
    assert harness.cluster.view == before
    return decision.reply


class Sharing(Harness):
    """A cluster whose workers share a data set."""

    def __init__(self, worker_count: int = 2, **settings: Any) -> None:
        super().__init__(**settings)
        self.workers = [self.join(Role.WORKER) for _ in range(worker_count)]

    lease = lease

    @property
    def data_set(self) -> DataSet:
        (found,) = self.cluster.data_sets
        return found

    def finish_pass(self, worker: Session, number: int) -> None:
        shards = self.lease(worker, SPEC.shard_count, pass_number=number).shards
        self.lease(worker, 0, shards, pass_number=number)


def test_each_worker_gets_the_next_shards_of_the_order() -> None:
    sharing = Sharing()
    first, second = sharing.workers
    assert sharing.lease(first, 2).shards == tuple(ORDER[:2])
    assert sharing.lease(second, 1).shards == (ORDER[2],)
    assert sharing.lease(first, 2, [ORDER[1]]).shards == (ORDER[0], ORDER[3])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_an_order_has_every_shard_once(count: int) -> None:
    data_set = DataSet("", DataSetSpec("train", count, 1, seed=3))
    assert sorted(map(data_set.shard_at, range(count))) == list(range(count))


def test_another_pass_and_another_seed_have_another_order() -> None:
    def order(pass_number: int, seed: int) -> list[int]:
        data_set = DataSet("", DataSetSpec("t", 1000, 10, seed), pass_number)
        return [data_set.shard_at(position) for position in range(100)]

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(0, 1)), tuple(order(1, 1)), tuple(order(0, 2))}) == 3
    # No shard stays near its place: of 100 shards, one is expected to be where it was.
    assert sum(shard == position for position, shard in enumerate(order(0, 1))) < 6
    assert order(0, 1)[:4] == [96, 58, 91, 60], "an order of a checkpoint is another one now"


def test_a_repeated_request_changes_nothing() -> None:
    sharing = Sharing()
    first, second = sharing.workers
    leased = sharing.lease(first, 2)
    before = sharing.data_set
    assert sharing.lease(first, 2) == replace(leased, issued_count=0)
    assert sharing.data_set == before
    reported = sharing.lease(first, 1, [ORDER[0]])
    before = sharing.data_set
    assert sharing.lease(first, 1, [ORDER[0]]) == replace(reported, reported_count=0)
    assert sharing.data_set == before
    assert sharing.lease(second, 1).shards == (ORDER[2],)


def test_a_report_is_known_after_the_pass_is_over_and_after_a_restart() -> None:
    sharing = Sharing()
    first, second = sharing.workers
    shards = sharing.lease(first, 4).shards
    last = sharing.lease(second, 1).shards
    sharing.lease(first, 0, shards)
    over = sharing.lease(second, 1, last)
    assert (over.pass_number, over.shards, over.waits_for) == (1, (), "")
    assert over.ends_pass
    repeated = replace(over, reported_count=0, ends_pass=False)
    assert sharing.lease(second, 1, last) == repeated
    sharing.start_again()
    assert sharing.lease(second, 1, last) == repeated


def test_a_worker_waits_while_others_have_the_last_shards_and_not_while_it_has_one() -> None:
    sharing = Sharing()
    first, second = sharing.workers
    sharing.lease(first, 4)
    assert not sharing.lease(second, 2).waits_for
    waits = sharing.lease(second, 1, [ORDER[4]])
    assert waits.waits_for.startswith(
        "the last 4 shards of pass 0 of data set 'train' are leased to worker node 1 (alive, rank 0"
    )
    assert not sharing.lease(second, 0).waits_for
    sharing.lease(first, 0, ORDER[:4])
    assert sharing.lease(second, 1).pass_number == 1
    assert not sharing.lease(second, 1).waits_for


def test_the_next_pass_begins_when_the_last_shard_is_done() -> None:
    sharing = Sharing(1)
    (worker,) = sharing.workers
    sharing.finish_pass(worker, 0)
    assert sharing.lease(worker, 1, pass_number=0).shards == ()
    assert sharing.lease(worker, 1, pass_number=1).shards == (sharing.data_set.shard_at(0),)
    assert sharing.lease(worker, 0, pass_number=None).pass_number == 1


@pytest.mark.parametrize("unfinished", [True, False])
def test_shards_of_a_worker_that_ended_are_issued_again_first(unfinished: bool) -> None:
    sharing = Sharing()
    first, second = sharing.workers
    sharing.lease(first, 2)
    sharing.lease(first, 1, [ORDER[1]])
    sharing.lease(second, 1)
    ended = sharing.cluster.deregister(first, "test", sharing.now_s, unfinished=unfinished)
    (returned,) = [t for t in ended.transitions if isinstance(t, DataShardsReturned)]
    assert (returned.worker.rank, returned.name, returned.shard_count) == (0, "train", 1)
    assert sharing.data_set.reissued_count == 1
    assert sharing.lease(second, 3).shards == (ORDER[2], ORDER[0], ORDER[3])
    assert sharing.data_set.done_count == 1
    with pytest.raises(Fenced):
        sharing.lease(first, 0, [ORDER[0]])


def test_a_silent_worker_keeps_its_shards_until_it_is_gone() -> None:
    sharing = Sharing(worker_timeout_s=10.0)
    silent, living = sharing.workers
    sharing.lease(silent, 5)
    sharing.pass_time(9, living)
    assert "worker node 1 (silent" in sharing.lease(living, 1).waits_for
    sharing.pass_time(2, living)
    assert sharing.lease(living, 1).shards == (ORDER[0],)


def test_a_restarted_scheduler_keeps_leases_and_what_is_done() -> None:
    sharing = Sharing()
    first, second = sharing.workers
    sharing.lease(first, 2)
    sharing.lease(first, 1, [ORDER[0]])
    before = sharing.data_set
    sharing.start_again()
    assert sharing.data_set == before
    assert sharing.lease(first, 1).shards == (ORDER[1],)
    assert sharing.lease(second, 1).shards == (ORDER[2],)


def test_a_report_by_who_does_not_hold_the_shard_is_refused() -> None:
    """DS-2."""
    sharing = Sharing()
    first, second = sharing.workers
    sharing.lease(first, 2)
    sharing.lease(second, 1)
    before = sharing.data_set
    for worker, done, pass_number, words in (
        (second, [ORDER[0]], 0, f"shard {ORDER[0]} is leased to node 1; expected shards that"),
        (first, [ORDER[3]], 0, f"shards {ORDER[3]} of pass 0 of data set 'train' were reported, "),
        (first, [ORDER[0], ORDER[0]], 0, "and one of them comes twice"),
        (first, [ORDER[0], ORDER[2]], 0, f"shard {ORDER[2]} is leased to node 2"),
        (first, [ORDER[0]], 1, "the present pass is 0"),
        (first, [ORDER[0]], None, "done_shards come without pass_number"),
        (first, [], 1, "pass 1 of data set 'train' was asked for; the present one, 0, is not over"),
    ):
        refused(
            InvalidConfig,
            words,
            by=lambda w=worker, d=done, p=pass_number: sharing.lease(w, 0, d, pass_number=p),  # type: ignore[misc]
            of=sharing,
        )
        assert sharing.data_set == before
    sharing.lease(first, 0, [ORDER[0]])
    sharing.lease(first, 0, [ORDER[1]])
    with pytest.raises(InvalidConfig, match=f"shard {ORDER[0]} is not leased"):
        sharing.lease(first, 0, [ORDER[0]])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(SPEC, sample_count=0), "sample_count of data set 'train' is 0; expected 1 to"),
        (replace(SPEC, sample_count=2**53 + 1), f"expected 1 to {2**53}"),
        (replace(SPEC, shard_size=0), "shard_size of data set 'train' is 0; expected 1 to its"),
        (replace(SPEC, shard_size=101), "is 101; expected 1 to its samples, 100"),
        (replace(SPEC, name=""), "name has 0 bytes; expected 1 to 200"),
        (replace(SPEC, name="x" * 201), "name has 201 bytes; expected 1 to 200"),
    ],
)
def test_a_data_set_that_nobody_can_train_is_refused(spec: DataSetSpec, words: str) -> None:
    sharing = Sharing()
    with pytest.raises(InvalidConfig, match=words):
        sharing.lease(sharing.workers[0], 1, spec=spec)
    assert not sharing.cluster.data_sets


def test_workers_that_differ_about_a_data_set_are_told_both_figures() -> None:
    sharing = Sharing()
    first, second = sharing.workers
    sharing.lease(first, 1)
    for other, words in (
        (replace(SPEC, sample_count=90), "sample_count .* is 90, and was declared as 100 by"),
        (replace(SPEC, shard_size=10), "shard_size .* is 10, and was declared as 20 by"),
        (replace(SPEC, seed=0), "seed .* is 0, and was declared as 7 by"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            sharing.lease(second, 1, spec=other)


def test_a_table_stays_asynchronous_while_workers_have_shards() -> None:
    """The worker that has no shard left would keep the other waiting, and wait for its shards."""
    sharing = Sharing()
    first, second = sharing.workers
    operator = sharing.join(Role.OPERATOR)
    for _ in range(2):
        sharing.join(Role.SERVER)
    sharing.create(first, replace(TABLE, consistency=parsed("asp")))
    sharing.create(first, replace(TABLE, name="other", consistency=parsed("bsp")))

    def ask(text: str, by: Session = second, table: str = "model") -> object:
        wanted = ChangeRequest(table, parsed(text), 0, sharing.now_s + 5)
        return sharing.cluster.set_consistency(by, wanted, sharing.now_s).reply

    sharing.lease(first, 1)
    for text, by in (("bsp", second), ("ssp:3", first), ("bsp", operator)):
        refused(
            InvalidConfig,
            f"table 'model' is asp, and would be {text} while shards of data set 'train' are ",
            "leased to worker node 1 (alive",
            "Nothing has changed; ask again when the pass is over, or these workers have left",
            by=lambda t=text, b=by: ask(t, b),  # type: ignore[misc]
            of=sharing,
        )
    assert ask("asp") == TableChange(0, 0, parsed("asp"))
    assert isinstance(ask("ssp:1", table="other"), PendingProposal)
    sharing.leave(first)
    assert isinstance(ask("bsp"), PendingProposal)
    assert sharing.lease(second, 1).shards
    assert isinstance(ask("bsp"), PendingProposal)  # it was asked for before the lease


def test_a_worker_begins_no_shard_before_a_change_that_is_proposed() -> None:
    """It was asked for before anyone had a shard."""
    sharing = Sharing(1)
    for _ in range(2):
        sharing.join(Role.SERVER)
    sharing.create(sharing.workers[0], replace(TABLE, consistency=parsed("asp")))
    check_apart(sharing.cluster.view.tables[0])
    for text, words in (("asp:reject=1", ""), ("bsp", "table 'model' is about to become bsp")):
        (table,) = sharing.cluster.view.tables
        proposed = replace(table, proposed=TableChange(1, 3, parsed(text)))
        if not words:
            check_apart(proposed)
            continue
        with pytest.raises(InvalidConfig, match=words):
            check_apart(proposed)


def test_shards_of_another_run_keep_no_table_asynchronous() -> None:
    sharing = Sharing(1)
    other = sharing.join(Role.WORKER, run="nightly", world_size=1)
    for _ in range(2):
        sharing.join(Role.SERVER)
    sharing.create(other, replace(TABLE, consistency=parsed("asp")))
    sharing.lease(sharing.workers[0], 1)
    wanted = ChangeRequest("model", parsed("bsp"), 0, sharing.now_s + 5)
    asked = sharing.cluster.set_consistency(other, wanted, sharing.now_s).reply
    assert isinstance(asked, PendingProposal)


def test_limits() -> None:
    sharing = Sharing()
    worker, _ = sharing.workers
    most = limits.MAX_HELD_SHARD_COUNT
    with pytest.raises(InvalidConfig, match=f"want_count is {most + 1}; expected 0 to {most}"):
        sharing.lease(worker, most + 1)
    assert len(sharing.lease(worker, most).shards) == SPEC.shard_count
    for number in range(1, limits.MAX_DATA_SET_COUNT):
        sharing.lease(worker, 0, spec=replace(SPEC, name=str(number)))
    with pytest.raises(InvalidConfig, match="'more' would be one of more than 100"):
        sharing.lease(worker, 0, spec=replace(SPEC, name="more"))


def test_only_workers_lease() -> None:
    sharing = Sharing()
    with pytest.raises(NotPermitted, match="LeaseDataShards is for workers"):
        sharing.lease(sharing.join(Role.READER), 1)


def test_a_data_set_is_of_one_run_and_goes_with_it() -> None:
    sharing = Sharing(1)
    other = sharing.join(Role.WORKER, run="nightly", world_size=1)
    operator = sharing.join(Role.OPERATOR)
    assert sharing.lease(sharing.workers[0], 1).shards == (ORDER[0],)
    assert sharing.lease(other, 1).shards == (ORDER[0],)
    sharing.leave(other)
    sharing.cluster.remove_run(operator, "nightly")
    assert [data_set.run for data_set in sharing.cluster.data_sets] == [""]


def test_a_checkpoint_has_what_was_done_before_its_cut_and_a_restore_issues_the_rest() -> None:
    """DS-3."""
    saving = Saving()
    worker, other = saving.workers
    lease(saving, worker, 3)
    saving.begin()
    lease(saving, worker, 3, [ORDER[0]])
    saving.cut()
    lease(saving, worker, 0, [ORDER[2]])
    for server in (0, 1):
        saving.report(saving.servers[server], saving.written(server))
    saving.report(worker, PartReport("worker-0", 9, "cd"))
    saving.report(other, PartReport("worker-1", 9, "cd"))
    (written,) = [each for each in saving.transitions if isinstance(each, CheckpointWritten)]
    saved = SavedDataSet(SPEC, 0, 4, (ORDER[1], ORDER[2], ORDER[3]), 3)
    assert written.attempt.data_sets == (saved,)
    later = Sharing(restored=Restored("file:///c/1", {}, data_sets=(saved,)))
    first, second = later.workers
    assert later.lease(first, 2).shards == (ORDER[1], ORDER[2])
    assert later.lease(second, 5).shards == (ORDER[3], ORDER[4])
    later.lease(first, 0, [ORDER[1], ORDER[2]])
    assert later.lease(second, 1, [ORDER[3], ORDER[4]]).pass_number == 1
    assert later.data_set.reissued_count == 3
