"""`overlap_pull`: `step` does not wait for the parameters; whatever reads them does."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

import ps_worker as ps
from ps_core.errors import InvalidConfig, WaitExpired
from tests.integration.ctrl_c import ctrl_c_in
from tests.integration.cut_wire import cut_wire
from tests.integration.outer_training import together
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    ReplicatedCluster,
    replicated_cluster,
)
from tests.integration.training_models import differing, seeded, values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

WORKERS = 2
STEPS = 8
WIDTH = 16


class Plain(nn.Sequential):
    """Buffers, and blocks of several layers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 4)
        )


class Hollow(Plain):
    """Its first parameter is without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0))


class Keeping(nn.Linear):
    """Reads its parameters from a list of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.kept = [self.weight, self.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, *self.kept)


class Recurrent(nn.Module):
    """An LSTM has its weights in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH // 2, 24, batch_first=True)
        self.kept = Keeping(24)
        self.last = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed = self.cells(x.view(-1, 2, WIDTH // 2))[0]
        return torch.as_tensor(self.last(self.kept(passed[:, -1])))


class Attending(nn.Module):
    """Attention reads the weights of a layer in it, whose forward is never called; so does the end,
    which has the first layer's weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH // 2, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
        self.last = nn.Linear(WIDTH // 2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed = self.layer(self.first(x.view(-1, 2, WIDTH // 2)))
        return torch.as_tensor(self.last(linear(passed[:, -1], self.first.weight.t())))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ReplicatedCluster]:
    with replicated_cluster(servers=3, workers=WORKERS) as cluster:
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


_one_at_a_time = threading.Lock()


def made(make: Callable[[], nn.Module]) -> Any:
    with _one_at_a_time:  # workers are threads here, and torch's generator is one for all
        return seeded(make)


def optimizer_of(
    client: ps.Client, model: nn.Module, name: str, **options: Any
) -> ps.DistributedOptimizer:
    given: dict[str, Any] = {"block_elements": 64, "overlap_pull": True, **options}
    optimizer = given.pop("optimizer", ps.Adam(lr=0.01))
    return ps.DistributedOptimizer(client, model, optimizer, name=name, **given)


def backward(client: ps.Client, model: nn.Module, step: int) -> None:
    noise = torch.Generator().manual_seed(100 * client.rank + step)
    x = torch.randn(8, WIDTH, generator=noise)
    cross_entropy(model(x), x[:, :4].argmax(1)).backward()


