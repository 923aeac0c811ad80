"""What a worker of `test_hybrid.py` runs, in a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ps_worker as ps
from ps_core.errors import EditRefused
from ps_worker.training.among_workers import gradient_reduction
from pushpull.jagged import EmbeddingBagConfig, KeyedJaggedTensor

DIM, IDS = 4, 20
EVERYTHING = torch.arange(IDS)
Tensors = dict[str, torch.Tensor]


class Rated(nn.Module):
    """Rows, a head over them, and parameters that few gradients reach."""

    def __init__(self, users: nn.Module) -> None:
        super().__init__()
        self.users = users
        torch.manual_seed(1)
        self.middle = nn.Linear(DIM, 6)
        self.head = nn.Linear(6, 1)
        self.seldom = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, ids: torch.Tensor, *, is_seldom: bool = False) -> torch.Tensor:
        found: torch.Tensor = self.head(self.middle(self.users(ids)).tanh()).squeeze(-1)
        return found + self.seldom.sum() if is_seldom else found + 0.0


def batch(step: int, rank: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(IDS, (8,), generator=draws)


def loss_of(model: nn.Module, step: int, rank: int, kind: str = "plain") -> torch.Tensor:
    """Worker 1 alone reaches `seldom`; FSDP2 itself needs it at all, or at none."""
    found = model(batch(step, rank), is_seldom=kind == "fsdp" or rank == 1)
    loss: torch.Tensor = (found - 1.0).square().mean()
    return loss


def local_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def rated(client: ps.Client, name: str, **options: Any) -> Rated:
    options = {"optimizer": ps.SGD(lr=0.5), "seed": 5, **options}
    return Rated(ps.Embedding(client, name, DIM, **options))


def wrapped(model: Rated, kind: str) -> nn.Module:
    """The model as torch's wrappers have it; "partly": one layer; "mixed" has another dtype."""
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp":
        fully_shard(model)
    if kind == "partly":
        fully_shard(model.middle)
    if kind == "mixed":
        model.seldom = nn.Parameter(model.seldom.detach().double())
    return model


def values_of(client: ps.Client, model: Rated) -> Tensors:
    """Whole parameters, and the rows."""
    with torch.no_grad():
        found = {"rows": model.users(EVERYTHING)}
    for name, parameter in model.named_parameters():
        whole: Any = parameter.detach()
        found[name] = (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone()
    return found


class InterruptingRate(float):
    """A learning rate at whose reading, the one of this number, Ctrl-C comes."""

    left: int

    def __float__(self) -> float:
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGINT)
        return super().__float__()


class Trainer:
    """A model in training, in any of the forms."""

    def __init__(self, client: ps.Client, kind: str, name: str, **options: Any) -> None:
        self.client, self.kind = client, kind
        self.model = rated(client, f"{name}/users", **options.pop("rows", {}))
        if kind in ("ddp", "fsdp", "partly"):  # torch's wrappers need it
            ps.HybridOptimizer.init_process_group(client)
        if client.rank != 0 and kind == "plain":
            nn.init.zeros_(self.model.head.weight)  # it begins with rank 0's
        self.module = wrapped(self.model, kind)
        self.optimizer = ps.HybridOptimizer(
            client, self.module, local_optimizer(self.model.parameters()), name=name, **options
        )

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.module, step, self.client.rank, self.kind).backward()
            self.optimizer.step()

    def change(self) -> None:
        """What a script may do between two steps."""
        for group in self.optimizer.param_groups:
            group["lr"] /= 2
        with torch.no_grad():
            self.model.head.bias.fill_(1.0)

    @property
    def values(self) -> Tensors:
        return values_of(self.client, self.model)


def train(
    client: ps.Client, kind: str, name: str, steps: int, *, is_direct: bool = True, **options: Any
) -> list[Tensors]:
    """The values at first, and after the steps."""
    trainer = Trainer(client, kind, name, **options)
    first, direct_bytes = trainer.values, gradient_reduction._DIRECT_BYTES
    try:
        gradient_reduction._DIRECT_BYTES = direct_bytes if is_direct else 0
        trainer.train(range(steps))
    finally:
        gradient_reduction._DIRECT_BYTES = direct_bytes
    return [first, trainer.values]


