"""What a model may be made of: groups, dtypes, memory formats, frozen and tied parameters, buffers.

One worker on a cluster of two servers against one process with torch.optim.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ps_worker as ps
from tests.integration.resumed_training import DEADLINE_S, together
from tests.integration.training_models import (
    BLOCK,
    Branched,
    batches,
    differing,
    seeded,
    twin,
    values,
)

pytestmark = pytest.mark.slow

EXACT: dict[str, Any] = {"kernels": "exact", "block_elements": BLOCK}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ps.LocalCluster]:
    with ps.local_cluster(servers=2, workers=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ps.LocalCluster) -> Iterator[ps.Client]:
    with ps.connect(cluster.address, request_deadline_s=20.0) as client:
        yield client


@pytest.fixture(scope="module")
def reader(cluster: ps.LocalCluster) -> Iterator[ps.Client]:
    with ps.connect(cluster.address, role="reader", request_deadline_s=20.0) as reader:
        yield reader


def train(model: Any, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> None:
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def check_equal(first: nn.Module, second: nn.Module) -> None:
    assert differing(values(first), values(second)) == []


@pytest.mark.thorough
def test_groups_have_their_own_numbers_and_may_be_added(
    client: ps.Client, reader: ps.Client
) -> None:
    model = seeded(Branched)
    copy = twin(model)

    def groups(m: Any) -> list[dict[str, Any]]:
        return [
            {"params": m.first.parameters(), "lr": 0.3},
            {"params": [m.gain], "momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
        ]

    ours = ps.DistributedOptimizer(
        client, groups(model), ps.SGD(lr=0.1), module=model, name="groups", **EXACT
    )
    theirs = torch.optim.SGD(groups(copy), lr=0.1)
    for phase in range(3):
        for m, optimizer in ((model, ours), (copy, theirs)):
            if phase == 1:
                optimizer.add_param_group({"params": m.last.parameters(), "lr": 0.05})
            if phase == 2:
                optimizer.param_groups[2]["lr"] = 0.7
            train(m, optimizer, *batches(2, rank=phase))
        check_equal(model, copy)
    with pytest.raises(ps.InvalidConfig, match="lr is -1"):
        ours.add_param_group({"params": model.sometimes.parameters(), "lr": -1})
    ours.add_param_group({"params": model.sometimes.parameters(), "lr": 0.0})
    train(model, ours, *batches(1))
    assert [group["lr"] for group in ours.param_groups] == [0.3, 0.1, 0.7, 0.0]
    evaluated = seeded(Branched, seed=5)
    assert ps.pull_model(reader, evaluated, "groups") == 7
    check_equal(evaluated, model)


def test_a_group_of_a_layer_with_buffers_that_nobody_shares_is_refused(client: ps.Client) -> None:
    """Each worker would keep its own running statistics, and a checkpoint would lose them."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="grown")
    model.append(torch.nn.BatchNorm1d(4))
    with pytest.raises(ps.InvalidConfig, match=r"buffer '1\.running_mean' came .* buffers=None"):
        optimizer.add_param_group({"params": model[1].parameters()})
    assert len(optimizer.param_groups) == 1
    own, early = (
        ps.DistributedOptimizer(
            client, model[0].parameters(), ps.SGD(lr=0.1), name=name, module=model, buffers=buffers
        )
        for name, buffers in (("own", None), ("early", "rank0"))
    )
    for each in (own, early):
        each.add_param_group({"params": model[1].parameters()})


@pytest.mark.parametrize(("at_first", "later"), [("bsp", "asp"), ("asp", "bsp")])
def test_a_group_begins_as_the_setting_has_it_that_others_have_changed(
    client: ps.Client, at_first: str, later: str
) -> None:
    """By `pushpull tables set`: workers at other clocks would each make a table of their own."""
    model, name = seeded(Branched), f"changed to {later}"
    optimizer = ps.DistributedOptimizer(
        client, model.first.parameters(), ps.SGD(lr=0.1), name=name, consistency=at_first
    )
    client.set_consistency(f"{name}/0/float32", later)
    train(model, optimizer, *batches(2))
    optimizer.add_param_group({"params": model.last.parameters()})
    assert optimizer.trained_model.tables[-1].name == f"{name}/1@2/float32"