def train(
    client: ps.Client,
    make: Callable[[], nn.Module],
    name: str,
    *,
    between: Callable[[nn.Module, ps.DistributedOptimizer, int], None] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """The parameters and buffers after so many steps; `between` is called after each."""
    model = made(make)
    optimizer = optimizer_of(client, model, name, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(client, model, step)
        optimizer.step()
        if between is not None:
            between(model, optimizer, step)
    return values(model)


def in_both_ways(clients: list[ps.Client], name: str, make: Any, **options: Any) -> list[Any]:
    """What both workers have, first with `overlap_pull`, then without."""
    return [
        found
        for overlaps in (True, False)
        for found in together(
            clients,
            partial(train, make=make, name=f"{name}-{overlaps}", overlap_pull=overlaps, **options),
        )
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [Recurrent, Hollow, *(pytest.param(m, marks=pytest.mark.thorough) for m in (Plain, Attending))],
)
def test_all_reads_get_the_bits_that_they_get_without_it(
    clients: list[ps.Client], make: Callable[[], nn.Module]
) -> None:
    found = in_both_ways(clients, make.__name__, make, clip_norm=1.0)
    for each in found:
        assert differing(each, found[-1]) == []


@pytest.mark.thorough
def test_two_optimizers_of_one_module_await_what_each_trains(clients: list[ps.Client]) -> None:
    def both(client: ps.Client, *, overlaps: bool) -> dict[str, torch.Tensor]:
        model = made(Plain)
        parts: list[Any] = [
            [*model[0].parameters(), *model[1].parameters()],
            [*model[3].parameters(), *model[4].parameters()],
        ]
        optimizers = [
            optimizer_of(
                client, part, f"{number} {overlaps}", module=model, buffers=None,
                overlap_pull=overlaps,
            )
            for number, part in enumerate(parts)
        ]  # fmt: skip
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(client, model, step)
            for optimizer in optimizers:
                optimizer.step()
        plain = dict(model.named_parameters())
        assert all(type(each._parameters) is dict for each in model.modules())
        return {name: value.detach().clone() for name, value in plain.items()}

    found = [each for o in (True, False) for each in together(clients, partial(both, overlaps=o))]
    for each in found:
        assert differing(each, found[-1]) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"push_codec": "int8", "pull_codec": "bf16"},
        pytest.param({"mode": "eager"}, marks=pytest.mark.thorough),
        pytest.param(
            {"optimizer": ps.SGD(lr=0.1, momentum=0.9), "accumulate": 1, "buffers": "mean"},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["codecs", "eager", "mean buffers"],
)
def test_with_other_options(
    clients: list[ps.Client], options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    found = in_both_ways(clients, request.node.name.replace("/", " "), Plain, **options)
    for each in found:
        assert differing(each, found[-1]) == []


@pytest.mark.parametrize(
    "consistency",
    [
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("ssp:2", "asp")),
        "asp:reject=0",
    ],
)
@pytest.mark.thorough
def test_settings_in_which_nobody_waits_learn(clients: list[ps.Client], consistency: str) -> None:
    def loss(client: ps.Client) -> tuple[float, float]:
        model = made(Plain)
        options = {"consistency": consistency, "buffers": None}
        optimizer = optimizer_of(client, model, f"learning {consistency}", **options)
        losses = []
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
        for _ in range(40):

            def closure() -> float:
                optimizer.zero_grad()
                found = cross_entropy(model(x), x[:, :4].argmax(1))
                found.backward()
                return found.item()

            losses.append(optimizer.step(closure))
        return float(losses[0] or 0.0), float(losses[-1] or 0.0)

    for first, last in together(clients, loss):
        assert last < first / 2


READS: dict[str, Callable[[nn.Module, ps.DistributedOptimizer], object]] = {
    "attribute": lambda model, _: model.get_parameter("3.weight"),
    "parameters": lambda model, _: list(model.parameters()),
    "state dict": lambda model, _: model.state_dict(),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "save": lambda model, _: torch.save(model, io.BytesIO()),
    "forward": lambda model, _: model(torch.zeros(2, WIDTH)),
    "wait": lambda _, optimizer: optimizer.wait(),
    "optimizer's state dict": lambda _, optimizer: optimizer.state_dict(),
    "synchronize": lambda _, optimizer: optimizer.synchronize(),
    "close": lambda _, optimizer: optimizer.close(),
}


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(each, marks=() if each in ("forward", "wait") else pytest.mark.thorough)
        for each in READS
    ],
)
def test_a_step_returns_before_its_values_are_written_and_a_read_waits(
    clients: list[ps.Client], read: str
) -> None:
    def check(client: ps.Client) -> None:
        model = made(Plain)
        optimizer = optimizer_of(client, model, f"read by {read}", buffers=None)
        kept, before = model[3].weight, model[3].weight.detach().clone()
        backward(client, model, 0)
        optimizer.step()
        assert torch.equal(kept, before), "nothing has read it yet"
        READS[read](model, optimizer)
        assert not torch.equal(kept, before)
        served = torch.from_numpy(client.pull(client.table(f"read by {read}/0/float32")))
        assert torch.equal(served, torch.cat([p.detach().flatten() for p in model.parameters()]))

    together(clients, check)


def test_a_copy_of_the_model_is_a_plain_one_and_so_is_the_model_when_all_is_there(
    clients: list[ps.Client],
) -> None:
    def check(client: ps.Client) -> None:
        model = made(Plain)
        dictionaries = [each._parameters for each in model.modules()]
        optimizer = optimizer_of(client, model, "copied", buffers=None)
        backward(client, model, 0)
        optimizer.step()
        model[0].register_parameter("late", nn.Parameter(torch.zeros(1)))
        assert type(model[0]._parameters) is not dict
        copied = copy.deepcopy(model)
        assert all(type(each._parameters) is dict for each in copied.modules())
        (hook,) = copied._forward_pre_hooks.values()
        assert not hook.__self__.is_on
        for each, plain in zip(model.modules(), dictionaries, strict=True):
            assert each._parameters is plain
        assert "late" in dictionaries[1]

    together(clients, check)


@pytest.mark.thorough
def test_values_that_nobody_has_read_are_there_when_the_client_has_left() -> None:
    with replicated_cluster(servers=2, workers=1) as cluster:
        with ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client:
            model = made(Plain)
            optimizer = optimizer_of(client, model, "left")
            kept, before = model[4].bias, model[4].bias.detach().clone()
            backward(client, model, 0)
            optimizer.step()
            assert torch.equal(kept, before)
        assert not torch.equal(kept, before)
        assert not torch.equal(model[4].bias, before)


