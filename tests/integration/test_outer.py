"""Outer: each worker trains by itself for some steps, and the servers average what they did."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_worker.spec.optimizers import ServerOptimizer
from tests.integration.outer_training import (
    ADAMW,
    INNER_STEPS,
    SGD,
    WORKERS,
    Quadratic,
    Trainer,
    Twin,
    adamw,
    differences,
    is_same,
    new_name,
    together,
    twin,
    values_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["shm", pytest.param("grpc", marks=pytest.mark.second_lane)])
def workers(request: pytest.FixtureRequest) -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        clients = [
            ps.connect(cluster.address, rank=rank, lane=request.param) for rank in range(WORKERS)
        ]
        yield clients
        for client in clients:
            client.close(leave=False)


def trained(workers: list[ps.Client], outer: ps.Outer, steps: int, **options: Any) -> list[Trainer]:
    """Each worker's loop after so many inner steps."""
    name = new_name()

    def work(client: ps.Client) -> Trainer:
        trainer = Trainer(client, name, outer, **options)
        for _ in range(steps):
            trainer.step()
        return trainer

    return together(workers, work)


def zeroed(
    client: ps.Client, name: str, outer: ps.Outer, consistency: str, **options: Any
) -> tuple[nn.Linear, ps.DistributedOptimizer]:
    model = nn.Linear(500, 1, bias=False)
    nn.init.zeros_(model.weight)
    options = {"consistency": consistency, "block_elements": 64, **options}
    return model, ps.DistributedOptimizer(client, model, outer, name=name, **options)


def step_by_one(model: nn.Linear, optimizer: ps.DistributedOptimizer, factor: float = 1.0) -> None:
    """A step whose gradient is this factor everywhere."""
    optimizer.zero_grad()
    (model.weight * factor).sum().backward()
    optimizer.step()


# --- the arithmetic


@pytest.mark.parametrize("outer", [adamw(), adamw(1), adamw(lr=0.5, nesterov=False)])
def test_two_workers_have_the_bits_of_one_process(
    workers: list[ps.Client], outer: ps.Outer
) -> None:
    steps = 4 * INNER_STEPS + 1
    found, expected = trained(workers, outer, steps), twin(outer, steps)
    for step in range(steps):
        for rank in range(WORKERS):
            assert not differences(found[rank].history[step], expected[rank][step]), (
                f"{step=} {rank=}"
            )
        is_outer = (step + 1) % outer.inner_steps == 0
        assert is_same(found[0].history[step], found[1].history[step]) == is_outer
    assert [t.optimizer.clock for t in found] == [steps // outer.inner_steps] * WORKERS


def test_one_inner_step_of_sgd_is_distributed_sgd(workers: list[ps.Client]) -> None:
    """But for a rounding of each worker's parameters, which the pseudo-gradient is made from."""
    outer = ps.Outer(SGD, inner_steps=1, lr=1.0, momentum=0.0, nesterov=False)
    (found, _), name = trained(workers, outer, 8), new_name()

    def plain(client: ps.Client) -> list[torch.Tensor]:
        model = Quadratic(client.rank)
        optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=1.0), name=name)
        for step in range(8):
            optimizer.zero_grad()
            model.loss(client.rank, step).backward()
            optimizer.step()
        return values_of(model)

    ulp = 2.0**-23  # of values from 1 to 2, between which all are in the end
    for own, theirs in zip(found.history[-1], together(workers, plain)[0], strict=True):
        assert (own - theirs).abs().max() <= 2 * ulp