def test_a_group_that_others_have_made_is_joined_with_their_setting() -> None:
    """Whoever has changed it through the optimizer makes later groups so, too."""

    def run(client: ps.Client) -> Any:
        model = seeded(Branched)
        optimizer = ps.DistributedOptimizer(
            client, model.first.parameters(), ps.SGD(lr=0.1), name="grown", consistency="ssp:4"
        )
        train(model, optimizer, *batches(1))
        if client.rank == 0:
            optimizer.set_consistency("ssp:2")
            optimizer.add_param_group({"params": model.last.parameters()})
        client.barrier()
        if client.rank == 1:
            client.tables.await_view(lambda view: len(view.tables) == 2, "both", DEADLINE_S)
            optimizer.add_param_group({"params": model.last.parameters()})
        train(model, optimizer, *batches(1))
        return optimizer.trained_model.tables[-1].handle.spec.consistency

    with ps.local_cluster(servers=1, workers=2) as cluster:
        found = together(cluster.address, 2, run)
    assert found == [ps.SSP(2)] * 2


_ADD = ps.Add(partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize(
    ("grown_at", "made"), [((1, 4), ps.SGD(lr=0.1)), ((4, 1), ps.SGD(lr=0.1)), ((4, 1), _ADD)]
)
def test_a_group_that_comes_at_other_clocks_is_as_far_from_the_others_everywhere(
    grown_at: tuple[int, int], made: ps.SGD | ps.Add
) -> None:
    """Else workers wait for each other crosswise, once they train under BSP, and a reader waits."""

    def run(client: ps.Client) -> list[int]:
        model = seeded(Branched)
        optimizer = ps.DistributedOptimizer(
            client, model.first.parameters(), made, module=model, consistency="asp"
        )
        while optimizer.clock < 12:
            if optimizer.clock == grown_at[client.rank] and len(optimizer.param_groups) == 1:
                others = [each for n, each in model.named_parameters() if not n.startswith("first")]
                optimizer.add_param_group({"params": others})
            train(model, optimizer, *batches(1))
            if optimizer.clock == 6:
                client.barrier()
                if client.rank == 0:
                    optimizer.set_consistency("bsp")
        return [table.handle.clock for table in optimizer.trained_model.tables]

    with ps.local_cluster(servers=1, workers=2) as cluster:
        assert together(cluster.address, 2, run) == [[12, 12 - grown_at[0]]] * 2
        with ps.connect(cluster.address, role="reader", request_deadline_s=5.0) as reader:
            assert ps.pull_model(reader, seeded(Branched)) == 12


class _CutShort(TorchFunctionMode):
    """Ends what reads a tensor's values, as a signal may."""

    def __torch_function__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            raise TimeoutError
        return function(*given, **(named or {}))


def test_a_group_whose_making_was_cut_short_comes_with_the_name_that_others_have(
    cluster: ps.LocalCluster,
) -> None:
    """Under ASP rank 0 may train on before it tries again, and the others have opened its table."""
    with ps.connect(cluster.address, run="cut-short", world_size=1) as client:
        model = seeded(Branched)
        optimizer = ps.DistributedOptimizer(
            client, model.first.parameters(), ps.SGD(lr=0.1), consistency="asp"
        )
        train(model, optimizer, *batches(2))
        with pytest.raises(TimeoutError), _CutShort():
            optimizer.add_param_group({"params": model.last.parameters()})
        train(model, optimizer, *batches(1))
        optimizer.add_param_group({"params": model.last.parameters()})
        assert optimizer.trained_model.tables[-1].name == "model/1@2/float32"
        train(model, optimizer, *batches(1))
        assert [table.handle.clock for table in optimizer.trained_model.tables] == [4, 2]


def test_a_reader_has_a_group_that_came_later_under_ssp(
    client: ps.Client, reader: ps.Client
) -> None:
    """At the same step as the others: its table has a clock of its own."""
    model, name = seeded(Branched), "grown under ssp"
    optimizer = ps.DistributedOptimizer(
        client,
        model.first.parameters(),
        ps.SGD(lr=0.1),
        module=model,
        name=name,
        consistency="ssp:2",
    )
    train(model, optimizer, *batches(2))
    others = [each for n, each in model.named_parameters() if not n.startswith("first")]
    optimizer.add_param_group({"params": others})
    train(model, optimizer, *batches(2))
    evaluated = seeded(Branched, seed=5)
    assert ps.pull_model(reader, evaluated, name, timeout_s=3.0) == 4
    check_equal(evaluated, model)


def test_a_group_begins_so_beside_backup_workers() -> None:
    """A worker that is left out of an update skips its clock."""
    with (
        ps.local_cluster(servers=1, workers=2) as cluster,
        ps.connect(cluster.address, request_deadline_s=20.0) as client,
    ):
        model = seeded(Branched)
        optimizer = ps.DistributedOptimizer(client, model.first.parameters(), ps.SGD(lr=0.1))
        client.set_consistency("model/0/float32", "bsp:backup=1")
        train(model, optimizer, *batches(2))
        optimizer.add_param_group({"params": model.last.parameters()})
        assert optimizer.trained_model.tables[-1].name == "model/1@2/float32"


def test_frozen_parameters_rest_until_they_are_unfrozen(
    client: ps.Client, reader: ps.Client
) -> None:
    model = seeded(Branched)
    model.first.requires_grad_(False)
    copy = twin(model)
    ours = ps.DistributedOptimizer(client, model, ps.AdamW(lr=0.05), name="frozen", **EXACT)
    theirs = torch.optim.AdamW(copy.parameters(), lr=0.05)
    for is_frozen in (True, False, True):
        for m, optimizer in ((model, ours), (copy, theirs)):
            m.first.requires_grad_(not is_frozen)
            train(m, optimizer, *batches(2))
        check_equal(model, copy)
    evaluated = seeded(Branched, seed=5)
    ps.pull_model(reader, evaluated, "frozen")
    check_equal(evaluated, model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(12, 12)
        self.decode = nn.Linear(12, 12)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decode(torch.tanh(self.encode(x)))
        return result


def test_tied_parameters_train_as_one(client: ps.Client, reader: ps.Client) -> None:
    model = seeded(Tied)
    copy = twin(model)
    ours = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="tied", **EXACT)
    train(model, ours, *batches(3))
    train(copy, torch.optim.SGD(copy.parameters(), lr=0.1), *batches(3))
    check_equal(model, copy)
    assert model.decode.weight is model.encode.weight
    evaluated = seeded(Tied, seed=5)
    ps.pull_model(reader, evaluated, "tied")
    check_equal(evaluated, model)


def test_channels_last_trains_as_torch_does(client: ps.Client) -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3)))
    model = model.to(memory_format=torch.channels_last)
    copy = twin(model)
    ours = ps.DistributedOptimizer(client, model, ps.Adam(lr=0.01), name="channels", **EXACT)
    theirs = torch.optim.Adam(copy.parameters(), lr=0.01)
    inputs = [x.reshape(-1, 3, 6, 6) for x in batches(3, width=108)]
    inputs = [x.to(memory_format=torch.channels_last) for x in inputs]
    train(model, ours, *inputs)
    train(copy, theirs, *inputs)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    check_equal(model, copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_float32_master_values(client: ps.Client, dtype: torch.dtype) -> None:
    model = nn.Sequential(seeded(lambda: nn.Linear(12, 20))).to(dtype)
    copy, master = twin(model), twin(model).float()
    ours = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.01), name=str(dtype), **EXACT)
    theirs = torch.optim.SGD(master.parameters(), lr=0.01)
    for x in batches(6):
        train(model, ours, x.to(dtype))
        copy.zero_grad()
        copy(x.to(dtype)).square().mean().backward()
        for half, full in zip(copy.parameters(), master.parameters(), strict=True):
            full.grad = half.grad.float()
        theirs.step()
        copy.load_state_dict({name: value.to(dtype) for name, value in values(master).items()})
        check_equal(model, copy)


