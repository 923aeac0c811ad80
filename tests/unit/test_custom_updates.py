"""A custom update on a shard: what it is handed, what is refused, and that nothing changes then."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ps_core.errors import InvalidConfig, UpdateFailed
from ps_core.keys import TableId
from ps_core.tables.elements import NATIVE_CODEC, Codec, DType, pack_presence
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec, TensorSpec
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.custom_updates import CheckedUpdate, checked
from ps_server.values.shard_store import ShardStore
from tests.unit.sample_updates import BREACHES, Counting, Decaying, Given, Lion

SIZES = (70, 3, 40, 90)
"""203 elements: tensors that end inside of blocks of 64, the last block not full."""

Presence = tuple[bool, ...]


def table_of(update: CheckedUpdate, block: int = 64, **settings: Any) -> Table:
    tensors, offset = [], 0
    for index, size in enumerate(SIZES):
        tensors.append(TensorSpec(f"t{index}", (size,), offset))
        offset += size
    spec = TableSpec(
        "model",
        settings.pop("dtype", DType.FLOAT32),
        offset,
        OptimizerSpec(OptimizerKind.CUSTOM, update.defaults, custom_update=update.name),
        block_elements=block,
        tensors=tuple(tensors),
        **settings,
    )
    return Table(TableId(1), 0, spec.validated())


class Shard:
    """A store of a whole table, and what goes in and out of it as one vector."""

    def __init__(
        self, update: object, block: int = 64, pool: BufferPool | None = None, **settings: Any
    ) -> None:
        self.update = checked("mine", update)
        self.table = table_of(self.update, block, **settings)
        blocks = range(self.table.block_count)
        self.store = ShardStore(self.table, blocks, pool, update=self.update)
        self.codec = NATIVE_CODEC[self.table.spec.dtype]
        self.clock = 0

    def step(
        self, gradient: Tensor, present: Sequence[bool] = (True,) * 4, **numbers: float
    ) -> None:
        """One worker's step; all or nothing of it."""
        self.clock += 1
        parts = []
        for block in range(self.table.block_count):
            begin = block * self.table.spec.block_elements
            cut = gradient[begin : begin + self.table.block_length(block)]
            here = tuple(present[s.tensor] for s in self.table.segments(block))
            payload = cut.numpy().tobytes()
            part = self.store.decode(block, self.codec, payload, pack_presence(here))
            parts.append((block, part))
        self.store.accumulate(self.clock, parts, 1.0)
        self.store.apply(self.clock, tuple(sorted(numbers.items())), 1)

    @property
    def values(self) -> Tensor:
        """All values, copied."""
        found = [bytes(self.store.read(b, None, None)[0]) for b in range(self.table.block_count)]
        dtype = np.float64 if self.table.spec.dtype is DType.FLOAT64 else np.float32
        return torch.from_numpy(np.frombuffer(b"".join(found), dtype).copy())

    def everything(self) -> list[bytes]:
        """Every bit that an update may change."""
        found = []
        for block, state in sorted(self.store._states.items()):
            found.append(state.values.numpy().tobytes())
            found += [t.numpy().tobytes() for _, t in sorted(state.slots.items())]
            found.append(np.broadcast_to(state.steps, state.segment_count).tobytes())
            found.append(str((sorted(state.slots), self.store.version(block))).encode())
        return found


def gradients(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(SIZES), generator=draws, dtype=dtype) for _ in range(count)]


def by_tensor(
    update: CheckedUpdate, steps: Sequence[tuple[Tensor, Presence]], dtype: torch.dtype
) -> Tensor:
    """The same in one process: tensor after tensor, as a torch optimizer would."""
    values = [torch.zeros(size, dtype=dtype) for size in SIZES]
    state = [{n: torch.full((s,), x, dtype=dtype) for n, x in update.slots.items()} for s in SIZES]
    counts = [0] * len(SIZES)
    for gradient, present in steps:
        for index, part in enumerate(gradient.split(list(SIZES))):
            if present[index]:
                counts[index] += 1
                values[index], new = update.call(
                    values[index], state[index], part.clone(), dict(update.defaults), counts[index]
                )
                state[index] = dict(new)
    return torch.cat(values)