@pytest.mark.parametrize("consistency", ["ssp:1", "asp"])
def test_without_bsp_every_move_is_applied_whole(
    workers: list[ps.Client], consistency: str
) -> None:
    """Each inner step moves every parameter by -1: all moves are in the end."""
    outer = ps.Outer(SGD, inner_steps=2, lr=1.0, momentum=0.0, nesterov=False)
    name = new_name()

    def train(client: ps.Client) -> torch.Tensor:
        model = nn.Linear(500, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = ps.DistributedOptimizer(
            client, model, outer, name=name, consistency=consistency, block_elements=64
        )
        for _ in range(5):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        assert optimizer.clock == 2
        optimizer.synchronize()  # which pushes the fifth
        return model.weight.detach()

    for weight in together(workers, train):
        assert weight.eq(-5.0 * WORKERS).all()


def test_synchronize_takes_the_outer_step_early(workers: list[ps.Client]) -> None:
    def work(client: ps.Client, name: str) -> Trainer:
        trainer = Trainer(client, name, adamw())
        for step in range(8):
            trainer.step()
            if step == 4:
                trainer.optimizer.synchronize()
                trainer.optimizer.synchronize()  # of which nothing is left to push
                trainer.history[-1] = values_of(trainer.model)
        assert client.engine.counters.inner_step_count == 8, "as the script counts them"
        return trainer

    found = together(workers, partial(work, name=new_name()))
    expected = Twin(adamw())
    for step in range(8):
        expected.step(step)
        if step in (2, 4, 7):
            expected.outer_step()
    for rank in range(WORKERS):
        for own, theirs in zip(found[rank].history, expected.history[rank], strict=True):
            assert is_same(own, theirs)
        assert found[rank].optimizer.clock == 3


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "asp"])
@pytest.mark.parametrize("parts", [{}, {"fragments": 2}, {"fragments": 2, "overlap": 1}])
def test_synchronize_ends_where_only_one_worker_has_moved(
    workers: list[ps.Client], parts: dict[str, int], consistency: str
) -> None:
    """One has just taken an outer step, as far behind as it may be, and the other has moved since.
    Each inner step moves every parameter by -1.
    """
    count = 2 * parts.get("fragments", 1)
    outer = ps.Outer(SGD, count, lr=1.0, momentum=0.0, nesterov=False, **parts)
    steps = (5 if consistency == "bsp" else 7, 4)

    def work(client: ps.Client, name: str) -> int:
        model, optimizer = zeroed(client, name, outer, consistency)
        for _ in range(steps[client.rank]):
            step_by_one(model, optimizer)
        optimizer.synchronize()
        assert model.weight.eq(-4.5 if consistency == "bsp" else -11.0).all()
        clock = optimizer.clock
        optimizer.synchronize()  # nothing is left to push
        assert optimizer.clock == clock
        return clock

    assert together(workers, partial(work, name=new_name())) == {
        "bsp": [3, 3], "ssp:1": [4, 3], "asp": [4, 3 if "fragments" in parts else 2],
    }[consistency]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "after_clock", "steps", "expected"),
    [
        (("bsp", "asp"), 4, (1, 0), (-0.5, 1)),
        (("asp", "bsp"), 4, (7, 1), (-8.0, 4)),
        (("ssp:1", "bsp"), 3, (5, 3), (-8.0, 3)),
    ],
)
def test_synchronize_ends_before_a_change_of_consistency_takes_effect(
    workers: list[ps.Client],
    settings: tuple[str, str],
    after_clock: int,
    steps: tuple[int, int],
    expected: tuple[float, int],
) -> None:
    """Its outer step is one of the setting before, or the last of them, which all take together."""
    outer = ps.Outer(SGD, 2, lr=1.0, momentum=0.0, nesterov=False)

    def work(client: ps.Client, name: str) -> tuple[float, int]:
        model, optimizer = zeroed(client, name, outer, settings[0])
        assert optimizer.set_consistency(settings[1], after_clock=after_clock) == after_clock
        for _ in range(steps[client.rank]):
            step_by_one(model, optimizer)
        optimizer.synchronize(timeout_s=10.0)
        found = float(model.weight.detach().mean()), optimizer.clock
        for _ in range(2 * after_clock):
            step_by_one(model, optimizer)
        return found

    assert together(workers, partial(work, name=new_name())) == [expected] * WORKERS


