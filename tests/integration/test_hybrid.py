"""Hybrid training by three workers, each a process: rows on the servers, the rest all-reduced."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ps_worker as ps
from ps_core.errors import InvalidConfig
from tests.integration import hybrid_jobs as jobs
from tests.integration.command_line import run_here
from tests.integration.hybrid_jobs import IDS, Rated, Tensors
from tests.integration.worker_pool import Pool, Workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WORKERS, STEPS = 3, 4
IMPORTED = "tests.integration.hybrid_jobs", "torch._dynamo"
"""What takes each process seconds; torch's optimizers import the compiler."""

Saved: TypeAlias = tuple[str, list[list[dict[str, Tensors]]]]
"""A checkpoint's root; and each worker's values at first, in the checkpoint and after it."""


def in_one_process(
    first: Tensors,
    steps: range,
    *,
    kind: str = "plain",
    clip_norm: float | None = None,
    skipped: int = -1,
) -> Tensors:
    """All workers' gradients, and their mean, as torch alone has it."""
    users = nn.Embedding(IDS, jobs.DIM)
    model = Rated(users)
    with torch.no_grad():
        users.weight.copy_(first["rows"])
        for name, parameter in model.named_parameters():
            if name != "users.weight":
                parameter.copy_(first[name])
    dense = [p for name, p in model.named_parameters() if name != "users.weight"]
    local, rows = jobs.local_optimizer(dense), torch.optim.SGD(users.parameters(), lr=0.5)
    for step in steps:
        model.zero_grad()
        for rank in range(WORKERS):
            (jobs.loss_of(model, step, rank, kind) / WORKERS).backward()
        if clip_norm is not None:
            for half in (dense, list(users.parameters())):
                torch.nn.utils.clip_grad_norm_(half, clip_norm)
        if step != skipped:
            local.step()
            rows.step()
    found = {name: p.detach() for name, p in model.named_parameters()}
    found["rows"] = found.pop("users.weight")
    return found


def assert_same(found: Tensors, expected: Tensors) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def assert_alike(all_found: list[Tensors]) -> None:
    """Bit for bit."""
    for found in all_found[1:]:
        assert found.keys() == all_found[0].keys()
        assert [name for name in found if not torch.equal(found[name], all_found[0][name])] == []


@pytest.mark.parametrize("clip_norm", [pytest.param(None, marks=pytest.mark.thorough), 0.1])
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp", "partly"])
def test_it_trains_as_one_process(workers: Workers, kind: str, clip_norm: float | None) -> None:
    name = f"{kind} {clip_norm}"
    rows = {} if clip_norm is None else {"cache_rows": 30}
    runs = workers.run(
        jobs.train, kind=kind, name=name, steps=STEPS, clip_norm=clip_norm, rows=rows
    )
    assert_alike([after for _, after in runs])
    first, after = runs[0]
    assert_same(after, in_one_process(first, range(STEPS), kind=kind, clip_norm=clip_norm))


def test_large_gradients_are_all_reduced(workers: Workers) -> None:
    """In two dtypes."""
    runs = workers.run(jobs.train, kind="mixed", name="mixed", steps=STEPS, is_direct=False)
    assert_alike([after for _, after in runs])
    first, after = runs[0]
    expected = in_one_process(first, range(STEPS))
    assert_same({**after, "seldom": after["seldom"].float()}, expected)


def test_frozen_layers_begin_as_rank_0_has_them(workers: Workers) -> None:
    runs = workers.run(jobs.freeze)
    for values in zip(*runs, strict=True):
        assert_alike([*values])
    before, after = runs[0]
    assert torch.equal(before["middle.weight"], after["middle.weight"])


def test_buffers_of_any_layout_and_dtype_begin_as_rank_0_has_them(workers: Workers) -> None:
    """Torch's process groups refuse some, and of others send memory beside them."""
    expected = {name: made(0).to_dense() for name, made in jobs.BUFFERS.items()}
    assert_alike([expected, *workers.run(jobs.hold_buffers)])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_what_is_not_finite_at_one_worker_skips_the_step_of_all(
    workers: Workers, kind: str
) -> None:
    runs = workers.run(jobs.overflow, kind=kind)
    for (before, after), _, _ in runs:
        assert_alike([before, after])
    said = [said for _, said, _ in runs]
    assert "rows of" in said[1]
    assert "has an infinity or a NaN" in said[1]
    assert said[0] == said[2]
    assert said[0].startswith("worker 1 has a gradient with an infinity")
    assert_alike([values for _, _, values in runs])


@pytest.mark.thorough
def test_what_a_codec_cannot_hold_at_one_worker_skips_the_step_of_all(workers: Workers) -> None:
    runs = workers.run(jobs.beyond_codec)
    for (before, after), _, _ in runs:
        assert_alike([before, after])
    said = [said for _, said, _ in runs]
    assert "is beyond what push_codec fp16 can hold" in said[1]
    assert said[0] == said[2]
    assert said[0].startswith("worker 1 has a gradient with an infinity or a NaN, or beyond its ")
    assert_alike([values for _, _, values in runs])