@pytest.mark.parametrize("kind", [Lion, Decaying, Counting])
@given(
    presences=st.lists(st.tuples(*[st.booleans()] * 4), min_size=1, max_size=4),
    block=st.sampled_from((64, 128, 256)),
    dtype=st.sampled_from((DType.FLOAT32, DType.FLOAT64)),
)
def test_it_is_what_one_process_computes_however_it_is_cut(
    kind: type, presences: list[Presence], block: int, dtype: DType
) -> None:
    """CU-2."""
    theirs = torch.float64 if dtype is DType.FLOAT64 else torch.float32
    shard = Shard(kind, block, dtype=dtype)
    steps = list(zip(gradients(len(presences), dtype=theirs), presences, strict=True))
    for gradient, present in steps:
        shard.step(gradient, present)
    assert torch.equal(shard.values, by_tensor(shard.update, steps, theirs))


def test_the_numbers_of_a_step_reach_it() -> None:
    shard = Shard(Decaying)
    (gradient,) = gradients(1)
    shard.step(gradient, lr=0.25)
    assert torch.equal(shard.values, 0.0 - gradient * 0.25)


class Watching:
    """Writes down what it is handed."""

    hyperparameters: ClassVar = {"lr": 0.5, "rho": 2}
    slots: ClassVar = {"m": 3.0}

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def update(
        self, values: Tensor, state: Any, gradient: Tensor, numbers: Any, step: int
    ) -> tuple[Tensor, Any]:
        self.calls.append((values.clone(), state["m"].clone(), gradient.clone(), numbers, step))
        assert not torch.is_grad_enabled()
        return values + 1.0, state


def test_it_is_handed_what_is_present_padded_with_zeros() -> None:
    update = Watching()
    shard = Shard(update, 256)
    (gradient,) = gradients(1)
    gradient[:70] = torch.nan  # of a tensor that is absent: may hold anything
    shard.step(gradient, (False, True, False, True), rho=4.0)
    ((values, m, seen, numbers, step),) = update.calls
    expected = torch.cat([gradient[70:73], gradient[113:]])
    assert torch.equal(seen, torch.cat([expected, torch.zeros(128 - 93)]))
    assert values.shape == m.shape == (128,)
    assert (m == 3.0).all()
    assert (numbers, step) == ({"lr": 0.5, "rho": 4.0}, 1)
    assert shard.values[70:73].tolist() == [1.0] * 3
    assert shard.values[:70].tolist() == [0.0] * 70


def test_elements_of_one_age_are_handed_over_together() -> None:
    update = Watching()
    shard = Shard(update, 256)
    shard.step(gradients(1)[0], (True, False, False, False))
    shard.step(gradients(1)[0])
    assert [(call[4], call[0].numel()) for call in update.calls] == [(1, 128), (1, 192), (2, 128)]


@pytest.mark.parametrize("breach", BREACHES)
@pytest.mark.parametrize("from_step", [1, 2])
def test_what_it_must_not_do_changes_nothing(breach: str, from_step: int) -> None:
    """CU-1."""
    then, words = BREACHES[breach]
    shard = Shard(Given(then, from_step))
    first, second = gradients(2)
    if from_step == 2:  # only one tensor is at its second step: the blocks before it succeed
        shard.step(first, (False, False, False, True))
    before = shard.everything()
    with pytest.raises(UpdateFailed, match=f"table 'model' .* 'mine' .* block [0-9]: .*{words}"):
        shard.step(second)
    assert shard.everything() == before


def test_a_table_that_allows_them_takes_infinities() -> None:
    shard = Shard(Given(lambda v, s: (v / 0.0, s)), allow_non_finite=True)
    shard.step(gradients(1)[0])
    assert not torch.isfinite(shard.values).any()


def test_state_may_hold_infinities() -> None:
    shard = Shard(Given(lambda v, s: (v, {"m": s["m"] / 0.0})))
    shard.step(gradients(1)[0])
    assert torch.isfinite(shard.values).all()


