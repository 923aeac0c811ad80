"""`state_dict` and `load_state_dict`: torch's layout, and what the servers hold (S16)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ps_worker as ps
from tests.integration import state_jobs as jobs
from tests.integration.state_jobs import STEPS, OneProcess, StateDict
from tests.integration.training_jobs import Values
from tests.integration.training_models import differing
from tests.integration.worker_pool import Pool, Workers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

WORKERS = 2


def check_same(ours: StateDict, theirs: StateDict) -> None:
    """Bit for bit, and every key of torch's."""
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entry in theirs["state"].items():
        assert ours["state"][number].keys() == entry.keys()
        for name, value in entry.items():
            found = ours["state"][number][name]
            assert found.dtype == value.dtype
            assert torch.equal(found, value), (number, name)
    for own, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {key: own[key] for key in group} == group


def check_all_equal(histories: list[list[Values]], expected: list[Values]) -> None:
    for rank, history in enumerate(histories):
        for step, (ours, theirs) in enumerate(zip(history, expected, strict=True)):
            assert differing(ours, theirs) == [], f"rank {rank}, step {step}"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", jobs.PAIRS)
def test_state_is_that_of_torch_and_goes_on_there_and_here(workers: Workers, kind: str) -> None:
    """Tensors that no step has touched have none; step counts differ by tensor."""
    reference = OneProcess(kind, first_at=1)
    before = reference.train(0, 3)
    theirs = jobs.copied(reference.optimizer.state_dict())
    after = reference.train(3, STEPS)

    found = workers.run(jobs.train, name=f"save {kind}", kind=kind, steps=(0, 3), first_at=1)
    check_all_equal([history for history, _, _ in found], before)
    (_, model, ours), (_, _, others) = found
    check_same(ours, theirs)
    check_same(others, theirs)

    in_torch = OneProcess(kind, first_at=1)
    in_torch.model.load_state_dict(model)
    in_torch.optimizer.load_state_dict(ours)
    check_all_equal([in_torch.train(3, STEPS)], after)

    resumed = workers.run(
        jobs.train, name=f"resume {kind}", kind=kind, steps=(3, STEPS), saved=(model, theirs),
        first_at=1,
    )  # fmt: skip
    check_all_equal([history for history, _, _ in resumed], after)
    check_same(resumed[0][2], reference.optimizer.state_dict())


@pytest.fixture(scope="module")
def adam() -> StateDict:
    """Of three steps elsewhere."""
    reference = OneProcess("adam")
    reference.train(0, 3)
    found: StateDict = reference.optimizer.state_dict()
    return found


def other_state(adam: StateDict) -> StateDict:
    """The same but for one number."""
    other = jobs.copied(adam)
    other["state"][1]["exp_avg"][0] += 1.0
    return dict(other)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_ranks_that_load_different_state_are_told_and_nothing_changes(
    workers: Workers, adam: StateDict, ranks: tuple[int, ...]
) -> None:
    """Until all have loaded the same."""
    saved = {rank: other_state(adam) if rank else adam for rank in ranks}
    found = workers.run(jobs.load_apart, name=f"apart {ranks}", saved=saved, common=adam)
    for rank, (told, states) in enumerate(found):
        assert told[0] == told[2] == ""
        assert "EditRefused" in told[1]
        assert "loaded optimizer state" in told[1]
        if rank in ranks:
            assert "which waits for a step that takes all of it" in told[1]
            check_same({**states[1], "param_groups": []}, {**saved[rank], "param_groups": []})
        else:
            check_same(states[1], states[0])
        assert states[2]["state"][0]["step"] == adam["state"][0]["step"] + 1
    check_same(found[0][1][2], found[1][1][2])


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["asp", "ssp:2", "bsp:backup=1"])
def test_where_no_step_is_all_workers_a_load_is_refused_at_once(
    workers: Workers, adam: StateDict, consistency: str
) -> None:
    found = workers.run(
        jobs.load_apart,
        name=f"apart {consistency}",
        saved={0: adam},
        common=adam,
        consistency=consistency,
    )
    assert [step for step in found[0][0] if step] == [
        step for step in found[0][0] if step.startswith("load: optimizer state was loaded into")
    ]
    assert "set_consistency('bsp')" in found[0][0][1]
    assert found[0][1][2]["state"][0]["step"] < 7


def test_what_was_read_may_be_loaded_again_in_every_setting(workers: Workers) -> None:
    """Accelerate does so with every optimizer; another may have taken a step meanwhile."""
    for job in (jobs.read_state, jobs.step_alone):
        workers.run(job, name="again")
    for rank, found in enumerate(workers.run(jobs.load_again, name="again")):
        steps, told, told_other = found
        assert steps == 1.0
        assert (told == "") == (rank == 1)  # rank 0 would go back behind its own step
        assert "optimizer state was loaded into 'again'" in told_other


