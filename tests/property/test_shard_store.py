"""A shard's arithmetic against a dumb twin in numpy, and every bad payload refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from docs import payload_codec as raw
from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor, InvariantViolation
from ps_core.sliced_work import at_once
from ps_core.tables.elements import NATIVE_CODEC, Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import ONLY_ROW_OPTIMIZERS, Kernels, OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import Reduction
from ps_server.values import contributions
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution
from ps_server.values.optimizers import padded_length
from ps_server.values.shard_store import ShardStore
from tests.examples import examples
from tests.property.shard_twin import (
    Array,
    PoisonedPool,
    Twin,
    check_reads,
    decoded,
    same_values,
    table,
    tables,
    worker_steps,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_a_store_does_what_its_dumb_twin_does(data: st.DataObject) -> None:
    """CON-1, STO-2."""
    subject = data.draw(tables())
    pool = PoisonedPool()
    store, twin = ShardStore(subject, range(subject.block_count), pool), Twin(subject)
    check_reads(store, twin, 0)
    clock = 0
    for _ in range(data.draw(st.integers(1, 4))):
        steps = data.draw(st.lists(worker_steps(subject), max_size=4))
        kept = [[decoded(store, part) for part in parts] for parts, _ in steps]
        before = [[bytearray(part.payload) for part in parts] for parts, _ in steps]
        for (parts, scale), taken in zip(steps, kept, strict=True):
            store.accumulate(clock + 1, taken, scale)
            twin.accumulate(parts, scale)
        if data.draw(st.integers(0, 4)) == 0:
            store.drop(clock + 1)
            twin.drop()
        else:
            count = max(len(steps), 1) + data.draw(st.integers(0, 1))
            scale = 1.0
            if data.draw(st.booleans()):  # its norm is asked for first
                scale = data.draw(st.sampled_from([1.0, 0.0, 0.375, 1 / 3]))
                squares = at_once(store.reducing(clock + 1, count))
                np.testing.assert_allclose(squares, twin.squares(count), rtol=1e-13)
            touched = store.apply(clock + 1, (), count, scale)
            clock += 1
            assert touched == twin.apply(clock, count, scale)
        check_reads(store, twin, clock)
        assert store._block_bytes == store._counted_bytes()
        assert before == [[part.payload for part in parts] for parts, _ in steps]
    if subject.spec.optimizer.kind is not OptimizerKind.AGGREGATE:
        assert not pool.out


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_assigned_values_are_what_is_read_until_the_first_update(data: st.DataObject) -> None:
    subject = data.draw(tables())
    store, twin = ShardStore(subject, range(subject.block_count)), Twin(subject)
    parts, _ = data.draw(worker_steps(subject))
    store.assign([decoded(store, part) for part in parts])
    twin.accumulate(parts, 1.0)
    twin.values[twin.mask] = twin.total[twin.mask]
    for block in range(subject.block_count):
        payload, presence = store.read(block, Codec.FP32, 0)
        same_values(payload, twin.read(block, Codec.FP32), Codec.FP32)
        assert presence == b""
        assert store.version(block) == 0


def test_inline_values_are_read_back_bit_for_bit() -> None:
    for dtype, codec in NATIVE_CODEC.items():
        values = raw.encode(np.linspace(-3, 3, 150), codec)
        inline = Initializer(InitializerKind.INLINE, inline=values)
        subject = table([7, 143], dtype=dtype, initializer=inline)
        store = ShardStore(subject, range(3))
        assert b"".join(store.read(block, None, None)[0] for block in range(3)) == values


def ones(count: int, codec: Codec = Codec.FP32) -> bytes:
    return raw.encode(np.ones(count), codec)


def broken(value: float, at: int = 20) -> bytes:
    values = np.ones(64, np.float32)
    values[at] = value
    return values.tobytes()


def int8_of(scale: float, number: int) -> bytes:
    """64 elements of that number."""
    return np.array([scale], "<f4").tobytes() + np.full(64, number, np.int8).tobytes()


def sign_of(scale: float) -> bytes:
    """64 elements of that number."""
    return np.array([scale], "<f4").tobytes() + b"\xff" * 8


def sparse(elements: list[float], places: Iterable[int]) -> tuple[int, Codec, bytes, bytes]:
    """Some elements of block 0."""
    return 0, Codec.SPARSE, raw.encode_sparse(elements, [*places]), b""


def low_rank(
    value: float = 1.0,
    header: tuple[int, ...] = (8, 1, 0),
    rows: int = 8,
    end: int | None = None,
) -> tuple[int, Codec, bytes, bytes]:
    """Block 0 as 8 x 8 elements that are the square of `value`, with perhaps a wrong header."""
    payload = raw.encode_low_rank(np.full((rows, 1), value), np.full((1, 8), value))
    return 0, Codec.LOW_RANK, (np.array(header, "<u4").tobytes() + payload[12:])[:end], b""


BAD = [
    pytest.param((5, Codec.FP32, ones(64), b""), InvalidKeys, "block 5", id="no-such-block"),
    pytest.param((-1, Codec.FP32, ones(64), b""), InvalidKeys, "block -1", id="negative-block"),
    pytest.param((1, Codec.FP32, ones(64), b""), InvalidKeys, "range", id="of-another-range"),
    pytest.param((0, Codec.FP32, ones(63), b""), InvalidTensor, "252 bytes", id="short"),
    pytest.param((0, Codec.FP32, ones(65), b""), InvalidTensor, "expected 256", id="long"),
    pytest.param((2, Codec.FP32, ones(64), b""), InvalidTensor, "expected 88", id="padded-last"),
    pytest.param((0, Codec.FP32, b"", b""), InvalidTensor, "0 bytes", id="empty"),
    pytest.param((0, Codec.FP32, ones(64)[:-1], b""), InvalidTensor, "255 bytes", id="torn"),
    pytest.param((0, Codec.FP16, ones(64), b""), InvalidTensor, "fp16", id="other-codec"),
    pytest.param((0, Codec.FP64, ones(64, Codec.FP64), b""), InvalidTensor, "fp64", id="wider"),
    pytest.param((0, Codec.FP32, ones(64), b"\3\0"), InvalidKeys, "2 bytes", id="presence-long"),
    pytest.param((0, Codec.FP32, broken(math.nan), b""), InvalidTensor, "'t1'", id="nan"),
    pytest.param((0, Codec.FP32, broken(math.inf, 3), b""), InvalidTensor, "'t0'", id="inf"),
    pytest.param((0, Codec.FP32, broken(-math.inf), b"\2"), InvalidTensor, "'t1'", id="-inf"),
    pytest.param(
        (0, Codec.BF16, raw.encode(np.full(64, np.nan), Codec.BF16), b""),
        InvalidTensor, "'t0' of table 'model'", id="bf16-nan",
    ),
    pytest.param(
        (0, Codec.FP16, raw.encode(np.full(64, np.inf), Codec.FP16), b""),
        InvalidTensor, "non-finite", id="fp16-inf",
    ),
    pytest.param((0, Codec.INT8, int8_of(math.nan, 1), b""), InvalidTensor, "'t0'", id="int8-nan"),
    pytest.param((0, Codec.INT8, int8_of(3e38, 2), b""), InvalidTensor, "'t0'", id="int8-large"),
    pytest.param((0, Codec.INT8, int8_of(0.5, 1)[:-1], b""), InvalidTensor, "68", id="int8-short"),
    pytest.param((0, Codec.SIGN, sign_of(math.nan), b""), InvalidTensor, "'t0'", id="sign-nan"),
    pytest.param((0, Codec.SIGN, sign_of(0.5)[:-1], b""), InvalidTensor, "12", id="sign-short"),
    pytest.param((0, Codec.SIGN, sign_of(0.5) + b"x", b""), InvalidTensor, "12", id="sign-long"),
    pytest.param(sparse([math.nan], [3]), InvalidTensor, "'t0'", id="sparse-nan"),
    pytest.param(sparse([], []), InvalidTensor, "a multiple of 8, from 8 to", id="sparse-empty"),
    pytest.param(sparse([1.0] * 65, range(65)), InvalidTensor, "520 bytes", id="sparse-long"),
    pytest.param(sparse([1.0], [64]), InvalidTensor, "block 0 .* not below 64", id="sparse-beyond"),
    pytest.param(sparse([1, 2], [5, 5]), InvalidTensor, "not ascending", id="sparse-twice"),
    pytest.param(sparse([1, 2], [5, 4]), InvalidTensor, "not ascending", id="sparse-back"),
    pytest.param(low_rank(value=math.nan), InvalidTensor, "'t0'", id="low-rank-nan"),
    pytest.param(low_rank(value=2e19), InvalidTensor, "'t0'", id="low-rank-large"),
    pytest.param(low_rank(header=(0, 1, 0)), InvalidTensor, "rank 1 for 0 col", id="no-columns"),
    pytest.param(low_rank(header=(65, 1, 0)), InvalidTensor, "rank 1 for 65", id="many-columns"),
    pytest.param(low_rank(header=(8, 0, 0)), InvalidTensor, "block 0 .* rank 0", id="rank-0"),
    pytest.param(low_rank(header=(8, 2, 0)), InvalidTensor, "rank 2 for 8", id="higher-rank"),
    pytest.param(low_rank(header=(8, 1, 8)), InvalidTensor, "from column 8", id="first-beyond"),
    pytest.param(low_rank(header=(8, 1, 8), rows=9), InvalidTensor, "column 8", id="a-row-beyond"),
    pytest.param(low_rank(header=(8, 1, 1)), InvalidTensor, "from column 1", id="one-row-more"),
    pytest.param(low_rank(header=(2**32 - 1,) * 3), InvalidTensor, "429496", id="low-rank-huge"),
    pytest.param(low_rank(end=-4), InvalidTensor, "rank 1 for 8", id="low-rank-short"),
    pytest.param(low_rank(end=-1), InvalidTensor, "75 bytes", id="low-rank-torn"),
    pytest.param(low_rank(end=12), InvalidTensor, "from 20 to 256", id="low-rank-no-factors"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "text"), BAD)
def test_a_bad_payload_is_refused_and_changes_nothing(
    arguments: tuple[int, Codec, bytes, bytes], error: type[Exception], text: str
) -> None:
    pool = PoisonedPool()
    store = ShardStore(table([10, 140]), [0, 2], pool)
    store.accumulate(1, [(0, store.decode(0, Codec.FP32, ones(64), b""))], 1.0)
    before = [store.read(block, None, None) for block in (0, 2)], store.state_bytes
    with pytest.raises(error, match=text):
        store.decode(*arguments)
    assert ([store.read(block, None, None) for block in (0, 2)], store.state_bytes) == before
    assert not pool.out
    assert store.apply(1, (), 1) == (0,)
    assert store.read(0, Codec.FP32, None)[0] == (-np.ones(64, np.float32)).tobytes()
    assert store.version(2) == 0


def test_non_finite_values_pass_where_the_table_allows_them() -> None:
    store = ShardStore(table([150], allow_non_finite=True), range(3))
    store.accumulate(1, [(0, store.decode(0, Codec.FP32, broken(math.inf), b""))], 1.0)
    store.apply(1, (), 1)
    assert raw.decode(store.read(0, None, None)[0], Codec.FP32)[20] == -math.inf


def test_squares_of_a_float32_do_not_overflow() -> None:
    subject = table([64], reduction=Reduction.SUM)
    store = ShardStore(subject, [0])
    largest = raw.encode(np.full(64, 3e38), Codec.FP32)
    store.accumulate(1, [(0, store.decode(0, Codec.FP32, largest, b""))], 1.0)
    (square,) = at_once(store.reducing(1, 1))
    assert square == pytest.approx(64 * 3e38**2)


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    store = ShardStore(table([64]), range(1))
    values = np.full(64, np.finfo(np.float32).max)
    store.decode(0, Codec.FP32, values.tobytes(), b"")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_bad_scale_is_refused_and_changes_nothing(scale: float) -> None:
    store = ShardStore(table([64]), range(1))
    part = store.decode(0, Codec.FP32, ones(64), b"")
    with pytest.raises(InvalidConfig, match="scale"):
        store.accumulate(1, [(0, part)], scale)
    assert store.apply(1, (), 1) == ()


@pytest.mark.parametrize(
    ("kind", "given_numbers"),
    [
        (OptimizerKind.SGD, (("learning_rate", 0.1),)),
        (OptimizerKind.SGD, (("lr", math.nan),)),
        (OptimizerKind.SGD, (("momentum", -0.1),)),
        (OptimizerKind.ADAM, (("beta1", 1.0),)),
        (OptimizerKind.ADAMW, (("beta2", 1.5),)),
        (OptimizerKind.RMSPROP, (("alpha", -1.0),)),
        (OptimizerKind.ADAGRAD, (("lr_decay", -1.0),)),
    ],
)
def test_bad_hyperparameters_are_refused_and_change_nothing(
    kind: OptimizerKind, given_numbers: tuple[tuple[str, float], ...]
) -> None:
    store = ShardStore(table([64], optimizer=OptimizerSpec(kind)), range(1))
    store.accumulate(1, [(0, store.decode(0, Codec.FP32, ones(64), b""))], 1.0)
    before = store.read(0, None, None), store.state_bytes
    with pytest.raises(InvalidConfig, match=given_numbers[0][0]):
        store.apply(1, given_numbers, 1)
    assert (store.read(0, None, None), store.state_bytes) == before
    assert store.apply(1, (), 1) == (0,)  # what was accumulated is still there


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.read(7, None, None),
        lambda store: store.version(7),
        lambda store: store.read(0, Codec.FP64, None),
    ],
)
def test_bad_reads_are_refused(call: Callable[[ShardStore], object]) -> None:
    with pytest.raises((InvalidKeys, InvalidTensor)):
        call(ShardStore(table([64]), range(1)))


def test_a_contribution_given_as_another_block_is_a_bug() -> None:
    store = ShardStore(table([128]), range(2))
    part = store.decode(0, Codec.FP32, ones(64), b"")
    with pytest.raises(InvariantViolation, match="STO-1"):
        store.accumulate(1, [(1, part)], 1.0)


def test_a_payload_of_the_tables_dtype_is_read_where_it_lies() -> None:
    for dtype, element in ((DType.FLOAT32, np.float32), (DType.FLOAT64, np.float64)):
        store = ShardStore(table([64], dtype=dtype), range(1))
        payload = np.arange(64, dtype=element).tobytes()
        part = store.decode(0, NATIVE_CODEC[dtype], payload, b"")
        assert part.values.data_ptr() == np.frombuffer(payload, np.uint8).ctypes.data
        assert part.byte_count == len(payload)


def test_memory_that_may_change_is_copied_and_odd_addresses_are_read() -> None:
    store = ShardStore(table([64]), range(1))
    memory = bytearray(ones(64))
    lent = store.decode(0, Codec.FP32, memoryview(memory), b"")
    memory[:] = bytes(len(memory))
    odd = store.decode(0, Codec.FP32, memoryview(b"x" + ones(64))[1:], b"")
    store.accumulate(1, [(0, lent)], 1.0)
    store.accumulate(1, [(0, odd)], 1.0)
    store.apply(1, (), 2)
    assert store.read(0, None, None)[0] == (-np.ones(64, np.float32)).tobytes()


class MovingPool(PoisonedPool):
    """Another process that writes to `memory` as soon as a buffer was taken for its copy."""

    __slots__ = ("memory",)

    def __init__(self, memory: Array) -> None:
        super().__init__()
        self.memory = memory

    def take(self, element_count: int, dtype: torch.dtype) -> Tensor:
        self.memory[:] = 2.0
        return super().take(element_count, dtype)


@pytest.mark.parametrize("offset_bytes", [0, 1])
@pytest.mark.parametrize("codec", [Codec.FP32, Codec.FP16, Codec.BF16])
def test_shared_memory_is_copied_before_it_is_checked(codec: Codec, offset_bytes: int) -> None:
    memory = np.frombuffer(bytearray(b"x" * offset_bytes + ones(64, codec)), np.uint8)
    payload = memory.data.toreadonly()[offset_bytes:]  # read-only here, not over there
    pool = PoisonedPool()
    store = ShardStore(table([10, 54]), range(1), pool)
    part = store.decode(0, codec, payload, b"", is_shared=True)
    assert part.is_owned
    assert len(pool.out) == 1
    memory[:] = 255  # NaNs
    with pytest.raises(InvalidTensor, match="non-finite"):
        store.decode(0, codec, payload, b"", is_shared=True)
    assert len(pool.out) == 1
    store.accumulate(1, [(0, part)], 1.0)
    store.apply(1, (), 1)
    assert store.read(0, None, None)[0] == (-np.ones(64, np.float32)).tobytes()
    assert not pool.out


def test_what_is_checked_of_shared_memory_is_the_copy() -> None:
    memory = np.full(64, np.nan, np.float32)
    store = ShardStore(table([64]), range(1), MovingPool(memory))
    payload = memory.data.cast("B").toreadonly()
    # Bad when it was sent, good when it was copied: what counts is the copy, and only that.
    part = store.decode(0, Codec.FP32, payload, b"", is_shared=True)
    memory[:] = np.nan
    assert bool((part.values == 2.0).all())


WITHOUT_KERNELS = (OptimizerKind.ASSIGN, OptimizerKind.CUSTOM, *ONLY_ROW_OPTIMIZERS)


@pytest.mark.parametrize("kernels", list(Kernels))
@pytest.mark.parametrize(
    "kind",
    [k for k in OptimizerKind if k not in WITHOUT_KERNELS],
)
def test_no_optimizer_writes_into_a_payload(kind: OptimizerKind, kernels: Kernels) -> None:
    """OPT-2."""
    spec = OptimizerSpec(kind, kernels=kernels, maximize=True)
    subject = table([30, 98], optimizer=spec)
    pool = PoisonedPool()
    store = ShardStore(subject, range(2), pool)
    payload = np.linspace(-1, 1, 64, dtype=np.float32).tobytes()
    before = bytearray(payload)
    for clock in (1, 2):
        for block in (0, 1):
            store.accumulate(clock, [(block, store.decode(block, Codec.FP32, payload, b""))], 1.0)
        store.apply(clock, (("weight_decay", 0.1),) if kind in WITH_DECAY else (), 1)
    assert payload == before
    assert not pool.out


@pytest.mark.parametrize("presence", [b"", b"\1"])
def test_what_a_shard_owns_is_padded_with_zeros(presence: bytes) -> None:
    """CON-2, of every way to come to own memory."""
    pool = PoisonedPool()
    store = ShardStore(table([10, 57]), range(2), pool)

    def read(codec: Codec = Codec.FP32, *, is_shared: bool = False) -> Contribution:
        return store.decode(1, codec, ones(3, codec), b"", is_shared=is_shared)

    converted, shared = read(Codec.FP16), read(is_shared=True)
    scaled = contributions.scaled(read(), 3.0, pool)
    copied, padded = contributions.owned(read(), pool), contributions.padded(read(), pool)
    added = contributions.added(read(), read(), pool)
    first = ShardStore(table([10, 57], block=128), range(1), pool)
    parts = [first.decode(0, Codec.FP32, ones(67), presence) for _ in range(2)]
    both = contributions.added(parts[0], parts[1], pool)
    for part in (converted, shared, scaled, copied, padded, added, both):
        assert part.is_owned
        assert part.values.numel() == padded_length(part.length) > part.length
        assert not part.values[part.length :].any()


WITH_DECAY = {
    kind
    for kind in OptimizerKind
    if kind not in (OptimizerKind.AGGREGATE, OptimizerKind.ASSIGN, OptimizerKind.ADD)
}


def test_buffers_are_used_again_and_as_many_kept_as_were_needed_at_once() -> None:
    pool = BufferPool()

    def use(count: int) -> set[int]:
        taken = [pool.take(128, torch.float32) for _ in range(count)]
        for buffer in taken:
            pool.give_back(buffer)
        return {buffer.data_ptr() for buffer in taken}

    addresses = use(3)
    assert len(addresses) == 3
    pool.trim()
    assert pool.held_bytes == 3 * 512
    assert use(2) < addresses
    pool.trim()
    assert pool.held_bytes == 2 * 512
    assert use(2) < addresses
    pool.trim()
    pool.trim()  # nothing was needed since the one before
    assert pool.held_bytes == 0


def test_a_buffer_that_is_in_use_is_kept_when_it_comes_back() -> None:
    pool = BufferPool()
    buffer = pool.take(64, torch.float64)
    pool.trim()
    pool.trim()
    pool.give_back(buffer)
    assert pool.take(64, torch.float64).data_ptr() == buffer.data_ptr()
