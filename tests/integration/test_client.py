"""The client's verbs against a live cluster: two workers of one process, two servers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from threading import Barrier
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import ps_worker as ps
from ps_worker.transport.metrics import REGISTRY

BLOCK = 64
DEADLINE_S = 20.0
SHORT_S = 0.5

_names = count()


@dataclass(frozen=True)
class Team:
    """The workers of a cluster of two."""

    address: str
    first: ps.Client
    second: ps.Client

    def table(
        self, layout: Any, optimizer: Any = None, **options: Any
    ) -> tuple[ps.TableHandle, ps.TableHandle]:
        """A new table, as both workers see it."""
        name = f"table {next(_names)}"
        optimizer = optimizer or ps.SGD(lr=1.0)
        options = {"block_elements": BLOCK, **options}
        ours = self.first.create_table(name, layout, optimizer=optimizer, **options)
        theirs = self.second.create_table(name, layout, optimizer=optimizer, **options)
        return ours, theirs


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with (
        ps.local_cluster(servers=2, workers=2) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=DEADLINE_S) as first,
        ps.connect(cluster.address, rank=1, request_deadline_s=DEADLINE_S) as second,
    ):
        yield Team(cluster.address, first, second)


def full(size: int, value: float) -> npt.NDArray[np.float32]:
    return np.full(size, value, dtype=np.float32)


def test_a_step_is_measured_once_however_often_it_is_pulled(team: Team) -> None:
    """An evaluation pulls again, minutes later."""

    def count() -> float:
        return REGISTRY.get_sample_value("pushpull_worker_step_duration_seconds_count") or 0.0

    ours, theirs = team.table(BLOCK)
    before = count()
    for step in (1, 2):
        for client, table in ((team.first, ours), (team.second, theirs)):
            client.push(table, full(BLOCK, 1.0))
        for _ in range(3):
            team.first.pull(ours)
        assert count() == before + step


# --- who


def test_a_worker_knows_its_place(team: Team) -> None:
    assert (team.first.rank, team.second.rank) == (0, 1)
    assert team.first.world_size == 2
    assert team.first.session.cluster_id == team.second.session.cluster_id
    assert not team.first.is_reader


def test_a_rank_that_is_taken_is_refused(team: Team) -> None:
    with pytest.raises(ps.InvalidConfig, match="rank 1"):
        ps.connect(team.address, rank=1)


def test_a_process_that_connects_again_is_told_that_it_has_before(team: Team) -> None:
    with pytest.raises(ps.InvalidConfig, match=r"has connected as worker \d before: "):
        ps.connect(team.address)


def test_a_worker_beyond_the_number_is_refused(team: Team) -> None:
    with pytest.raises(ps.InvalidConfig, match="2"):
        ps.connect(team.address)


def test_another_clusters_id_is_refused(team: Team) -> None:
    with pytest.raises(ps.Fenced):
        ps.connect(team.address, role="reader", cluster_id="another")


def test_an_operator_opens_no_table(team: Team) -> None:
    ours, _ = team.table(4)
    with ps.connect(team.address, role="operator") as operator:
        with pytest.raises(ps.NotPermitted, match="an operator touches no values"):
            operator.table(ours.name, timeout_s=SHORT_S)
        operator.set_consistency(ours.name, "asp")


def test_an_option_that_connect_lacks_is_refused(team: Team) -> None:
    with pytest.raises(ps.InvalidConfig, match="no option colour"):
        ps.connect(team.address, colour=1)  # type: ignore[call-arg]


# --- tables


def test_the_same_table_again_is_the_same_handle(team: Team) -> None:
    ours, _ = team.table(100)
    again = team.first.create_table(ours.name, 100, optimizer=ps.SGD(lr=1.0), block_elements=BLOCK)
    assert again is ours
    assert team.first.table(ours.name) is ours


def test_a_table_of_another_layout_is_refused(team: Team) -> None:
    ours, theirs = team.table(100)
    with pytest.raises(ps.TableExists, match=r"element_count.*10[01].*10[01]"):
        team.second.create_table(ours.name, 101, optimizer=ps.SGD(lr=1.0), block_elements=BLOCK)
    assert team.second.table(ours.name) is theirs


def test_a_table_that_nobody_created_is_not_found(team: Team) -> None:
    with pytest.raises(ps.TableNotFound, match="table 'nothing' was not created within"):
        team.first.table("nothing", timeout_s=SHORT_S)


def test_a_handle_belongs_to_its_client(team: Team) -> None:
    _, theirs = team.table(10)
    with pytest.raises(ps.InvalidConfig, match="another client"):
        team.first.push(theirs, full(10, 1.0))


# --- steps under BSP


def test_an_update_is_the_mean_of_the_workers_steps(team: Team) -> None:
    ours, theirs = team.table((20, 10))
    one = team.first.push(ours, full(200, 1.0).reshape(20, 10))
    two = team.second.push(theirs, torch.full((20, 10), 3.0))
    assert team.first.wait(one) == ps.StepResult(clock=1, applied=True, staleness=0)
    assert team.second.wait(two).clock == 1
    for client, table in ((team.first, ours), (team.second, theirs)):
        found = client.pull(table)
        assert found.shape == (20, 10)
        assert np.all(np.asarray(found) == -2.0)


def test_push_pull_gives_the_table_with_the_step_in_it(team: Team) -> None:
    ours, theirs = team.table(100, reduction="sum")
    team.second.push(theirs, full(100, 2.0))
    out = np.empty(100, dtype=np.float32)
    assert team.first.push_pull(ours, full(100, 1.0), out=out) is out
    assert np.all(out == -3.0)


def test_a_pull_waits_for_the_steps_of_all_workers(team: Team) -> None:
    ours, theirs = team.table(100)
    came: SimpleQueue[Any] = SimpleQueue()
    ticket = team.first.push(ours, full(100, 1.0))
    pull = team.first.pull(ours, callback=came.put)
    assert not pull.done()
    assert not ticket.done()
    team.second.push(theirs, full(100, 1.0))
    assert np.all(came.get(timeout=DEADLINE_S) == -1.0)
    assert np.all(np.asarray(team.first.wait(pull)) == -1.0)


def test_waits_that_expire_say_who_is_missing(team: Team) -> None:
    ours, theirs = team.table(100)
    ticket = team.first.push(ours, full(100, 1.0))
    with pytest.raises(ps.WaitExpired, match="worker 1"):
        team.first.wait(ticket, SHORT_S)
    with pytest.raises(ps.WaitExpired, match="worker 1"):
        team.first.pull(ours, timeout_s=SHORT_S)
    team.second.push(theirs, full(100, 1.0))
    assert team.first.wait(ticket).applied
    assert np.all(np.asarray(team.first.pull(ours)) == -1.0)


def test_the_ticket_of_an_unsealed_step_raises_at_once(team: Team) -> None:
    ours, theirs = team.table(100)
    open_ticket = team.first.push(ours, full(64, 2.0), slice=slice(0, 64), seal=False)
    with pytest.raises(ps.InvalidConfig, match=r"step 1 .* has not been sealed"):
        team.first.wait(open_ticket)
    team.first.push(ours, full(36, 4.0), slice=slice(64, 100), seal=False)
    team.first.seal(ours)
    team.second.seal(theirs)
    assert team.first.wait(open_ticket).applied
    found = np.asarray(team.first.pull(ours))
    assert np.all(found[:64] == -1.0)
    assert np.all(found[64:] == -2.0)


def test_tensors_that_a_push_leaves_out_are_skipped(team: Team) -> None:
    layout = [("a", (10,)), ("b", (2, 50)), ("c", ())]
    ours, theirs = team.table(layout, ps.SGD(lr=1.0, weight_decay=1.0), init=ps.Constant(1.0))
    team.first.push(ours, {"b": full(100, 1.0).reshape(2, 50)}, seal=False)
    team.first.push(ours, {"b": full(100, 3.0)}, seal=False)  # the last push of a block counts
    team.first.push(ours, {"c": 1.0})
    team.second.seal(theirs)
    parts = ours.tensors(team.first.pull(ours))
    assert np.all(np.asarray(parts["a"]) == 1.0)  # not even decayed
    assert np.all(np.asarray(parts["b"]) == 1.0 - (1.5 + 1.0))
    assert float(parts["c"]) == 1.0 - (0.5 + 1.0)
    assert parts["b"].shape == (2, 50)


def test_a_skipped_step_takes_no_part(team: Team) -> None:
    ours, theirs = team.table(100)
    team.first.push(ours, full(100, 8.0), seal=False)
    skipped = team.first.seal(ours, skip=True)
    team.second.push(theirs, full(100, 1.0))
    assert not team.first.wait(skipped).applied
    assert np.all(np.asarray(team.first.pull(ours)) == -1.0)


def test_hyperparameters_travel_with_the_step(team: Team) -> None:
    ours, theirs = team.table(100)
    team.first.push(ours, full(100, 1.0), hyperparameters={"lr": 0.25})
    team.second.push(theirs, full(100, 1.0), hyperparameters={"lr": 0.25})
    assert np.all(np.asarray(team.first.pull(ours)) == -0.25)


def test_a_hyperparameter_that_the_optimizer_lacks_changes_nothing(team: Team) -> None:
    ours, theirs = team.table(100)
    with pytest.raises(ps.InvalidConfig, match="no hyperparameter 'beta1'"):
        team.first.push(ours, full(100, 1.0), hyperparameters={"beta1": 0.5})
    assert ours.clock == 0
    team.second.push(theirs, full(100, 1.0))
    assert team.first.wait(team.first.push(ours, full(100, 1.0))).clock == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_with_nan_is_refused_whole(team: Team, bad: float) -> None:
    ours, theirs = team.table([("a", (100,)), ("b", (100,))])
    gradient = full(200, 1.0)
    gradient[150] = bad
    ticket = team.first.push(ours, gradient)
    fine = team.second.push(theirs, full(200, 2.0))
    with pytest.raises(ps.InvalidTensor, match=r"non-finite.*'b'"):
        team.first.wait(ticket)
    assert team.second.wait(fine).applied
    assert np.all(np.asarray(team.first.pull(ours)) == -2.0)  # the second's alone, everywhere


def test_a_table_may_take_what_is_not_finite(team: Team) -> None:
    ours, theirs = team.table(100, allow_non_finite=True)
    team.second.push(theirs, full(100, 1.0))
    assert np.all(np.isnan(np.asarray(team.first.push_pull(ours, full(100, np.nan)))))


@pytest.mark.parametrize(
    ("values", "part", "error", "message"),
    [
        (full(99, 1.0), None, ps.InvalidTensor, r"shape \(99,\); expected \(100,\)"),
        (np.zeros(100), None, ps.InvalidTensor, "dtype float64; expected float32"),
        (torch.zeros(100, dtype=torch.float16), None, ps.InvalidTensor, "float16"),
        (full(64, 1.0), slice(64, 128), ps.InvalidKeys, r"\[64, 128\)"),
        (full(10, 1.0), slice(0, 10), ps.InvalidKeys, "edges of blocks"),
        ({"nothing": full(1, 1.0)}, None, ps.InvalidKeys, "no tensor 'nothing'"),
    ],
)
def test_a_wrong_push_changes_nothing(
    team: Team, values: Any, part: Any, error: type[Exception], message: str
) -> None:
    ours, theirs = team.table(100)
    with pytest.raises(error, match=message):
        team.first.push(ours, values, slice=part)
    team.second.push(theirs, full(100, 1.0))
    assert np.all(np.asarray(team.first.push_pull(ours, full(100, 3.0))) == -2.0)


def test_the_copy_of_a_push_is_the_clients(team: Team) -> None:
    ours, theirs = team.table(100)
    gradient = full(100, 1.0)
    ticket = team.first.push(ours, gradient)
    gradient[:] = 7.0
    team.second.push(theirs, full(100, 1.0))
    team.first.wait(ticket)
    assert np.all(np.asarray(team.first.pull(ours)) == -1.0)


def test_a_window_of_a_byte_lets_one_block_go_at_a_time(team: Team) -> None:
    ours, theirs = team.table(BLOCK * 40)
    with pytest.raises(ps.InvalidConfig, match="window_bytes is 0"):
        ps.connect(team.address, role="reader", window_bytes=0)
    for clock in range(1, 4):
        team.second.push(theirs, full(BLOCK * 40, 1.0))
        found = team.first.push_pull(ours, full(BLOCK * 40, 1.0))
        assert np.all(np.asarray(found) == -clock)


def test_more_steps_than_may_be_on_their_way_wait_for_the_oldest(team: Team) -> None:
    ours, _ = team.table(10, consistency=ps.ASP(), reduction="sum")
    for _ in range(30):
        ticket = team.first.push(ours, full(10, 1.0))
    assert team.first.wait(ticket).clock == 30
    assert np.all(np.asarray(team.first.pull(ours)) == -30.0)


# --- ASP


def test_asynchronous_steps_wait_for_nobody_and_count_staleness(team: Team) -> None:
    ours, theirs = team.table(100, consistency=ps.ASP())
    team.first.pull(ours)
    for _ in range(3):
        team.second.wait(team.second.push(theirs, full(100, 1.0)))
    result = team.first.wait(team.first.push(ours, full(100, 1.0)))
    assert result == ps.StepResult(clock=1, applied=True, staleness=3)
    assert np.all(np.asarray(team.first.pull(ours)) == -4.0)
    assert team.first.wait(team.first.push(ours, full(100, 1.0))).staleness == 0
    assert team.first.progress().clocks[ours.name] == 2


def test_threads_that_push_to_one_table_each_have_steps_of_their_own(team: Team) -> None:
    ours, _ = team.table(BLOCK, consistency=ps.ASP(), reduction="sum")
    thread_count, step_count = 4, 50
    begin = Barrier(thread_count)

    def push(number: int) -> set[int]:
        begin.wait()
        ones = full(BLOCK, 1.0)
        pushed = [team.first.push(ours, ones) for _ in range(step_count)]
        if number == 0:
            team.first.push_pull(ours, ones)
        return {team.first.wait(ticket).clock for ticket in pushed}

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a thread has its turn between any two lines of another
    try:
        with ThreadPoolExecutor(thread_count) as threads:
            clocks = list(threads.map(push, range(thread_count)))
    finally:
        sys.setswitchinterval(interval_s)
    assert len(set().union(*clocks)) == thread_count * step_count
    assert np.all(np.asarray(team.first.pull(ours)) == -(thread_count * step_count + 1.0))


# --- dtypes and parts


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_comes_back_as_it_is(team: Team, dtype: str) -> None:
    kind = getattr(torch, dtype)
    ours, theirs = team.table(130, dtype=dtype)
    gradient = torch.linspace(-1, 1, 130).to(kind)
    team.second.push(theirs, gradient)
    found = torch.as_tensor(team.first.push_pull(ours, gradient))
    assert found.dtype == kind
    assert torch.equal(found, -gradient)
    out = torch.empty(130, dtype=kind)
    assert team.first.pull(ours, out=out) is out
    assert torch.equal(out, -gradient)


def test_parts_of_a_table_are_pulled_alone(team: Team) -> None:
    values = np.arange(300, dtype=np.float32)
    ours, _ = team.table([("a", (100,)), ("b", (10, 20))], init=ps.Inline(values))
    assert np.array_equal(team.first.pull(ours, slice=slice(70, 200)), values[70:200])
    assert np.array_equal(team.first.pull(ours, slice=slice(5, 6)), values[5:6])
    assert np.array_equal(team.first.pull(ours, slice="b"), values[100:].reshape(10, 20))
    with pytest.raises(ps.InvalidKeys, match=r"\[200, 301\)"):
        team.first.pull(ours, slice=slice(200, 301))
    for out in (np.empty(299, np.float32), np.empty(300, np.float64)):
        with pytest.raises(ps.InvalidTensor):
            team.first.pull(ours, out=out)


def test_a_callback_that_raises_harms_nobody(team: Team) -> None:
    ours, _ = team.table(10)

    def fail(values: Any) -> None:
        raise ValueError("on purpose")

    team.first.wait(team.first.pull(ours, callback=fail))
    assert np.all(np.asarray(team.first.pull(ours)) == 0.0)


# --- initial values


def test_nobody_pulls_before_rank_0_gave_the_values(team: Team) -> None:
    ours, theirs = team.table(100, init=ps.FromRank0())
    came: SimpleQueue[Any] = SimpleQueue()
    team.second.pull(theirs, callback=came.put)
    with pytest.raises(ps.NotPermitted, match="rank 1"):
        team.second.assign(theirs, full(100, 5.0))
    team.first.assign(ours, full(64, 5.0), slice=slice(0, 64), seal=False)
    assert came.empty()
    team.first.assign(ours, full(36, 6.0), slice=slice(64, 100))
    found = came.get(timeout=DEADLINE_S)
    assert np.all(found[:64] == 5.0)
    assert np.all(found[64:] == 6.0)
    with pytest.raises(ps.InvalidConfig, match="already"):
        team.first.assign(ours, full(100, 7.0))
    team.second.push(theirs, full(100, 1.0))
    assert np.asarray(team.first.push_pull(ours, full(100, 1.0)))[0] == 4.0


def test_a_table_with_values_is_not_assigned(team: Team) -> None:
    ours, _ = team.table(100)
    with pytest.raises(ps.InvalidConfig, match="starts with zeros"):
        team.first.assign(ours, full(100, 1.0))


def test_aggregate_gives_the_reduced_gradients(team: Team) -> None:
    ours, theirs = team.table(100, ps.Aggregate())
    for step in range(1, 4):
        team.second.push(theirs, full(100, 2.0 * step))
        assert np.all(np.asarray(team.first.push_pull(ours, full(100, 0.0))) == step)


# --- progress


def test_progress_counts_what_was_done(team: Team) -> None:
    before = team.first.progress()
    ours, _ = team.table(100, consistency=ps.ASP())
    team.first.push_pull(ours, full(100, 1.0))
    team.first.report(loss=torch.tensor(0.5), planned_steps=7, step_count=3)  # type: ignore[arg-type]
    after = team.first.progress()
    assert after.pushed_bytes - before.pushed_bytes == 400
    assert after.pulled_bytes - before.pulled_bytes == 400
    assert (after.loss, after.planned_step_count, after.step_count) == (0.5, 7, 3)
    assert after.waiting_for == ""


# --- mistakes


@pytest.mark.parametrize(
    "report",
    [
        {"planned_steps": -1},  # of Lightning and of the Hugging Face Trainer: no number is set
        {"planned_steps": 2**64},
        {"planned_steps": float("inf")},
        {"step_count": -1},
        {"step_count": "many"},
    ],
    ids=str,
)
def test_a_number_of_steps_that_no_heartbeat_has_is_refused(
    team: Team, report: dict[str, Any]
) -> None:
    ((name, given),) = report.items()
    before = team.first.progress()
    with pytest.raises(ps.InvalidConfig, match=f"^{name} is {given!r}; expected a number"):
        team.first.report(loss=1e9, **report)
    assert team.first.progress() == before


def test_parameters_that_are_frozen_at_one_worker_alone_are_said_to_be(team: Team) -> None:
    def made(client: ps.Client, *, is_frozen: bool) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model[0].requires_grad_(not is_frozen)
        ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="thawed")

    by_rank = sorted((team.first, team.second), key=lambda client: client.rank)
    made(by_rank[0], is_frozen=True)
    with pytest.raises(ps.TableExists, match=r"If other parameters are frozen now .* freeze the"):
        made(by_rank[1], is_frozen=False)


def test_a_tables_name_is_no_handle(team: Team) -> None:
    client: Any = team.first
    values = full(4, 1.0)
    verbs: tuple[Callable[[], Any], ...] = (
        lambda: client.push("weights", values),
        lambda: client.seal("weights"),
        lambda: client.assign("weights", values),
        lambda: client.push_pull("weights", values),
        lambda: client.pull("weights"),
        lambda: client.scale_update("weights", 1, 1.0),
        lambda: client.catch_up("weights"),
        lambda: client.consistency_of("weights"),
        lambda: client.tables.begin_step("weights"),
        lambda: client.pulls.start("weights", np.empty(16, np.uint8)),
    )
    for verb in verbs:
        with pytest.raises(ps.InvalidConfig, match=r"or client\.table\('weights'\)"):
            verb()
    with pytest.raises(ps.InvalidConfig, match=r"expected ps_worker\.SGD\(lr=0\.1\)"):
        client.create_table("mistaken", 4, optimizer="sgd")
    with pytest.raises(ps.InvalidConfig, match=r"torch's Adam, which knows no servers"):
        ps.DistributedOptimizer(client, torch.nn.Linear(2, 2), torch.optim.Adam)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"rank": 7}, ps.InvalidConfig, "ranks 0 to 1: ask for one of these, or for none"),
        ({"cluster_id": "other"}, ps.Fenced, "names cluster 'other'; this is cluster"),
        (
            {"scheduler": "localhost"},
            ps.InvalidConfig,
            "expected host:port, such as localhost:",
        ),
    ],
)
def test_a_refused_registration_has_its_reason_and_nothing_from_within(
    team: Team, options: dict[str, Any], error: type[Exception], expected: str
) -> None:
    given = {"scheduler": team.address, **options}
    with pytest.raises(error, match=expected) as refused:
        ps.connect(given.pop("scheduler"), **given)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
    assert [entry.name for entry in refused.traceback][1:] == ["connect"]