def test_a_step_ends_a_synchronize_that_expired_before_all_had_called_it(
    workers: list[ps.Client],
) -> None:
    """The outer step comes before that step, whose gradients count once."""
    outer, name = ps.Outer(SGD, 2, lr=1.0, momentum=0.0, nesterov=False), new_name()
    made = together(workers, lambda client: zeroed(client, name, outer, "bsp"))
    (model, optimizer), (other, others) = made
    step_by_one(model, optimizer)
    with pytest.raises(ps.WaitExpired, match=f"synchronize {name}.*worker 1 "):
        optimizer.synchronize(timeout_s=0.1)
    step = partial(step_by_one, model, optimizer)
    together(workers, lambda client: others.synchronize() if client.rank else step())
    assert other.weight.eq(-0.5).all()
    assert model.weight.eq(-1.5).all()
    step_by_one(other, others)
    together(workers, lambda client: made[client.rank][1].synchronize())
    for weight in (model.weight, other.weight):
        assert weight.eq(-1.5).all()
    assert (optimizer.clock, others.clock) == (2, 2)


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1"])
@pytest.mark.parametrize("ends_by", ["synchronize", "step"])
def test_a_change_after_a_synchronize_that_expired_is_not_overwritten_by_its_outer_step(
    workers: list[ps.Client], consistency: str, ends_by: str
) -> None:
    """At a worker that has taken no inner step; it is no move of such a one either."""
    outer, name = ps.Outer(SGD, 2, lr=1.0, momentum=0.0, nesterov=False), new_name()
    made = together(workers, lambda client: zeroed(client, name, outer, consistency))
    (model, optimizer), (_, other) = made
    step_by_one(*made[1])
    with pytest.raises(ps.WaitExpired, match=f"synchronize {name}"):
        optimizer.synchronize(timeout_s=0.1)

    def work(client: ps.Client) -> None:
        if client.rank:
            other.synchronize()
            return
        model.weight.data.fill_(5.0)
        with pytest.raises(ps.EditRefused, match="Undo the change, and call synchronize"):
            step_by_one(model, optimizer) if ends_by == "step" else optimizer.synchronize()
        assert model.weight.eq(5.0).all()
        model.weight.data.zero_()
        optimizer.synchronize()

    together(workers, work)
    for each, _ in made:
        assert each.weight.eq(-0.5 if consistency == "bsp" else -1.0).all()


def test_parameters_that_are_changed_after_an_outer_step_are_taken_as_they_are(
    workers: list[ps.Client],
) -> None:
    """As with an optimizer of the servers, before the first inner step too; not as a move, which
    the outer rate and momentum would scale.
    """

    def change(model: nn.Module, step: int) -> None:
        if step in (0, 6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step + 5.0)

    def work(client: ps.Client, name: str) -> Trainer:
        trainer = Trainer(client, name, adamw())
        for step in range(10):
            change(trainer.model, step)
            trainer.step()
        return trainer

    found, expected = together(workers, partial(work, name=new_name())), Twin(adamw())
    for step in range(10):
        for model in expected.models:
            change(model, step)
        if step in (0, 6):
            for anchor in expected.anchors:
                anchor.fill_(step + 5.0)
        expected.step(step)
        if (step + 1) % INNER_STEPS == 0:
            expected.outer_step()
    for trainer, history in zip(found, expected.history, strict=True):
        for own, theirs in zip(trainer.history, history, strict=True):
            assert is_same(own, theirs)


def test_workers_that_change_parameters_differently_are_told(workers: list[ps.Client]) -> None:
    def work(client: ps.Client, name: str) -> list[torch.Tensor]:
        trainer = Trainer(client, name, adamw(1))
        for value, is_refused in ((float(client.rank), True), (5.0, False)):
            with torch.no_grad():
                trainer.model.weight.fill_(value)
            if is_refused:
                with pytest.raises(ps.EditRefused, match="No worker took the step"):
                    trainer.step()
            else:
                trainer.step()
        return values_of(trainer.model)

    assert is_same(*together(workers, partial(work, name=new_name())))