def overflow(client: ps.Client, kind: str) -> tuple[list[Tensors], str, Tensors]:
    """Worker 1 has rows that are not finite, once."""
    trainer = Trainer(client, kind, f"overflow {kind}")
    trainer.train(range(1))
    before, said = trainer.values, ""
    trainer.optimizer.zero_grad()
    factor = float("inf") if client.rank == 1 else 1.0
    (trainer.model.users(batch(1, client.rank)) * factor).sum().backward()
    try:
        trainer.optimizer.step()
    except ps.InvalidTensor as refused:
        said = str(refused)
    after = trainer.values
    trainer.train(range(1, 3))
    return [before, after], said, trainer.values


def freeze(client: ps.Client) -> list[Tensors]:
    """The values at first, and after a step, of a model whose middle is frozen, and drawn anew by
    each worker.
    """
    model = rated(client, "frozen/users")
    torch.manual_seed(client.rank)
    model.middle.reset_parameters()
    model.middle.requires_grad_(False)
    local = local_optimizer(p for p in model.parameters() if p.requires_grad)
    optimizer = ps.HybridOptimizer(client, model, local, name="frozen")
    found = [values_of(client, model)]
    loss_of(model, 0, client.rank).backward()
    optimizer.step()
    return [*found, values_of(client, model)]


BUFFERS: dict[str, Callable[[int], torch.Tensor]] = {
    "columns": lambda of: torch.arange(12.0).add(of).reshape(3, 4)[:, ::2],
    "expanded": lambda of: torch.tensor([float(of)]).expand(3),
    "transposed": lambda of: torch.arange(6.0).add(of).reshape(2, 3).t(),
    "one_number": lambda of: torch.tensor(float(of)),
    "empty": lambda of: torch.full((0, 2), of),
    "short": lambda of: torch.full((3,), of, dtype=torch.int16),
    "true": lambda of: torch.tensor([of == 0]),
    "sparse": lambda of: torch.diag(torch.arange(3.0) - of).to_sparse(),
}


def hold_buffers(client: ps.Client) -> Tensors:
    """Buffers of many layouts and dtypes, which each worker begins with others of."""
    model = rated(client, "with buffers/users")
    for name, made in BUFFERS.items():
        model.register_buffer(name, made(client.rank))
    ps.HybridOptimizer(client, model, local_optimizer(model.parameters()), name="with buffers")
    return {name: model.get_buffer(name).to_dense() for name in BUFFERS}


def refuse_wrapped(client: ps.Client) -> list[str]:
    """What is said of parameters for the servers that torch's wrappers reduce or shard."""
    ps.HybridOptimizer.init_process_group(client)
    said = []
    for kind in ("ddp", "partly"):
        model = rated(client, f"refused {kind}/users")
        local = local_optimizer(model.head.parameters())
        served: Any = {"served": model.middle.parameters(), "server_optimizer": ps.SGD(lr=0.1)}
        try:
            ps.HybridOptimizer(client, wrapped(model, kind), local, name=kind, **served)
        except ps.InvalidConfig as refused:
            said.append(str(refused))
    try:
        ps.DistributedOptimizer(client, model.middle, ps.SGD(lr=0.1), name="refused shards")
    except ps.InvalidConfig as refused:
        said.append(str(refused))
    return said


def shares_data_out(client: ps.Client) -> list[str]:
    """What each use of data shards says: one begun before the HybridOptimizer, and both after."""
    dataset: Any = range(2 * IDS)
    shards = client.data_shards(dataset, shard_size=2)
    loader: DataLoader[Any] = DataLoader(dataset, 2, sampler=shards)
    begun = shards.over(loader)
    next(begun)
    Trainer(client, "plain", "shared out", rows={"consistency": "asp"})
    said = []
    for each in (begun, shards.over(loader), shards.ranges()):
        try:
            next(each)
        except ps.InvalidConfig as refused:
            said.append(str(refused))
    return said