def test_what_is_kept_of_a_result_is_a_copy() -> None:
    """An update that goes on writing to what it gave back does not write to the table."""
    kept: list[Tensor] = []

    def then(values: Tensor, state: dict[str, Tensor]) -> Any:
        kept.append(values)
        return values, state

    shard = Shard(Given(then))
    shard.step(gradients(1)[0])
    before = shard.values
    for tensor in kept:
        tensor.fill_(7.0)
    assert torch.equal(shard.values, before)


def test_the_memory_of_the_table_is_not_handed_out() -> None:
    """Values may be lent to readers where they lie: only the server writes there."""
    places: set[int] = set()

    def then(values: Tensor, state: dict[str, Tensor]) -> Any:
        places.update((values.data_ptr(), state["m"].data_ptr()))
        return values, state

    shard = Shard(Given(then))
    shard.step(gradients(1)[0])
    shard.step(gradients(1)[0])
    for state in shard.store._states.values():
        assert state.values.data_ptr() not in places
        assert state.slots["m"].data_ptr() not in places


def test_payloads_are_only_read_and_memory_goes_back_to_the_pool() -> None:
    for then in (lambda v, s: (v, s), BREACHES["raises"][0]):
        pool = BufferPool()
        shard = Shard(Given(then), pool=pool)
        own = bytes(np.ones(64, "<f4"))
        narrow = bytes(np.ones(64, "<f2"))  # converted, into a buffer of the pool
        before = bytes(bytearray(own))
        for block, (codec, payload) in enumerate([(Codec.FP32, own), (Codec.FP16, narrow)]):
            part = shard.store.decode(block, codec, payload, b"")
            shard.store.accumulate(1, [(block, part)], 1.0)
        with contextlib.suppress(UpdateFailed):
            shard.store.apply(1, (), 1)
        assert own == before
        assert pool.held_bytes == 64 * 4


class Bare:
    """Has what the contract asks for, and may lose it."""

    hyperparameters: ClassVar[Any] = {"lr": 1.0}
    slots: ClassVar[Any] = {"m": 0.0}

    def update(self, *_: Any) -> Any:
        raise NotImplementedError


def without(member: str, value: Any = None) -> object:
    bare = Bare()
    setattr(bare, member, value)
    return bare


class Demanding(Bare):
    def __init__(self, what: str) -> None: ...


BAD: dict[str, tuple[object, str]] = {
    "a number": (3, "is a int without a method 'update'"),
    "no update": (without("update"), "is a Bare without a method 'update'"),
    "wants arguments": (Demanding, "cannot be made without arguments: TypeError"),
    "no numbers": (without("hyperparameters"), "hyperparameters is nothing; expected a mapping"),
    "a list of numbers": (without("hyperparameters", ["lr"]), "hyperparameters is a list"),
    "a word": (without("hyperparameters", {"lr": "fast"}), "mapping of names to numbers"),
    "a flag": (without("hyperparameters", {"lr": True}), "mapping of names to numbers"),
    "a NaN": (without("hyperparameters", {"lr": float("nan")}), "default of 'lr' is nan"),
    "no name": (without("hyperparameters", {3: 1.0}), "mapping of names to numbers"),
    "a space": (without("hyperparameters", {"l r": 1.0}), "a name that an argument may have"),
    "a keyword": (without("hyperparameters", {"lambda": 1.0}), "a name that an argument may have"),
    "torch's own": (without("hyperparameters", {"params": 1.0}), "none of base_momentum, "),
    "too many": (
        without("hyperparameters", {f"n{i}": 0.0 for i in range(33)}),
        "33 hyperparameters; expected at most 32",
    ),
    "no slots": (without("slots"), "slots is nothing; expected a mapping"),
    "a slot of NaN": (without("slots", {"m": float("nan")}), "slot 'm' starts with a NaN"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_update_is_refused_with_what_it_lacks(case: str) -> None:
    named, words = BAD[case]
    with pytest.raises(InvalidConfig, match=f"custom update 'mine'.*{words}"):
        checked("mine", named)


def test_a_class_an_object_and_a_module_may_be_named() -> None:
    from tests.unit import module_update

    for named in (Lion, Lion(), module_update):
        assert checked("mine", named).defaults[-1][0] in ("weight_decay", "lr")