@pytest.mark.parametrize("parts", [{}, {"elastic": 0.5}, {"overlap": 1}])
def test_a_refused_edit_of_one_worker_loses_no_inner_step_of_another(
    workers: list[ps.Client], parts: dict[str, Any]
) -> None:
    """They come with its next outer step. Each inner step moves every parameter by -1."""
    outer = ps.Outer(SGD, 2, lr=1.0, momentum=0.0, nesterov=False, **parts)
    count = 2 + parts.get("overlap", 0)

    def work(client: ps.Client, name: str) -> float:
        model, optimizer = zeroed(client, name, outer, "bsp")
        if client.rank == 0:
            model.weight.data.fill_(5.0)
        for _ in range(0 if client.rank == 0 else count - 1):
            step_by_one(model, optimizer)
        with pytest.raises(ps.EditRefused, match=r"No worker took the step\. Do the same"):
            step_by_one(model, optimizer)
        if client.rank == 0:
            assert model.weight.eq(5.0).all()
            model.weight.data.zero_()
        else:
            assert model.weight.eq(-count).all()
        optimizer.synchronize(timeout_s=5.0)
        return float(model.weight.detach().mean())

    assert together(workers, partial(work, name=new_name())) == [-count / 2] * WORKERS


def test_parameters_are_not_changed_under_asp(workers: list[ps.Client]) -> None:
    trainer = Trainer(workers[0], new_name(), adamw(), consistency="asp")
    with torch.no_grad():
        trainer.model.weight.fill_(1.0)
    with pytest.raises(ps.EditRefused, match=r"parameter 'weight' of .* was changed since"):
        trainer.step()


# --- the setting `outer_steps`


@pytest.fixture(scope="module")
def half_set() -> Iterator[list[ps.Client]]:
    """Two workers; the second has `outer_steps`."""
    with ps.local_cluster(servers=1, workers=WORKERS) as cluster:
        clients = [
            ps.connect(cluster.address, rank=0),
            ps.connect(cluster.address, rank=1, outer_steps=INNER_STEPS),
        ]
        yield clients
        for client in clients:
            client.close(leave=False)


def test_a_script_with_the_setting_has_the_bits_of_one_with_outer(
    half_set: list[ps.Client],
) -> None:
    """They train one model, so the servers take both for the same."""
    steps, name = 4 * INNER_STEPS + 1, new_name()

    def work(client: ps.Client) -> Trainer:
        trainer = Trainer(client, name, ps.AdamW(lr=0.02) if client.rank else adamw())
        for _ in range(steps):
            trainer.step()
        return trainer

    found, expected = together(half_set, work), twin(adamw(), steps)
    for rank in range(WORKERS):
        for own, theirs in zip(found[rank].history, expected[rank], strict=True):
            assert is_same(own, theirs)
        assert found[rank].optimizer.clock == 4


@pytest.mark.parametrize(
    ("optimizer", "options", "named"),
    [
        (adamw(), {}, "outer_steps is 3, and the optimizer is Outer; expected one of SGD"),
        (ps.SGD(), {"mode": "eager"}, "mode is 'eager' with Outer"),
        (ps.SGD(), {"overlap_pull": True}, "whose parameters the servers update; got Outer"),
    ],
)
def test_the_setting_is_refused_where_it_would_do_nothing(
    half_set: list[ps.Client],
    optimizer: ServerOptimizer,
    options: dict[str, Any],
    named: str,
) -> None:
    with pytest.raises(ps.InvalidConfig, match=named):
        Trainer(half_set[1], new_name(), optimizer, **options)


def test_the_clamp_of_a_parameter_group_is_refused(half_set: list[ps.Client]) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(3))], "clamp": (0.0, 1.0)}]
    with pytest.raises(ps.InvalidConfig, match=r"group 0 has clamp=\(0.0, 1.0\) with Outer"):
        ps.DistributedOptimizer(half_set[1], groups, ps.SGD(), name=new_name())


# --- the inner optimizer is the script's