def test_one_group_may_mix_dtypes(client: ps.Client) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(12, 10).double()
            self.narrow = nn.Linear(10, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.narrow(torch.tanh(self.wide(x.double())).float())
            return result

    model = seeded(Mixed)
    copy = twin(model)
    ours = ps.DistributedOptimizer(client, model, ps.RMSprop(lr=0.01), name="mixed", **EXACT)
    train(model, ours, *batches(4))
    train(copy, torch.optim.RMSprop(copy.parameters(), lr=0.01), *batches(4))
    check_equal(model, copy)


def test_two_models_trained_in_turn_equal_torch(client: ps.Client) -> None:
    """As GANs are: the generator's loss sends gradients through the discriminator."""
    models = [seeded(lambda: nn.Linear(12, 12), seed) for seed in (1, 2)]
    twins = [twin(model) for model in models]
    ours = [
        ps.DistributedOptimizer(client, model, ps.Adam(lr=0.02), name=f"gan-{i}", **EXACT)
        for i, model in enumerate(models)
    ]
    theirs = [torch.optim.Adam(model.parameters(), lr=0.02) for model in twins]
    for x in batches(4):
        for (generator, critic), optimizers in ((models, ours), (twins, theirs)):
            optimizers[1].zero_grad()
            critic(generator(x).detach()).square().mean().backward()
            critic(x).sub(1).square().mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(generator(x)).sub(1).square().mean().backward()
            optimizers[0].step()
        for model, copy in zip(models, twins, strict=True):
            check_equal(model, copy)


def test_a_reader_pulls_parameters_and_buffers(client: ps.Client, reader: ps.Client) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8)))
    copy = twin(model)
    ours = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="buffers", **EXACT)
    train(model, ours, *batches(4))
    train(copy, torch.optim.SGD(copy.parameters(), lr=0.1), *batches(4))
    check_equal(model, copy)
    evaluated = seeded(lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8)), seed=3)
    assert ps.pull_model(reader, evaluated, "buffers") == 4
    assert int(evaluated[1].num_batches_tracked) == 4
    check_equal(evaluated, model)
    with pytest.raises(ps.TableNotFound, match=r"do not hold '2\.weight' and 1 more"):
        ps.pull_model(reader, nn.Sequential(*evaluated, nn.Linear(8, 1)), "buffers", timeout_s=0.1)
    with pytest.raises(ps.InvalidConfig, match=r"holds '1\.weight', which the model does not"):
        ps.pull_model(reader, nn.Sequential(nn.Linear(12, 8)), "buffers")
    with pytest.raises(ps.InvalidTensor, match=r"'0\.weight' has shape \(8, 5\)"):
        ps.pull_model(reader, nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), "buffers")