def test_another_learning_rate_at_one_worker_skips_the_step_of_all(workers: Workers) -> None:
    runs = workers.run(jobs.other_rate)
    for (before, after), said, _ in runs:
        assert_alike([before, after])
        assert "optimizer of worker 1 has other hyperparameters than that of worker 0" in said
    assert len({said for _, said, _ in runs}) == len(runs)  # each names its own
    assert_alike([values for _, _, values in runs])


@pytest.mark.thorough
def test_data_shards_are_refused_where_workers_step_together(pool: Pool) -> None:
    """Who had no shard left would keep the others waiting in their step."""
    with (
        ps.local_cluster(servers=1, workers=WORKERS) as cluster,
        pool.connected(cluster.address, WORKERS) as workers,
    ):
        runs = workers.run(jobs.shares_data_out)
    for said in runs:
        words = "HybridOptimizer's workers take each step together, and with data shards each takes"
        assert [words in one for one in said] == [True] * 3, said


@pytest.mark.thorough
def test_a_loss_scale_reaches_both_halves(workers: Workers) -> None:
    (first, unscaled), *_ = workers.run(jobs.train, kind="plain", name="unscaled", steps=0)
    runs = workers.run(jobs.scaled)
    assert_alike([values for values, _ in runs])
    assert [scale for _, scale in runs] == [2.0**8, 2.0**8, 2.0**10]
    assert_same(runs[0][0], in_one_process(first, range(3), skipped=1))
    assert_alike([first, unscaled])


def test_other_loss_scales_skip_the_step_where_wrappers_have_reduced_gradients(
    workers: Workers,
) -> None:
    """Each worker would divide their mean by its own scale, and the parameters would part."""
    runs = workers.run(jobs.scaled_apart)
    for number in range(5):
        assert_alike([found[number] for found, _ in runs])
    (first, skipped, refused, taken, _), _ = runs[0]
    assert_alike([first, skipped, refused])  # by an overflow, and by the scales
    assert not torch.equal(refused["head.weight"], taken["head.weight"])
    for _, said in runs:
        assert len(said) == 1, said
        assert "the loss scale of worker 1 is 128, and that of worker 0 is 256" in said[0]
        assert "scaler.update(min(client.gather(scaler.get_scale())))" in said[0]


@pytest.mark.thorough
def test_gradients_that_are_unscaled_tell_nothing_of_their_scales(workers: Workers) -> None:
    """Where wrappers have reduced some, the parameters would part after an overflow at a worker."""
    runs = workers.run(jobs.unscaled_apart)
    for number in range(3):
        assert_alike([found[number] for found, _ in runs])
    for _, said in runs:
        assert said
        assert all("remove the call, and clip by the optimizer's" in each for each in said)


@pytest.mark.thorough
def test_parameters_may_go_through_the_servers(workers: Workers) -> None:
    runs = workers.run(jobs.serve_some)
    assert_alike([values for values, _ in runs])
    rates, changed = runs[0][1][:2], runs[0][1][2:]
    assert rates == ["0.003125", "0.00625"]
    assert changed == sorted(
        ["head.bias", "head.weight", "middle.bias", "middle.weight", "rows", "seldom"]
    )


def test_an_edit_that_is_refused_at_one_worker_leaves_all_at_one_step(workers: Workers) -> None:
    runs = workers.run(jobs.edit_alone)
    assert_alike([values for values, _, _ in runs])
    assert [clock for _, _, clock in runs] == [3, 3, 3]
    assert "'head.bias' of 'edited' was changed since the last step, under asp" in runs[1][1]


def test_what_is_wrong_is_refused(workers: Workers) -> None:
    for said in workers.run(jobs.refuse):
        nothing, both, alone, seldom, buffers, wrong, differing, frozen, bounded = said
        assert "nothing for the servers" in nothing
        assert "parameters of served are optimizer's, too: head.weight, head.bias" in both
        assert "give both or neither" in alone
        assert "server_optimizer is Outer, which leaves out the servers in most steps" in seldom
        assert "no buffers=" in buffers
        assert "optimizer is SGD; expected one of torch's" in wrong
        assert differing == (
            "parameter 0 of optimizer is 'head.bias', (1,) of torch.float32 at worker 0, and "
            "'middle.weight', (6, 4) of torch.float32 at worker 1; expected the same model, and "
            "the same order, at each"
        )
        assert frozen == (
            "parameter 0 of those that nothing trains is 'never', (2,) of torch.float32 at worker "
            "0, and 'middle.weight', (6, 4) of torch.float32 at worker 1; expected the same model, "
            "and the same order, at each"
        )
        assert "'small' has a max_norm, by which each worker's forward pass changes" in bounded