def test_schedules_of_inner_and_outer_rates(workers: list[ps.Client]) -> None:
    def rates(step: int) -> tuple[float, float]:
        return 0.02 / (1 + step), 0.7 / (1 + step // INNER_STEPS)

    def work(client: ps.Client, name: str) -> Trainer:
        trainer = Trainer(client, name, adamw())
        for step in range(7):
            group = trainer.optimizer.param_groups[0]
            group["lr"], group["outer_lr"] = rates(step)
            trainer.step()
        return trainer

    found, expected = together(workers, partial(work, name=new_name())), Twin(adamw())
    for step in range(7):
        for local in expected.locals:
            local.param_groups[0]["lr"] = rates(step)[0]
        expected.servers.param_groups[0]["lr"] = rates(step)[1]
        expected.step(step)
        if (step + 1) % INNER_STEPS == 0:
            expected.outer_step()
    for rank in range(WORKERS):
        assert is_same(found[rank].history[-1], expected.history[rank][-1])


def test_workers_must_agree_on_the_outer_rate(workers: list[ps.Client]) -> None:
    def work(client: ps.Client, name: str) -> str:
        trainer = Trainer(client, name, adamw(1))
        trainer.optimizer.param_groups[0]["outer_lr"] = 0.5 + client.rank
        with pytest.raises(ps.InvalidConfig) as raised:
            trainer.step()
        return raised.value.message

    for message in together(workers, partial(work, name=new_name())):
        assert "0.5" in message
        assert "1.5" in message


def test_clip_norm_clips_each_inner_gradient(workers: list[ps.Client]) -> None:
    outer = ps.Outer(partial(torch.optim.SGD, lr=0.5), inner_steps=2)
    found, expected = trained(workers, outer, 4, clip_norm=1.0), Twin(outer)
    for step in range(4):
        expected.step(step, clip_norm=1.0)
        if step % 2:
            expected.outer_step()
    for trainer, history in zip(found, expected.history, strict=True):
        assert is_same(trainer.history[-1], history[-1])
        norm = trainer.optimizer.gradient_norm
        assert norm is not None
        assert norm > 1.0, "of the last inner gradient, before it was clipped"


def test_a_step_that_mixed_precision_skips_counts(workers: list[ps.Client]) -> None:
    """The loss scale is a power of 2, and changes no bit; both workers end their steps together."""
    name = new_name()

    def work(client: ps.Client) -> Trainer:
        trainer = Trainer(client, name, adamw(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(6):
            trainer.optimizer.zero_grad()
            overflows = step in (1, 2) and client.rank == 1
            factor = float("inf") if overflows else 1.0
            scaler.scale(trainer.model.loss(client.rank, step) * factor).backward()
            scaler.step(trainer.optimizer)
            scaler.update()
        return trainer

    found, expected = together(workers, work), Twin(adamw(2))
    for step in range(6):
        local = expected.locals[1]
        if step in (1, 2):
            expected.locals[1] = torch.optim.SGD(expected.models[1].parameters(), lr=0.0)
        expected.step(step)
        expected.locals[1] = local
        if step % 2:
            expected.outer_step()
    for trainer, history in zip(found, expected.history, strict=True):
        assert is_same(values_of(trainer.model), history[-1])
        assert trainer.optimizer.clock == 3


# --- buffers, codecs, gradients that are not finite


def test_only_outer_steps_share_buffers(workers: list[ps.Client]) -> None:
    """Each worker adds its rank and 1 in each step."""

    def work(client: ps.Client, name: str) -> list[float]:
        trainer, seen = Trainer(client, name, adamw()), []
        for _ in range(4):
            trainer.step()
            seen.append(float(trainer.model.get_buffer("seen")[0]))
        return seen

    assert together(workers, partial(work, name=new_name())) == [[1, 2, 3, 4], [2, 4, 3, 5]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("codec", "times"), [("int8", 1.1), pytest.param("sign", 3.0, marks=pytest.mark.thorough)]
)
def test_pseudo_gradients_in_fewer_bits_train_as_well(
    workers: list[ps.Client], codec: str, times: float
) -> None:
    """Rounding errors go with later ones: the loss ends near where it ends without a codec."""
    outer = ps.Outer(partial(torch.optim.SGD, lr=0.2), inner_steps=5, momentum=0.5)

    def loss(codec: str) -> float:
        trainer = trained(workers, outer, 100, push_codec=codec)[0]
        with torch.no_grad():
            return float(trainer.model.loss(0, 10_000))

    first = float(Quadratic().loss(0, 10_000).detach())
    plain = loss("none")
    assert plain < first / 50
    assert loss(codec) < times * plain


def test_a_pseudo_gradient_with_a_nan_moves_nothing(workers: list[ps.Client]) -> None:
    name = new_name()

    def work(client: ps.Client) -> list[torch.Tensor]:
        trainer = Trainer(client, name, adamw(2))
        for step in range(4):
            trainer.optimizer.zero_grad()
            bad = float("nan") if step == 2 and client.rank == 1 else 1.0
            (trainer.model.loss(client.rank, step) * bad).backward()
            if step == 3 and client.rank == 1:
                with pytest.raises(ps.InvalidTensor, match="the pseudo-gradient of 'weight' has"):
                    trainer.optimizer.step()
            else:
                trainer.optimizer.step()
        return values_of(trainer.model)

    first, second = together(workers, work)
    assert is_same(first, second)
    assert all(each.isfinite().all() for each in first)


@pytest.mark.parametrize("ends_by", ["synchronize", "step"])
def test_a_synchronize_whose_outer_step_has_a_nan_says_so_once(
    workers: list[ps.Client], ends_by: str
) -> None:
    """When all have met; a step that ends the call says it after its own inner step."""
    outer, name = ps.Outer(partial(torch.optim.SGD, lr=0.1), 3), new_name()
    trainers = together(workers, lambda client: Trainer(client, name, outer))
    other, bad = trainers
    (bad.model.loss(1, 0) * float("nan")).backward()
    bad.optimizer.step()
    if ends_by == "step":
        with pytest.raises(ps.WaitExpired, match=f"synchronize {name}"):
            bad.optimizer.synchronize(timeout_s=0.1)
    told: list[str] = []

    def work(client: ps.Client) -> None:
        if client.rank == 0:
            other.optimizer.synchronize()
            return
        try:
            if ends_by == "step":  # with gradients of 0
                bad.optimizer.zero_grad()
                torch.stack([p.nan_to_num().sum() for p in bad.model.parameters()]).sum().backward()
                bad.optimizer.step()
            else:
                bad.optimizer.synchronize()
        except ps.InvalidTensor as error:
            told.append(error.message)

    together(workers, work)
    assert len(told) == 1
    assert "the pseudo-gradient of 'weight' has an infinity or a NaN at step 1" in told[0]
    assert bad.optimizer.trained_model.inner_steps.taken == (ends_by == "step")
    together(workers, lambda client: trainers[client.rank].optimizer.synchronize())
    assert is_same(values_of(other.model), values_of(bad.model))


def test_an_inner_step_whose_norm_is_not_finite_is_not_taken(workers: list[ps.Client]) -> None:
    client = workers[0]
    trainer = Trainer(client, new_name(), adamw(), consistency="asp", clip_norm=1.0)
    before = values_of(trainer.model)
    (trainer.model.loss(0, 0) * float("nan")).backward()
    with pytest.raises(ps.InvalidTensor, match=r"the gradient of 'weight' .* was not taken"):
        trainer.optimizer.step()
    assert is_same(values_of(trainer.model), before)
    for _ in range(INNER_STEPS - 1):
        assert trainer.optimizer.clock == 0
        trainer.step()
    assert trainer.optimizer.clock == 1


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("at", [0, 1])
def test_a_refused_inner_step_counts(workers: list[ps.Client], at: int, overlap: int) -> None:
    """Also the one after which the outer step is due: workers stay in step."""
    # The clipped gradient, of 500 ones, moves every parameter by -1.
    outer = ps.Outer(SGD, 2, lr=1.0, momentum=0.0, nesterov=False, overlap=overlap)
    norm = 500.0**0.5

    def work(client: ps.Client, name: str) -> float:
        model, optimizer = zeroed(client, name, outer, "bsp", clip_norm=norm)
        for step in range(5):
            if client.rank == 1 and step == at:
                with pytest.raises(ps.InvalidTensor, match="inner step was not taken, and counts"):
                    step_by_one(model, optimizer, float("inf"))
            else:
                step_by_one(model, optimizer)
        optimizer.synchronize()
        assert optimizer.clock == 3
        return float(model.weight.detach().mean())

    first, second = together(workers, partial(work, name=new_name()))
    assert first == second == pytest.approx(-4.5)


# --- blocks that the servers do not take


@pytest.mark.parametrize("consistency", ["asp:reject=0", "bsp:backup=1"])
def test_what_came_too_late_comes_with_the_next_outer_step(
    workers: list[ps.Client], consistency: str
) -> None:
    """Every move is in the end, though one worker's came too late."""
    outer, name = ps.Outer(SGD, inner_steps=2, lr=1.0, momentum=0.0, nesterov=False), new_name()
    options: Any = {"name": name, "consistency": consistency, "block_elements": 64}
    models = [nn.Linear(100, 1, bias=False) for _ in workers]
    for model in models:
        nn.init.zeros_(model.weight)

    def optimizer_of(client: ps.Client) -> ps.DistributedOptimizer:
        return ps.DistributedOptimizer(client, models[client.rank], outer, **options)

    optimizers = together(workers, optimizer_of)

    def step(rank: int) -> None:
        optimizers[rank].zero_grad()
        models[rank].weight.sum().backward()
        optimizers[rank].step()

    for rank in (0, 0, 1, 1):  # the second worker pulled before the first pushed
        step(rank)
    (late,) = optimizers[1].results
    assert late.rejected == (0, 1) or late.discarded
    assert models[0].weight.eq(-2.0).all()
    assert models[1].weight.eq(-4.0).all(), "the servers', moved again"
    for _ in range(2):
        step(1)
    (taken,) = optimizers[1].results
    assert (taken.rejected, taken.discarded) == ((), False)
    assert models[1].weight.eq(-6.0).all()


# --- bad input


def test_workers_with_other_inner_steps_are_refused(workers: list[ps.Client]) -> None:
    name = new_name()
    Trainer(workers[0], name, adamw(50))
    with pytest.raises(ps.TableExists, match=r"optimizer\.inner_steps is 50; got 20"):
        Trainer(workers[1], name, adamw(20))


def test_what_makes_no_optimizer_is_refused(workers: list[ps.Client]) -> None:
    outer = ps.Outer(lambda groups: len(groups), inner_steps=2)
    with pytest.raises(ps.InvalidConfig, match="Outer's factory made a int; expected a torch"):
        Trainer(workers[0], "none", outer)


def test_it_has_no_eager_mode(workers: list[ps.Client]) -> None:
    with pytest.raises(ps.InvalidConfig, match="mode is 'eager' with Outer"):
        Trainer(workers[0], "none", adamw(), mode="eager")


def test_it_has_no_compensation(workers: list[ps.Client]) -> None:
    with pytest.raises(ps.InvalidConfig, match="inner_steps is 3, so pushes are no gradients"):
        Trainer(workers[0], "none", adamw(), consistency="asp:compensate=0.5")


def test_a_module_with_embeddings_is_refused(workers: list[ps.Client]) -> None:
    client = workers[0]
    model = nn.ModuleList([ps.Embedding(client, new_name(), 4, optimizer=ps.SGD()), Quadratic()])
    with pytest.raises(ps.InvalidConfig, match="expected Outer for a module without Embeddings"):
        ps.DistributedOptimizer(client, model, ps.Outer(ADAMW, inner_steps=2), name=new_name())