@pytest.mark.parametrize("mode", ["sealed", "eager"])
def test_a_sparse_gradient_is_refused_before_the_step_which_can_be_taken_then(
    client: ps.Client, mode: str
) -> None:
    """Of two tables: what the script sets after backward is seen before either is sealed."""
    model = nn.ModuleDict({"rows": nn.Embedding(4, 4), "head": nn.Linear(4, 1)})
    copy = twin(model)
    groups = [{"params": each.parameters()} for each in model.values()]
    ours = ps.DistributedOptimizer(client, groups, ps.SGD(lr=0.1), name=f"sparse {mode}", mode=mode)
    theirs = torch.optim.SGD(copy.parameters(), lr=0.1)
    for each in (model, copy):
        each["head"](each["rows"](torch.tensor([1, 2]))).sum().backward()
    (rows,) = model["rows"].parameters()
    dense = rows.grad
    assert dense is not None
    rows.grad = dense.to_sparse()
    with pytest.raises(ps.InvalidTensor, match=r"is torch\.sparse_coo.* call step\(\) again"):
        ours.step()
    assert ours.clock == 0
    rows.grad = dense
    ours.step()
    theirs.step()
    assert ours.clock == 1
    check_equal(model, copy)


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_named(client: ps.Client) -> None:
    model = seeded(Branched)
    copy = twin(model)
    parameters = [{"params": model.first.parameters()}, {"params": model.last.parameters()}]
    ours = ps.DistributedOptimizer(
        client, parameters, ps.SGD(lr=0.1, momentum=0.9), module=model, name="nan", **EXACT
    )
    theirs = torch.optim.SGD([*copy.first.parameters(), *copy.last.parameters()], 0.1, 0.9)
    first, second, third = batches(3)
    train(model, ours, first)
    train(copy, theirs, first)
    ours.zero_grad()
    model(second).square().mean().backward()
    model.last.bias.grad[1] = float("nan")
    with pytest.raises(ps.InvalidTensor, match=r"'last\.bias' has an infinity or a NaN at step 2"):
        ours.step()
    check_equal(model, copy)
    model.zero_grad()
    (model(second) * float("inf")).sum().backward()  # refused while backward runs
    with pytest.raises(ps.InvalidTensor, match=r"'first\."):
        ours.step()
    check_equal(model, copy)
    train(model, ours, third)
    train(copy, theirs, third)
    check_equal(model, copy)


