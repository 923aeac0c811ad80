"""Server-side optimizers against torch.optim: bit for bit where promised, 8 ulp elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ps_core.keys import TableId
from ps_core.tables.elements import NATIVE_CODEC, DType, Initializer, InitializerKind, pack_presence
from ps_core.tables.optimizers import (
    CLAMP_NAMES,
    Hyperparameters,
    Kernels,
    OptimizerKind,
    OptimizerSpec,
)
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec, TensorSpec
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.kernel_fingerprint import kernel_fingerprint
from ps_server.values.optimizers import BlockState, Optimizer
from ps_server.values.shard_store import ShardStore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SHAPES: tuple[tuple[int, ...], ...] = (
    (7,),
    (),
    (13, 17),
    (5, 0),
    (3, 5, 11),
    (64,),
    (129,),
    (1, 1),
)
STEP_COUNT = 14

TORCH_CLASS: dict[OptimizerKind, Any] = {
    OptimizerKind.SGD: torch.optim.SGD,
    OptimizerKind.ADAM: torch.optim.Adam,
    OptimizerKind.ADAMW: torch.optim.AdamW,
    OptimizerKind.ADAGRAD: torch.optim.Adagrad,
    OptimizerKind.RMSPROP: torch.optim.RMSprop,
}


@dataclass(frozen=True)
class Case:
    kind: OptimizerKind
    numbers: Mapping[str, float] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in self.numbers.items()]
        return "-".join([self.kind.value, *settings, *self.flags])

    def spec(self, kernels: Kernels) -> OptimizerSpec:
        return OptimizerSpec(
            self.kind, tuple(sorted(self.numbers.items())), kernels=kernels, **self.flags
        )

    def torch_optimizer(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = TORCH_CLASS[self.kind](
            parameters, **torch_names(dict(self.spec(Kernels.EXACT).merged(()))), **self.flags
        )
        return optimizer


def torch_names(numbers: Mapping[str, float]) -> dict[str, Any]:
    names: dict[str, Any] = {n: v for n, v in numbers.items() if n not in CLAMP_NAMES}
    if "beta1" in names:
        names["betas"] = (names.pop("beta1"), names.pop("beta2"))
    return names


SGD, ADAM, ADAMW = OptimizerKind.SGD, OptimizerKind.ADAM, OptimizerKind.ADAMW
ADAGRAD, RMSPROP = OptimizerKind.ADAGRAD, OptimizerKind.RMSPROP
CASES = [
    Case(SGD, {"lr": 0.1}),
    Case(SGD, {"lr": 0.1, "weight_decay": 0.03}, {"maximize": True}),
    Case(SGD, {"lr": 0.1, "momentum": 0.9}),
    Case(SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    Case(SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, {"nesterov": True}),
    Case(SGD, {"lr": 0.1, "momentum": 0.7}, {"maximize": True}),
    Case(ADAM, {"lr": 0.01}),
    Case(ADAM, {"lr": 0.01, "weight_decay": 0.1}, {"amsgrad": True}),
    Case(ADAM, {"lr": 0.01, "beta1": 0.5, "eps": 1e-3, "weight_decay": 0.1}, {"maximize": True}),
    Case(ADAMW, {"lr": 0.01}),
    Case(ADAMW, {"lr": 0.01, "weight_decay": 0.0}, {"amsgrad": True}),
    Case(ADAMW, {"lr": 0.01, "weight_decay": 0.3}, {"amsgrad": True, "maximize": True}),
    Case(ADAGRAD, {"lr": 0.05}),
    Case(ADAGRAD, {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1}),
    Case(ADAGRAD, {"lr": 0.05, "initial_accumulator_value": 0.4}, {"maximize": True}),
    Case(RMSPROP, {"lr": 0.02}),
    Case(RMSPROP, {"lr": 0.02, "weight_decay": 0.1}, {"centered": True}),
    Case(RMSPROP, {"lr": 0.02, "momentum": 0.8}, {"maximize": True}),
    Case(RMSPROP, {"lr": 0.02, "momentum": 0.8, "alpha": 0.7, "weight_decay": 0.1}),
    Case(
        RMSPROP, {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1},
        {"centered": True, "maximize": True},
    ),
    Case(SGD, {"lr": 0.1, "momentum": 0.9, "clamp_min": -0.5, "clamp_max": 0.25}),
    Case(ADAM, {"lr": 0.01, "clamp_min": 0.1}),
    Case(ADAMW, {"lr": 0.01, "clamp_max": -0.1}),
    Case(ADAGRAD, {"lr": 0.05, "clamp_min": 0.5, "clamp_max": 0.5}),
    Case(RMSPROP, {"lr": 0.02, "clamp_min": 0.0, "clamp_max": 1.0}),
]  # fmt: skip


@dataclass(frozen=True)
class Step:
    gradients: list[Tensor | None]
    numbers: Hyperparameters


Schedule = Callable[[int, dict[str, float]], dict[str, float]]


def constant(step: int, numbers: dict[str, float]) -> dict[str, float]:
    return numbers


def scheduled(step: int, numbers: dict[str, float]) -> dict[str, float]:
    """Every number that is not 0 changes at every step; OneCycleLR does so to lr and momentum."""
    return {
        name: value if name == "initial_accumulator_value" else value * (1 - 0.01 * step)
        for name, value in numbers.items()
    }


def steps(case: Case, dtype: torch.dtype, schedule: Schedule, absent: bool) -> Iterator[Step]:
    draw = torch.Generator().manual_seed(7)
    numbers = dict(case.spec(Kernels.EXACT).merged(()))
    for number in range(STEP_COUNT):
        gradients = [torch.randn(shape, generator=draw, dtype=dtype) for shape in SHAPES]
        here = [not absent or (number + 3 * index) % 4 != 0 for index in range(len(SHAPES))]
        present = [
            gradient if is_here else None for gradient, is_here in zip(gradients, here, strict=True)
        ]
        yield Step(present, tuple(sorted(schedule(number, numbers).items())))


def initial(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in SHAPES]


class Shards:
    """A table on several stores, as several ranges hold it, fed by one worker."""

    def __init__(self, spec: OptimizerSpec, start: Sequence[Tensor], block: int) -> None:
        dtype = DType.FLOAT64 if start[0].dtype is torch.float64 else DType.FLOAT32
        layout, offset = [], 0
        for index, tensor in enumerate(start):
            layout.append(TensorSpec(f"t{index}", tuple(tensor.shape), offset))
            offset += tensor.numel()
        flat = torch.cat([tensor.reshape(-1) for tensor in start])
        table_spec = TableSpec(
            "model", dtype, offset, spec, block_elements=block, tensors=tuple(layout),
            initializer=Initializer(InitializerKind.INLINE, inline=flat.numpy().tobytes()),
        )  # fmt: skip
        self.table = Table(TableId(1), 0, table_spec.validated())
        blocks = range(self.table.block_count)
        held = [blocks[::2], blocks[1::2]]
        self.stores = [ShardStore(self.table, part) for part in held]
        self.store_of = {block: self.stores[block % 2] for block in blocks}
        self.codec = NATIVE_CODEC[dtype]

    def step(self, clock: int, step: Step) -> None:
        garbage = float("nan")  # what absent tensors hold must not matter
        flat = torch.cat(
            [
                torch.full(tensor.shape, garbage, dtype=like).reshape(-1)
                if gradient is None
                else gradient.reshape(-1)
                for tensor, gradient in zip(self.table.spec.tensors, step.gradients, strict=True)
                for like in [step_dtype(step)]
            ]
        )
        for block, store in self.store_of.items():
            begin = block * self.table.spec.block_elements
            part = flat[begin : begin + self.table.block_length(block)]
            present = tuple(
                step.gradients[segment.tensor] is not None for segment in self.table.segments(block)
            )
            presence = pack_presence(present)
            decoded = store.decode(block, self.codec, part.numpy().tobytes(), presence)
            store.accumulate(clock, [(block, decoded)], 1.0)
        for store in self.stores:
            store.apply(clock, step.numbers, 1)

    def values(self) -> Tensor:
        payloads = [store.read(block, None, None)[0] for block, store in self.store_of.items()]
        dtype = np.float64 if self.table.spec.dtype is DType.FLOAT64 else np.float32
        return torch.from_numpy(np.frombuffer(b"".join(payloads), dtype).copy())


def step_dtype(step: Step) -> torch.dtype:
    return next(gradient.dtype for gradient in step.gradients if gradient is not None)


def torch_run(case: Case, dtype: torch.dtype, course: Sequence[Step]) -> Iterator[Tensor]:
    parameters = [tensor.clone().requires_grad_() for tensor in initial(dtype)]
    optimizer = case.torch_optimizer(parameters)
    for step in course:
        for parameter, gradient in zip(parameters, step.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.param_groups[0].update(torch_names(dict(step.numbers)))
        optimizer.step()
        clamp = [dict(step.numbers).get(name) for name in CLAMP_NAMES]
        for parameter in parameters if any(bound is not None for bound in clamp) else ():
            if parameter.grad is not None:
                parameter.data.clamp_(*clamp)
        yield torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_kernels_equal_torch_however_the_table_is_cut(case: Case, dtype: torch.dtype) -> None:
    """OPT-1."""
    course = list(steps(case, dtype, scheduled, absent=True))
    cuts = [Shards(case.spec(Kernels.EXACT), initial(dtype), block) for block in (64, 192, 4096)]
    for clock, expected in enumerate(torch_run(case, dtype, course), start=1):
        for shards in cuts:
            shards.step(clock, course[clock - 1])
            assert torch.equal(shards.values(), expected), f"step {clock}"


@pytest.mark.thorough
@pytest.mark.parametrize("absent", [False, True], ids=["all", "absent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fast_kernels_do_not_depend_on_the_cut(
    case: Case, dtype: torch.dtype, absent: bool
) -> None:
    """OPT-1, STO-2."""
    course = list(steps(case, dtype, scheduled, absent))
    cuts = [Shards(case.spec(Kernels.FAST), initial(dtype), block) for block in (64, 192, 4096)]
    for clock, step in enumerate(course, start=1):
        for shards in cuts:
            shards.step(clock, step)
        whole = cuts[-1].values()
        assert all(torch.equal(shards.values(), whole) for shards in cuts), f"step {clock}"
    assert torch.isfinite(whole).all()


def test_fast_kernels_do_not_depend_on_the_presence_of_neighbours() -> None:
    """OPT-1."""
    case = Case(ADAM, {"lr": 0.01, "weight_decay": 0.1})
    course = list(steps(case, torch.float32, constant, absent=False))
    shards = Shards(case.spec(Kernels.FAST), initial(torch.float32), 4096)
    alone = Shards(case.spec(Kernels.FAST), initial(torch.float32), 4096)
    last = shards.table.spec.tensors[6]
    for clock, step in enumerate(course, start=1):
        shards.step(clock, step)
        only = [tensor if index == 6 else None for index, tensor in enumerate(step.gradients)]
        alone.step(clock, replace(step, gradients=only))
    span = slice(last.offset, last.offset + last.element_count)
    assert torch.equal(shards.values()[span], alone.values()[span])
    untouched = torch.cat([tensor.reshape(-1) for tensor in initial(torch.float32)])
    assert torch.equal(alone.values()[: last.offset], untouched[: last.offset])


@pytest.mark.thorough
@pytest.mark.parametrize("kernels", list(Kernels))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_absent_tensors_in_one_block_are_each_by_themselves(
    case: Case, kernels: Kernels
) -> None:
    draw = torch.Generator().manual_seed(13)
    start = [torch.randn(1 + index % 5, generator=draw) for index in range(150)]
    numbers = case.spec(kernels).merged(())
    # A block of 64 elements has few runs of tensors, which are taken one by one; one block for all
    # of them has a hundred.
    cuts = [Shards(case.spec(kernels), start, block) for block in (64, 4096)]
    for clock in range(1, 7):
        here = torch.rand(len(start), generator=draw) < (1.0 if clock == 5 else 0.6)
        step = Step(
            [
                torch.randn(tensor.shape, generator=draw) if is_here else None
                for tensor, is_here in zip(start, here.tolist(), strict=True)
            ],
            numbers,
        )
        for shards in cuts:
            shards.step(clock, step)
        assert torch.equal(cuts[0].values(), cuts[1].values()), f"step {clock}"
    assert torch.isfinite(cuts[0].values()).all()


def cloned(state: BlockState) -> BlockState:
    slots = {name: slot.clone() for name, slot in state.slots.items()}
    return BlockState(state.values.clone(), state.bounds, copy(state.steps), slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fast_step_from_equal_state_is_within_8_ulp(case: Case, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(11)
    count = 4096
    values = torch.randn(count, generator=draw, dtype=dtype)
    bounds = np.array([0, count], dtype=np.int64)
    state = BlockState(values, bounds, np.zeros(1, dtype=np.int64))
    exact = Optimizer(case.spec(Kernels.EXACT), BufferPool())
    fast = Optimizer(case.spec(Kernels.FAST), BufferPool())
    numbers = dict(case.spec(Kernels.EXACT).merged(()))
    for number in range(STEP_COUNT):
        before, twin = state.values.clone(), cloned(state)
        gradient = torch.randn(count, generator=draw, dtype=dtype) * 10.0 ** (number % 5 - 2)
        exact.apply(state, gradient, None, scheduled(number, numbers))
        fast.apply(twin, gradient, None, scheduled(number, numbers))
        size = torch.maximum(before.abs(), (state.values - before).abs())
        ulp = torch.from_numpy(np.spacing(size.numpy()))
        off = ((twin.values - state.values).abs() / ulp).max().item()
        assert off <= 8, f"step {number + 1}: {off} ulp"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_of_threads_do_not_change_a_bit(case: Case) -> None:
    """OPT-1."""
    count = 100_032  # above torch's grain of 32,768 elements, so that threads cut it
    draw = torch.Generator().manual_seed(5)
    start, gradient = torch.randn(2, count, generator=draw).unbind()
    numbers = dict(case.spec(Kernels.EXACT).merged(()))
    for kernels in Kernels:
        results = []
        for thread_count in (1, 2, 3):
            torch.set_num_threads(thread_count)
            bounds = np.array([0, 33, count], dtype=np.int64)
            state = BlockState(start.clone(), bounds, np.zeros(2, dtype=np.int64))
            optimizer = Optimizer(case.spec(kernels), BufferPool())
            for mask in (np.array([False, True]), None):
                optimizer.apply(state, gradient, mask, numbers)
            results.append(state.values)
        assert all(torch.equal(result, results[0]) for result in results)


def test_momentum_that_comes_later_starts_from_the_gradient_of_that_step() -> None:
    case = Case(SGD, {"lr": 0.1, "dampening": 0.5})

    def later(step: int, numbers: dict[str, float]) -> dict[str, float]:
        return {**numbers, "momentum": 0.0 if step in (0, 1, 6) else 0.9}

    course = list(steps(case, torch.float32, later, absent=True))
    for kernels, block in ((Kernels.EXACT, 64), (Kernels.EXACT, 4096), (Kernels.FAST, 64)):
        shards = Shards(case.spec(kernels), initial(torch.float32), block)
        for clock, expected in enumerate(torch_run(case, torch.float32, course), start=1):
            shards.step(clock, course[clock - 1])
            if kernels is Kernels.EXACT:
                assert torch.equal(shards.values(), expected)
            else:
                torch.testing.assert_close(shards.values(), expected)


def test_the_fingerprint_names_the_release_torch_the_cpu_and_a_self_test() -> None:
    parts = dict(part.split("=", 1) for part in kernel_fingerprint().split(";"))
    assert list(parts) == ["pushpull", "torch", "cpu", "selftest"]
    assert parts["pushpull"] == metadata.version("pushpull")
    assert parts["torch"] == torch.__version__
    assert parts["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert len(parts["selftest"]) == 16
    kernel_fingerprint.cache_clear()
    assert parts["selftest"] in kernel_fingerprint()