def other_rate(client: ps.Client) -> tuple[list[Tensors], str, Tensors]:
    """Worker 1 has another learning rate, for one step, at whose seal worker 0 is interrupted."""
    trainer = Trainer(client, "plain", "other rate")
    trainer.train(range(1))
    before, said = trainer.values, ""
    group = trainer.optimizer.param_groups[0]
    rate = group["lr"]
    group["lr"] = rate / 2 if client.rank == 1 else rate
    of_rows: Any = trainer.model.users.hyperparameters
    of_rows["lr"] = interrupting = InterruptingRate(0.5)
    interrupting.left = 2 if client.rank == 0 else 0
    try:
        try:
            trainer.train(range(1, 2))
        except KeyboardInterrupt:
            assert client.rank == 0
            trainer.optimizer.step()
    except ps.InvalidConfig as refused:
        said = str(refused)
    assert interrupting.left < 1
    after = trainer.values
    group["lr"] = rate
    del of_rows["lr"]
    trainer.train(range(2, 4))
    return [before, after], said, trainer.values


def scaled(client: ps.Client) -> tuple[Tensors, float]:
    """Gradients with a loss scale, of another size at each worker, and an overflow at one."""
    trainer = Trainer(client, "plain", "scaled")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + client.rank))
    for step in range(3):
        trainer.optimizer.zero_grad()
        loss = loss_of(trainer.module, step, client.rank)
        is_too_large = step == 1 and client.rank == 1
        scaler.scale(loss * float("inf") if is_too_large else loss).backward()
        scaler.step(trainer.optimizer)
        scaler.update()
    return trainer.values, scaler.get_scale()


def scaled_apart(client: ps.Client) -> tuple[list[Tensors], list[str]]:
    """The values after each step, and what is said, where one layer is in DistributedDataParallel,
    and worker 1 alone has an overflow beside it, in the first step.
    """
    ps.HybridOptimizer.init_process_group(client)
    model = rated(client, "scaled apart/users")
    model.middle = DistributedDataParallel(model.middle)  # type: ignore[assignment]
    local = local_optimizer(model.parameters())
    optimizer = ps.HybridOptimizer(client, model, local, name="scaled apart")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    found, said = [values_of(client, model)], []
    for step in range(4):
        if step == 2:
            scaler.update(min(client.gather(scaler.get_scale())))
        optimizer.zero_grad()
        loss = loss_of(model, step, client.rank)
        is_too_large = step == 0 and client.rank == 1
        scaler.scale(
            loss + model.head.bias.sum() * (float("inf") if is_too_large else 0)
        ).backward()
        try:
            scaler.step(optimizer)
        except ps.InvalidConfig as refused:
            said.append(str(refused))
        scaler.update()
        found.append(values_of(client, model))
    return found, said