def test_non_finite_gradients_may_be_allowed(client: ps.Client) -> None:
    model = seeded(Branched)
    ours = ps.DistributedOptimizer(
        client, model, ps.SGD(lr=0.1), name="allowed", allow_non_finite=True, **EXACT
    )
    (model(next(batches(1))) * float("nan")).sum().backward()
    ours.step()
    assert model.gain.isnan().item()


def test_a_step_without_any_gradient_and_dropped_optimizers_do_no_harm(client: ps.Client) -> None:
    model = seeded(Branched)
    before = values(model)
    ours = ps.DistributedOptimizer(client, model, ps.AdamW(lr=0.1), name="nothing", **EXACT)
    ours.step()
    ours.step()
    assert differing(values(model), before) == []
    with pytest.raises(ps.InvalidConfig, match="name 'nothing' is another"):
        ps.DistributedOptimizer(client, model, ps.AdamW(lr=0.1), name="nothing")
    ours.close()
    model(next(batches(1))).sum().backward()
    assert ours.state_dict()["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "lazy"}, "mode is 'lazy'; expected one of 'sealed', 'eager'"),
        ({"buffers": "all"}, "buffers is 'all'"),
        ({"kernels": "slow"}, "kernels is 'slow'"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"name": "a/b"}, "without '/'"),
        ({"buffers": "mean", "consistency": ps.ASP()}, "'mean' under asp"),
        ({"learning_rate": 1}, "no option learning_rate"),
    ],
)
def test_wrong_options_are_refused(
    client: ps.Client, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ps.InvalidConfig, match=message):
        ps.DistributedOptimizer(client, nn.Linear(1, 1), ps.SGD(), **arguments)


def test_what_cannot_be_trained_is_refused(client: ps.Client, reader: ps.Client) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ps.InvalidConfig, match="no factory"):
        ps.DistributedOptimizer(client, model, ps.Aggregate(), name="refused")
    with pytest.raises(ps.InvalidConfig, match="LBFGS"):
        ps.DistributedOptimizer(client, model, ps.Aggregate(torch.optim.LBFGS), name="refused")
    with pytest.raises(ps.InvalidConfig, match="reader"):
        ps.DistributedOptimizer(reader, model, ps.SGD(), name="refused")
    with pytest.raises(ps.InvalidConfig, match="without a module"):
        ps.DistributedOptimizer(
            client, model.parameters(), ps.SGD(), name="refused", buffers="mean"
        )
    groups: list[dict[str, Any]] = [{"params": model.parameters(), "lr": -1.0}]
    with pytest.raises(ps.InvalidConfig, match="lr is -1"):
        ps.DistributedOptimizer(client, groups, ps.SGD(), name="refused")
    groups[0] = {"params": model.parameters(), "lr": 1.0}
    ps.DistributedOptimizer(client, groups, ps.SGD(), name="refused")  # the name is free again


def test_what_shares_memory_is_refused(client: ps.Client) -> None:
    """Each would be trained for itself, and written over the other."""
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    shared = r"parameter '0.weight' and parameter '1.weight' share memory.* tie them as one"
    with pytest.raises(ps.InvalidConfig, match=shared):
        ps.DistributedOptimizer(client, model, ps.SGD(), name="shared")
    groups: list[dict[str, Any]] = [{"params": [each.weight]} for each in model]
    with pytest.raises(ps.InvalidConfig, match="share memory"):
        ps.DistributedOptimizer(client, groups, ps.SGD(), name="shared")
    model[1].weight = model[0].weight
    model.register_buffer("first", model[0].weight.data[0])
    with pytest.raises(ps.InvalidConfig, match=r"buffer 'first' and .* '0.weight' share .*=None"):
        ps.DistributedOptimizer(client, model, ps.SGD(), name="shared")
    ps.DistributedOptimizer(client, model, ps.SGD(), name="shared", buffers=None).close()
    both = torch.zeros(2, 4)  # parts of one tensor
    parts = [nn.Parameter(each) for each in (both[0, :2], both[0, 2:], both[1, ::2], both[1, 1::2])]
    parts += [nn.Parameter(both[:, :1], requires_grad=False), nn.Parameter(torch.empty(0))]
    ps.DistributedOptimizer(client, parts, ps.SGD(), name="parts").close()