@pytest.mark.thorough
def test_a_step_that_waits_in_the_middle_of_a_load_goes_on(
    pool: Pool, workers: Workers, adam: StateDict
) -> None:
    """After WaitExpired the rest of the state follows, once; the gradient counts once."""
    with (
        ps.local_cluster(servers=2, workers=WORKERS) as cluster,
        pool.connected(cluster.address, WORKERS, deadline_s=1.0) as impatient,
    ):
        first, _ = impatient.run(jobs.load_and_wait, name="waits", saved=adam)
        assert "WaitExpired" in first
        assert "worker 1" in first
        found = impatient.run(jobs.go_on, name="waits")
    reference = OneProcess("adam")
    reference.optimizer.load_state_dict(adam)
    for told, told_next, _, state in found:
        assert told == told_next == ""
        assert state["state"][0]["step"] == 5
    check_same(found[0][3], found[1][3])


def test_what_a_script_sees_of_its_optimizer(workers: Workers, adam: StateDict) -> None:
    """State that was loaded is there before a step; what the servers have is no edit."""
    saved = jobs.copied(adam)
    saved["param_groups"][0]["lr"] = 0.25
    for seen in workers.run(jobs.look, name="look", saved=saved):
        assert seen["fresh"]["state"] == {}
        assert not seen["is_pending"]
        check_same(seen["loaded"], saved)
        assert seen["rate"] == 0.25 * 0.5
        for told in seen["problems"].values():
            assert "optimizer.state_dict()" in told
        assert set(seen["problems"]) == {"deepcopy", "torch.save"}


def test_wrong_state_is_refused_with_what_is_wrong(workers: Workers, adam: StateDict) -> None:
    def changed(number: int, **entry: Any) -> StateDict:
        other = jobs.copied(adam)
        other["state"][number].update(entry)
        other["state"].pop(6, None)  # 'last.bias' is frozen
        return dict(other)

    def of(make: Any, count: int = 7) -> StateDict:
        found: StateDict = make([torch.zeros(1) for _ in range(count)]).state_dict()
        return found

    lacking = changed(1)
    del lacking["state"][1]["exp_avg_sq"]
    wrong = {
        "of SGD": of(lambda p: torch.optim.SGD(p, lr=0.1)),
        "of AdamW": of(torch.optim.AdamW),
        "amsgrad": of(lambda p: torch.optim.Adam(p, amsgrad=True)),
        "six": of(torch.optim.Adam, 6),
        "groups": of(lambda p: torch.optim.Adam([{"params": p[:3]}, {"params": p[3:]}])),
        "shape": changed(1, exp_avg=torch.zeros(3)),
        "infinite": changed(1, exp_avg=torch.full((20, 12), torch.inf)),
        "half a step": changed(0, step=torch.tensor(1.5)),
        "another array": changed(1, square_avg=torch.zeros(20, 12)),
        "lacks one": lacking,
        "frozen": adam,
        "no dict": {"state": {0: 3}, "param_groups": adam["param_groups"]},
        "unknown": {"state": {9: {}}, "param_groups": adam["param_groups"]},
        "nothing": {},
    }
    told, _ = workers.run(jobs.refuse, name="refuse", saved=wrong, kind="adam")
    expected = {
        "of SGD": "no 'amsgrad', which Adam needs: it is another optimizer's",
        "of AdamW": "AdamW's; this optimizer is Adam",
        "amsgrad": "'amsgrad' of table",
        "six": "has 6 parameters; this optimizer's has 7",
        "groups": "2 parameter groups; this optimizer has 1",
        "shape": "'first.weight': 'exp_avg' is (3,); expected (20, 12)",
        "infinite": "'exp_avg' has an infinity or a NaN",
        "half a step": "has step 1.5; expected a whole number",
        "another array": "'first.weight' has 'square_avg'; adam has exp_avg, exp_avg_sq, step",
        "lacks one": "'first.weight' has no 'exp_avg_sq', which adam needs",
        "frozen": "'last.bias', which is frozen",
        "no dict": "parameter 0 is int; expected a dict",
        "unknown": "an entry for 9",
        "nothing": "has no 'param_groups'",
    }
    assert {what for what, words in expected.items() if words not in told[what]} == set(), told


def test_halves_groups_and_schedules_go_on(workers: Workers) -> None:
    """The servers' float32 values of bfloat16 parameters begin at what the script saved: so the
    interrupted run is compared with itself, resumed twice.
    """
    whole = workers.run(jobs.train_halves, name="halves", saved=None)
    kept = whole[0][1]
    assert {v.dtype for entry in kept["optimizer"]["state"].values() for v in entry.values()} == {
        torch.float32
    }
    assert [group["lr"] for group in kept["optimizer"]["param_groups"]] != [0.02, 0.01]
    first = workers.run(jobs.train_halves, name="halves again", saved=kept)
    again = workers.run(jobs.train_halves, name="halves once more", saved=kept)
    check_all_equal([history for history, _ in first], again[0][0])