def test_what_wrappers_reduce_or_shard_is_not_for_the_servers(workers: Workers) -> None:
    for reduced, sharded, alone in workers.run(jobs.refuse_wrapped):
        for said in (reduced, sharded):
            assert "are in DistributedDataParallel or fully_shard: middle.weight, middle.b" in said
            assert "Expected a wrapper of the other layers alone" in said
        assert "parameter 'weight' is sharded (fully_shard), and the servers train whole" in alone


def test_groups_that_a_script_has_changed_are_refused(workers: Workers) -> None:
    for other, further, loaded, groups in workers.run(jobs.change_groups):
        assert "group 0 of 'HybridOptimizer' has another parameter at place 0" in other
        assert "the param_groups of 'HybridOptimizer' are other groups than those" in further
        assert (loaded, groups) == ("", "shared")


def test_the_setting_of_outer_steps_is_refused() -> None:
    model = nn.Linear(2, 2)
    with (
        ps.local_cluster(servers=1, workers=1) as cluster,
        ps.connect(cluster.address, outer_steps=5) as client,
        pytest.raises(InvalidConfig, match="outer_steps is 5, which leaves out the servers"),
    ):
        ps.HybridOptimizer(
            client,
            model,
            torch.optim.SGD([model.weight], lr=0.1),
            served=[model.bias],
            server_optimizer=ps.SGD(lr=0.1),
        )


KINDS = {"plain": "plain", "wrapped": "ddp", "sharded": "fsdp", "clicks": "bags"}


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of step 2."""
    url = str(tmp_path_factory.mktemp("checkpoints"))
    with (
        ps.local_cluster(2, WORKERS, checkpoint_url=url) as cluster,
        pool.connected(cluster.address, WORKERS) as workers,
    ):
        runs = workers.run(jobs.kept, kinds=KINDS, ends=[2, 4], is_saved=True)
        with ps.connect(cluster.address, role="reader") as reader, torch.no_grad():
            read = jobs.collection(reader)(jobs.features(7)).values()
    assert torch.equal(read, runs[0][2]["clicks"]["bags"])
    return url, runs


@pytest.mark.thorough
def test_a_checkpoint_has_both_halves(pool: Pool, saved: Saved) -> None:
    """The one of bags evicts rows, and pulls them ahead; a reader has them, too."""
    url, runs = saved
    with (
        ps.local_cluster(3, WORKERS, resume=url) as cluster,
        pool.connected(cluster.address, WORKERS) as workers,
    ):
        went_on = workers.run(jobs.kept, kinds=KINDS, ends=[4])
    for name in KINDS:
        assert_alike([first[name] for first, _ in went_on] + [run[1][name] for run in runs])
        assert_alike([after[name] for _, after in went_on] + [run[2][name] for run in runs])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["plain", pytest.param("sharded", marks=pytest.mark.thorough)])
def test_an_export_has_both_halves_and_begins_another_run(
    pool: Pool, saved: Saved, tmp_path: Path, name: str
) -> None:
    url, runs = saved
    run_here("checkpoint", "export", url, "all.safetensors", "--prefix", name, cwd=tmp_path)
    found = {
        each: t
        for each, t in load_file(tmp_path / "all.safetensors").items()
        if "users" not in each
    }
    expected = {each: t for each, t in runs[0][1][name].items() if each != "rows"}
    assert_alike([found, {**expected, "seen": torch.zeros(1)}])
    run_here("checkpoint", "import", "all.safetensors", "begun", "--prefix", name, cwd=tmp_path)
    with (
        ps.local_cluster(1, WORKERS, resume=str(tmp_path / "begun")) as cluster,
        pool.connected(cluster.address, WORKERS) as workers,
    ):
        begun = workers.run(jobs.train, kind=KINDS[name], name=name, steps=1)
    assert_alike([first for first, _ in begun] + [runs[0][1][name]])
    assert_alike([after for _, after in begun])


@pytest.mark.thorough
def test_fewer_workers_go_on_with_what_is_not_sharded(saved: Saved) -> None:
    """With wrappers or without."""
    url, runs = saved
    fewer, kinds = Pool(2, IMPORTED), {"plain": "ddp", "wrapped": "plain", "clicks": "bags"}
    with (
        ps.local_cluster(1, 2, resume=url) as cluster,
        fewer.connected(cluster.address, 2) as workers,
    ):
        went_on = workers.run(jobs.kept, kinds=kinds, ends=[4])
        of_shards = workers.run(jobs.go_on, kind="fsdp", name="sharded")
        of_nothing = workers.run(jobs.go_on, kind="plain", name="unknown")
    fewer.stop()
    for name in kinds:
        assert_alike([first[name] for first, _ in went_on] + [run[1][name] for run in runs])
        assert_alike([after[name] for _, after in went_on])
    for said in of_shards:
        assert "has the parameters in the shards of 3 workers (FSDP2), and here they are" in said
        assert "in the shards of 2 workers (FSDP2); expected the same" in said
    for said in of_nothing:
        assert "has no parameters of a HybridOptimizer of the name 'unknown'" in said