def test_parameters_without_memory_are_refused(client: ps.Client) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ps.InvalidConfig, match=r"'weight' is on the meta device.*to_empty"):
        ps.DistributedOptimizer(client, model, ps.SGD(), name="meta")


def test_loss_scaling_needs_whole_steps(client: ps.Client) -> None:
    model = seeded(Branched)
    ours = ps.DistributedOptimizer(
        client, model, ps.SGD(lr=0.1), name="scaled", mode="eager", consistency="ssp:2", **EXACT
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(next(batches(1))).sum()).backward()
    with pytest.raises(ps.InvalidConfig, match="mode='sealed', got 'eager' under ssp:2"):
        scaler.step(ours)


def test_eager_hyperparameters_are_those_of_the_first_gradient(client: ps.Client) -> None:
    model = seeded(Branched)
    options: dict[str, Any] = {"mode": "eager", "consistency": ps.ASP(), **EXACT}
    ours = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="late", **options)
    model(next(batches(1))).sum().backward()
    ours.param_groups[0]["lr"] = 0.2
    with pytest.raises(ps.GradientChangedAfterPush, match=r"'lr' .* is 0\.2 and was 0\.1"):
        ours.step()


@pytest.mark.thorough
def test_eager_steps_go_on_after_a_change_of_consistency(client: ps.Client) -> None:
    """With the bits of torch.optim; under BSP a gradient that is not finite skips the step."""
    model, twin = seeded(Branched), seeded(Branched)
    options: dict[str, Any] = {"mode": "eager", "consistency": "asp", **EXACT}
    ours = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="changes", **options)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    sides = [(model, ours), (twin, theirs)]
    for consistency, x in zip(["asp", "bsp", "ssp:1", "bsp", "asp"], batches(5), strict=True):
        ours.set_consistency(consistency)
        for each, optimizer in sides:
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
        if consistency == "bsp":
            ours.zero_grad()
            (model(x) * float("nan")).sum().backward()
            with pytest.raises(ps.InvalidTensor, match="The step was skipped"):
                ours.step()
        for mine, reference in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, reference)


def test_local_and_aggregated_parameters_cannot_be_pulled(
    client: ps.Client, reader: ps.Client
) -> None:
    model = seeded(Branched)
    factory = partial(torch.optim.SGD, lr=0.1)
    ps.DistributedOptimizer(client, model, ps.Aggregate(factory), name="sums", **EXACT)
    with pytest.raises(ps.InvalidConfig, match="the workers hold its parameters"):
        ps.pull_model(reader, twin(model), "sums")


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, by its compiler
def test_a_compiled_model_has_the_names_of_the_plain_one(
    client: ps.Client, reader: ps.Client
) -> None:
    model, copy = seeded(small), seeded(small)
    compiled: Any = torch.compile(model, backend="eager")
    ours = ps.DistributedOptimizer(client, compiled, ps.SGD(lr=0.1), name="compiled", **EXACT)
    theirs = torch.optim.SGD(copy.parameters(), lr=0.1)
    assert ours.param_groups[0]["param_names"] == [name for name, _ in copy.named_parameters()]
    for x in batches(2):
        for each, optimizer in ((compiled, ours), (copy, theirs)):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    check_equal(model, copy)
    evaluated = seeded(small, seed=5)
    recompiled: Any = torch.compile(evaluated, backend="eager")
    assert ps.pull_model(reader, recompiled, "compiled") == 2
    check_equal(evaluated, copy)
    partly = seeded(small)
    partly[0] = torch.compile(partly[0], backend="eager")
    assert ps.pull_model(reader, partly, "compiled") == 2