@pytest.mark.thorough
def test_a_change_between_a_step_and_the_next_forward_is_an_edit(clients: list[ps.Client]) -> None:
    """Of a tensor that the script has kept, before its values are written."""

    def change(model: nn.Module, optimizer: ps.DistributedOptimizer, step: int) -> None:
        if step in (2, 5):
            optimizer._tables[0].layout.placed[0].tensor.data.fill_(0.25)

    found = in_both_ways(clients, "edited", Plain, between=change)
    for each in found:
        assert differing(each, found[-1]) == []
    calm = together(clients, partial(train, make=Plain, name="not edited"))
    assert differing(calm[0], found[0]) != []


@pytest.mark.thorough
def test_ctrl_c_while_unchanged_values_are_copied_loses_none() -> None:
    """Those that did not come in a step are brought from the values of the step before."""
    model = seeded(lambda: nn.ParameterDict({"first": torch.zeros(64), "last": torch.zeros(64)}))
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        optimizer = optimizer_of(client, model, "model", optimizer=ps.SGD(lr=1.0))
        for step in range(5):
            optimizer.zero_grad()
            (model["last"] + (model["first"] if step < 2 else 0)).sum().backward()
            optimizer.step()
            if step == 2:
                with ctrl_c_in("is_same", "held_values.py"):
                    optimizer.wait()
            optimizer.wait()
            assert model["first"][0].item() == -min(step + 1, 2)


@pytest.mark.thorough
def test_a_model_may_change_its_consistency_while_values_are_on_their_way(
    clients: list[ps.Client],
) -> None:
    def change(model: nn.Module, optimizer: ps.DistributedOptimizer, step: int) -> None:
        if step == 2:
            optimizer.set_consistency("ssp:0")
        if step == 4:
            optimizer.set_consistency("bsp")

    found = in_both_ways(clients, "changed", Plain, between=change, buffers=None)
    for each in found:
        assert each.keys() == found[0].keys()
        assert all(torch.isfinite(value).all() for value in each.values())


@pytest.mark.thorough
def test_workers_that_disagree_are_told_by_the_step() -> None:
    """Its seal would wait for ever; the refusal of its pull says why."""

    def disagree(client: ps.Client) -> None:
        model = made(Plain)
        optimizer = optimizer_of(client, model, "disagreeing", buffers=None)
        backward(client, model, 0)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 + client.rank)
        with pytest.raises(InvalidConfig, match=r"workers 0 and 1 disagree .* lr: 0.1 and 0.2"):
            optimizer.step()

    with ps.local_cluster(1, WORKERS) as cluster, ExitStack() as stack:
        clients = [ps.connect(cluster.address, request_deadline_s=20.0) for _ in range(WORKERS)]
        for client in clients:
            stack.callback(client.close, leave=False)
        together(clients, disagree)


@pytest.mark.thorough
def test_a_layer_that_comes_later_is_awaited_too(clients: list[ps.Client]) -> None:
    def check(client: ps.Client) -> None:
        model = made(Plain)
        optimizer = optimizer_of(client, model, "grown", buffers=None)
        backward(client, model, 0)
        optimizer.step()
        with _one_at_a_time:
            torch.manual_seed(4)
            model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": list(model[5].parameters())})
        optimizer.zero_grad()
        backward(client, model, 1)
        kept, before = model[5].weight, model[5].weight.detach().clone()
        optimizer.step()
        assert torch.equal(kept, before)
        assert not torch.equal(model[5].weight, before)

    together(clients, check)


def test_a_layer_that_comes_later_and_keeps_its_parameters_is_awaited_too(
    clients: list[ps.Client],
) -> None:
    def check(client: ps.Client) -> None:
        model = made(Plain)
        optimizer = optimizer_of(client, model, "grown by one that keeps", buffers=None)
        with _one_at_a_time:
            torch.manual_seed(4)
            model.append(Keeping(4))
        optimizer.add_param_group({"params": list(model[5].parameters())})
        backward(client, model, 0)
        (kept, _), before = model[5].kept, model[5].weight.detach().clone()
        optimizer.step()
        assert torch.equal(kept, before)
        model(torch.zeros(2, WIDTH))
        assert not torch.equal(kept, before)

    together(clients, check)