def unscaled_apart(client: ps.Client) -> tuple[list[Tensors], list[str]]:
    """As `scaled_apart`, where the script unscales the gradients, as for torch's clipping."""
    ps.HybridOptimizer.init_process_group(client)
    torch.manual_seed(1)
    body, head = nn.Linear(DIM, 6), nn.Linear(6, 1)
    model = nn.Sequential(DistributedDataParallel(body), head)
    local = torch.optim.SGD(body.parameters(), lr=0.5)
    optimizer = ps.HybridOptimizer(
        client,
        model,
        local,
        name="unscaled apart",
        served=head.parameters(),
        server_optimizer=ps.SGD(lr=0.5),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    found, said = [], []
    for step in range(3):
        optimizer.zero_grad()
        is_too_large = step == 0 and client.rank == 1
        loss = model(torch.ones(3, DIM)).square().mean()
        scaler.scale(loss + head.bias.sum() * (float("inf") if is_too_large else 0)).backward()
        scaler.unscale_(optimizer)
        try:
            scaler.step(optimizer)
        except ps.InvalidConfig as refused:
            said.append(str(refused))
        scaler.update()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found, said


def serve_some(client: ps.Client) -> tuple[Tensors, list[str]]:
    """The head goes through the servers, under ASP, as the rows do."""
    model = rated(client, "served/users", consistency="asp")
    head = {*model.head.parameters()}
    kept = [p for p in model.parameters() if p not in head]
    optimizer = ps.HybridOptimizer(
        client,
        model,
        local_optimizer(kept),
        name="served",
        served=model.head.parameters(),
        server_optimizer=ps.SGD(lr=0.1),
        consistency="asp",
        clip_norm=1.0,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = values_of(client, model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, client.rank).backward()
        optimizer.step()
        schedule.step()
    client.barrier()
    optimizer.servers.synchronize()
    rates = [f"{group['lr']:g}" for group in optimizer.param_groups]
    after = values_of(client, model)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return after, [*rates, *sorted(changed)]


def edit_alone(client: ps.Client) -> tuple[Tensors, str, int]:
    """Worker 1 changes a parameter that the servers train under ASP, and then undoes that."""
    model = rated(client, "edited/users", consistency="asp")
    head = {*model.head.parameters()}
    optimizer = ps.HybridOptimizer(
        client,
        model,
        local_optimizer([p for p in model.parameters() if p not in head]),
        name="edited",
        served=model.head.parameters(),
        server_optimizer=ps.SGD(lr=0.1),
        consistency="asp",
    )
    said, bias = "", model.head.bias.data
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, client.rank).backward()
        if (step, client.rank) == (1, 1):
            before, middle = bias.clone(), model.middle.weight.detach().clone()
            bias.mul_(2.0)
            try:
                optimizer.step()
            except EditRefused as refused:
                said = str(refused)
            assert torch.equal(middle, model.middle.weight), "a part of the step was taken"
            bias.copy_(before)
        optimizer.step()
    client.barrier()
    optimizer.servers.synchronize()
    return values_of(client, model), said, optimizer.clock


def beyond_codec(client: ps.Client) -> tuple[list[Tensors], str, Tensors]:
    """The head goes through the servers in float16, which cannot hold a gradient of worker 1."""
    model = rated(client, "narrow/users")
    head = {*model.head.parameters()}
    optimizer = ps.HybridOptimizer(
        client,
        model,
        local_optimizer([p for p in model.parameters() if p not in head]),
        name="narrow",
        served=model.head.parameters(),
        server_optimizer=ps.SGD(lr=0.1),
        push_codec="fp16",
    )
    found, said = [values_of(client, model)], ""
    for step in range(3):
        optimizer.zero_grad()
        factor = 1e6 if (step, client.rank) == (0, 1) else 1.0
        (loss_of(model, step, client.rank) * factor).backward()
        try:
            optimizer.step()
        except ps.InvalidTensor as refused:
            said += str(refused)
        found.append(values_of(client, model))
    return found[:2], said, found[-1]


TABLES = [
    EmbeddingBagConfig(name="products", embedding_dim=4, feature_names=["seen", "offered"]),
    EmbeddingBagConfig(name="shops", embedding_dim=2, feature_names=["shop"]),
]
FEATURES = ["seen", "offered", "shop"]


def collection(client: ps.Client) -> ps.EmbeddingBagCollection:
    """Some of its rows are evicted, and some are in fewer bits."""
    each = {
        "products": {"max_rows": 32, "partitions": 2, "init": ps.Normal(0.1)},
        "shops": {"storage": "int8", "init": ps.Uniform(0.1)},
    }
    return ps.EmbeddingBagCollection(
        client, TABLES, optimizer=ps.RowwiseAdagrad(lr=0.3), per_table=each
    )


def features(seed: int) -> KeyedJaggedTensor:
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, (len(FEATURES) * 16,), generator=draws)
    ids = torch.randint(200, (int(lengths.sum()),), generator=draws)
    return KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, lengths)


class Clicks:
    """A collection of bags under a head, with batches that are pulled ahead."""

    def __init__(self, client: ps.Client, name: str) -> None:
        self.client = client
        self.bags = collection(client)
        torch.manual_seed(1)
        self.head = nn.Linear(10, 1)
        module = nn.ModuleDict({"bags": self.bags, "head": self.head})
        local = local_optimizer(self.head.parameters())
        self.optimizer = ps.HybridOptimizer(client, module, local, name=name)

    def train(self, steps: range) -> None:
        batches = (features(100 * step + self.client.rank) for step in steps)
        for batch in ps.prefetch(batches, lambda ahead: {self.bags: ahead}):
            self.optimizer.zero_grad()
            (self.head(self.bags(batch).values()) - 1.0).square().mean().backward()
            self.optimizer.step()

    @property
    def values(self) -> Tensors:
        with torch.no_grad():
            found = {"bags": self.bags(features(7)).values()}
        return found | {name: p.detach().clone() for name, p in self.head.named_parameters()}