def test_with_backup_workers_a_step_waits_for_its_values(clients: list[ps.Client]) -> None:
    def check(client: ps.Client) -> None:
        model = made(Plain)
        options = {"consistency": "bsp:backup=1", "buffers": None}
        optimizer = optimizer_of(client, model, "backup", **options)
        backward(client, model, 0)
        optimizer.step()
        assert not any(table.has_awaited for table in optimizer._tables)

    together(clients, check)


def test_a_skipped_step_gives_the_values_of_before(clients: list[ps.Client]) -> None:
    def check(client: ps.Client) -> None:
        model = made(Plain)
        optimizer = optimizer_of(client, model, "skipped", buffers=None)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(model(torch.ones(2, WIDTH)).sum() * float("inf")).backward()
        before = values(model)
        scaler.step(optimizer)
        scaler.update()
        assert differing(values(model), before) == []

    together(clients, check)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda model: model.parameters(), {}, "overlap_pull needs a module.*got none"),
        (
            lambda _: [nn.Parameter(torch.zeros(64))],
            {"module": Plain()},
            "'parameter.0' is not in the module",
        ),
        (lambda model: model, {"optimizer": ps.Add(partial(torch.optim.SGD, lr=0.1))}, "got Add"),
    ],
    ids=["no module", "another module", "Add"],
)
def test_what_it_needs(
    clients: list[ps.Client], make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        optimizer_of(clients[0], make(made(Plain)), "refused", **options)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch's own, where its compiler leaves a hook out
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "compiled later"])
def test_a_compiled_model_has_the_same_bits(clients: list[ps.Client], is_given: bool) -> None:
    def check(client: ps.Client) -> None:
        model = made(Attending)
        compiled: Any = torch.compile(model, backend="eager")
        optimizer = optimizer_of(client, compiled if is_given else model, f"compiled {is_given}")
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(client, compiled, step)
            optimizer.step()
            if step == STEPS // 2:
                client.barrier()
                counts.append(torch._dynamo.utils.counters["frames"]["total"])
                client.barrier()
        found.append(values(model))

    found: list[Any] = []
    counts: list[int] = []
    calm = together(clients, partial(train, make=Attending, name=f"not compiled {is_given}"))
    together(clients, check)
    for each in found:
        assert differing(each, calm[0]) == []
    assert torch._dynamo.utils.counters["frames"]["total"] == counts[0], "compiled anew"


@pytest.mark.thorough
def test_a_server_killed_after_a_step_changes_no_bit(
    cluster: ReplicatedCluster, clients: list[ps.Client]
) -> None:
    """The values come from its backup."""
    cluster.have(3)
    calm = together(clients, partial(train, make=Plain, name="calm"))

    def kill(rank: int, model: nn.Module, optimizer: ps.DistributedOptimizer, step: int) -> None:
        if rank == 0 and step == 3:
            cluster.kill(cluster.a_primary())

    def disturbed(client: ps.Client) -> Any:
        return train(client, Plain, "disturbed", between=partial(kill, client.rank))

    for each in together(clients, disturbed):
        assert differing(each, calm[0]) == []


class Large(nn.Sequential):
    """32 MiB: more than the connections on the way hold."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))


@pytest.mark.thorough
def test_a_read_names_the_server_that_it_waits_for_and_a_later_one_goes_on() -> None:
    with (
        cut_wire(WORKERS, streams=True) as wire,
        ps.connect(wire.cluster.address, rank=1, lane="grpc", request_deadline_s=4.0) as client,
    ):

        def begin(each: ps.Client) -> tuple[Any, ps.DistributedOptimizer]:
            model = made(Large)
            options = {"consistency": "asp", "block_elements": 0}
            return model, optimizer_of(each, model, "held", **options)

        _, (model, optimizer) = together([wire.rank_0, client], begin)
        kept, before = model[7].weight, model[7].weight.detach().clone()
        model(torch.ones(2, 1024)).square().mean().backward()
        wire.hold_after(3 * 4 * 1024**2)  # pieces of 4 MiB, two at a time
        optimizer.step()
        assert not torch.equal(model[0].weight, before), "the first piece is here"
        for _ in range(2):
            with pytest.raises(WaitExpired, match="server 1"):
                list(model.parameters())
        assert torch.equal(kept, before), "nothing of it was written"
        wire.release()
        list(model.parameters())
        served = torch.from_numpy(client.pull(client.table("held/0/float32")))
        assert torch.equal(served, torch.cat([p.detach().flatten() for p in model.parameters()]))