def trainer_of(client: ps.Client, kind: str, name: str) -> Trainer | Clicks:
    return Clicks(client, name) if kind == "bags" else Trainer(client, kind, name)


def kept(
    client: ps.Client, kinds: Mapping[str, str], ends: list[int], *, is_saved: bool = False
) -> list[dict[str, Tensors]]:
    """Train models of these names and kinds from where the cluster is, and checkpoint at the first
    end if `is_saved`; their values at first, and at each end.
    """
    trainers = {name: trainer_of(client, kind, name) for name, kind in kinds.items()}

    def values() -> dict[str, Tensors]:
        return {name: trainer.values for name, trainer in trainers.items()}

    found = [values()]
    for end in ends:
        for trainer in trainers.values():
            trainer.train(range(trainer.optimizer.clock, end))
        found.append(values())
        if is_saved and end == ends[0]:
            client.checkpoint().wait()
    return found


def refused(call: Callable[[], object]) -> str:
    """What is said of a call that is wrong; empty if nothing is."""
    try:
        call()
    except (ps.InvalidConfig, ps.InvalidCheckpoint) as error:
        return str(error)
    return ""


def go_on(client: ps.Client, kind: str, name: str) -> str:
    """What is wrong with going on with this model."""
    return refused(lambda: Trainer(client, kind, name))


def refuse(client: ps.Client) -> list[str]:
    """What is wrong with some calls."""
    model = rated(client, "refused/users")
    plain = nn.Linear(2, 2)
    other_order = sorted(model.parameters(), key=lambda p: p.numel() * (1 - 2 * (client.rank == 1)))
    other_frozen = rated(client, "other frozen/users")
    if client.rank == 1:
        del other_frozen.never

    bounded = nn.ModuleDict({"rows": model, "small": nn.Embedding(3, 2, max_norm=1.0)})

    def make(module: nn.Module, optimizer: Any, **options: Any) -> object:
        return ps.HybridOptimizer(client, module, optimizer, name="refused", **options)

    calls: list[Callable[[], object]] = [
        lambda: make(plain, local_optimizer(plain.parameters())),
        lambda: make(
            model,
            local_optimizer(model.parameters()),
            served=model.head.parameters(),
            server_optimizer=ps.SGD(),
        ),
        lambda: make(model, local_optimizer(model.parameters()), served=[model.never]),
        lambda: make(
            model,
            local_optimizer([model.head.weight]),
            served=[model.never],
            server_optimizer=ps.Outer(local_optimizer, inner_steps=2),
        ),
        lambda: make(model, local_optimizer(model.parameters()), buffers="mean"),
        lambda: make(model, ps.SGD(lr=0.1)),
        lambda: make(model, local_optimizer(other_order)),
        lambda: make(other_frozen, local_optimizer([other_frozen.seldom])),
        lambda: make(bounded, local_optimizer(bounded["small"].parameters())),
    ]
    return [refused(call) for call in calls]


def change_groups(client: ps.Client) -> list[str]:
    """What a step says of groups that the script has changed since."""
    model = rated(client, "changed/users")
    local = local_optimizer(model.parameters())
    optimizer = ps.HybridOptimizer(client, model, local, name="changed")
    given = local.param_groups[0]["params"]
    local.param_groups[0]["params"] = [nn.Parameter(torch.zeros_like(given[0])), *given[1:]]
    said = [refused(optimizer.step)]
    local.param_groups[0]["params"] = given
    optimizer.param_groups.append({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1})
    said.append(refused(optimizer.step))
    optimizer.param_groups.pop()
    local.load_state_dict(local.state_dict())  # without the other half
    said.append(refused(optimizer.step))
    return [*said, "shared" if optimizer.param_groups[0] is local.param_groups[0] else "stale"]
