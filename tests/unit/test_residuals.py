"""What a codec took from gradients comes with later ones, whatever becomes of steps (RES-1)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core import limits
from ps_core.codecs import int8, low_rank, sparse
from ps_core.codecs.choices import PushCodec, name_of
from ps_core.codecs.int8_passes import Floats
from ps_core.codecs.low_rank import BlockMatrix
from ps_core.errors import InvalidCheckpoint, InvalidConfig, InvalidTensor
from ps_core.keys import TableId
from ps_core.tables.elements import Codec, DType, pack_presence
from ps_core.tables.table import Table
from ps_worker.compression.push_encoder import CodedPayload, PushEncoder, StepEnd, decode_into
from ps_worker.compression.residuals import Residuals
from ps_worker.compression.table_codecs import OWN_CODECS, TableCodecs, codecs_of
from ps_worker.spec.optimizers import SGD, Assign
from ps_worker.spec.settings import TableOptions, table_spec
from ps_worker.spec.values import BlockValues
from ps_worker.steps.steps import PushBody, StepResult, TableSteps
from ps_worker.window.push_window import StepTerms

Doubles = npt.NDArray[np.float64]

INT8 = PushCodec(Codec.INT8)
BLOCK, COUNT = 128, 300
TENSORS = (("a", 80), ("b", 120), ("c", 100))


def table(dtype: DType = DType.FLOAT32) -> Table:
    """Three blocks; tensor b is in two of them."""
    options: TableOptions = {"dtype": dtype.value, "block_elements": BLOCK}
    spec = table_spec("t", [(name, (size,)) for name, size in TENSORS], SGD(lr=1.0), options)
    return Table(TableId(1), 0, spec)


def part(block: int) -> slice:
    return slice(block * BLOCK, min((block + 1) * BLOCK, COUNT))


@dataclass
class Twin:
    """Adds up, in float64, what a worker wanted and what the servers took in."""

    encoder: PushEncoder
    wanted: Doubles = field(default_factory=lambda: np.zeros(COUNT))
    taken: Doubles = field(default_factory=lambda: np.zeros(COUNT))
    clock: int = 0

    def step(self, pushes: list[tuple[int, npt.NDArray[np.float32]]], scale: float) -> Step:
        self.clock += 1
        return Step(self, self.clock, scale, pushes)

    def check(self) -> None:
        state = self.encoder.state_dict()
        left = state["residuals"].numpy() * state["scale"]
        size = np.abs(self.wanted).max() + np.abs(self.taken).max() + np.abs(left).max() + 1e-20
        assert np.abs(self.wanted - self.taken - left).max() <= 1e-4 * size


@dataclass
class Step:
    """A step that is pushed, sealed, and ended later."""

    twin: Twin
    clock: int
    scale: float
    pushes: list[tuple[int, npt.NDArray[np.float32]]]
    sent: dict[int, tuple[npt.NDArray[np.float32], Doubles]] = field(default_factory=dict)

    def push(self) -> None:
        for block, gradient in self.pushes:
            codec, payload = self.twin.encoder.encode(
                self.clock, BlockValues(block, gradient.data.cast("B"))
            )
            out = np.empty(gradient.nbytes, np.uint8)
            decode_into(payload.data, codec, out, Codec.FP32)
            self.sent[block] = gradient, out.view(np.float32).astype(np.float64)

    def seal(self, *, takes_part: bool) -> None:
        self.twin.encoder.sealed(self.clock, self.scale, takes_part=takes_part)
        if not takes_part:
            self.sent = {}
        for block, (gradient, taken) in self.sent.items():
            self.twin.wanted[part(block)] += self.scale * gradient.astype(np.float64)
            self.twin.taken[part(block)] += self.scale * taken

    def end(self, discarded: set[int]) -> None:
        self.twin.encoder.ended(self.clock, StepEnd(discarded=discarded))
        for block in discarded & self.sent.keys():
            self.twin.taken[part(block)] -= self.scale * self.sent[block][1]


def gradients(draw: np.random.Generator, block: int) -> npt.NDArray[np.float32]:
    found = draw.standard_normal(part(block).stop - part(block).start)
    scaled: npt.NDArray[np.float32] = (found * 10.0 ** draw.integers(-3, 3)).astype(np.float32)
    return scaled


@pytest.mark.thorough
@pytest.mark.parametrize(
    "codec", ["int8", "sign", "topk:0.1", "randomk:0.1", "topk:0.05:5", "lowrank:1"]
)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_nothing_is_lost_whatever_becomes_of_the_steps(
    codec: str, data: st.DataObject, seed: int
) -> None:
    """Blocks pushed again, withdrawn or left out; steps skipped, and discarded late, under scales
    that change.
    """
    draw, twin = np.random.default_rng(seed), Twin(PushEncoder(table(), PushCodec.parsed(codec), 1))
    open_ends: list[Step] = []
    for _ in range(data.draw(st.integers(1, 12))):
        blocks = data.draw(st.lists(st.integers(0, 2), max_size=5))
        scale = data.draw(st.sampled_from((1.0, 1.0, 0.5, 0.25, 3.0)))
        step = twin.step([(block, gradients(draw, block)) for block in blocks], scale)
        step.push()
        if data.draw(st.integers(0, 7)) == 0:
            twin.encoder.keep_only(step.clock, ())
            step.sent = {}
        step.seal(takes_part=data.draw(st.integers(0, 5)) > 0)
        open_ends.append(step)
        twin.check()
        while open_ends and draw.integers(2):
            open_ends.pop(0).end(data.draw(st.sets(st.integers(0, 2))))
            twin.check()


@pytest.mark.parametrize("takes_part", [False, True])
def test_what_is_applied_on_arrival_counts_though_the_step_is_skipped(takes_part: bool) -> None:
    encoder = PushEncoder(table(), INT8, 0)
    gradient = np.linspace(-1, 1, BLOCK, dtype=np.float32)
    _, payload = encoder.encode(1, BlockValues(0, gradient.data.cast("B")), is_final=True)
    encoder.keep_only(1, ())
    encoder.sealed(1, 1.0, takes_part=takes_part)
    taken = np.empty(BLOCK, np.float32)
    int8.decode(payload, taken)
    left = encoder.state_dict()["residuals"].numpy()[:BLOCK]
    assert np.allclose(taken + left, gradient)
    assert left.any()


@pytest.mark.parametrize("codec", ["int8", "sign", "topk:0.1", "lowrank:1"])
def test_elements_of_absent_tensors_are_nothing_and_leave_their_residuals(codec: str) -> None:
    """Whatever lies in their place."""
    encoder = PushEncoder(table(), PushCodec.parsed(codec), 0)
    gradient = np.linspace(-1, 1, BLOCK, dtype=np.float32)
    encoder.encode(1, BlockValues(0, gradient.data.cast("B")))
    encoder.sealed(1, 1.0, takes_part=True)
    before = encoder.state_dict()["residuals"].numpy().copy()
    garbage = np.full(BLOCK, np.nan, np.float32)
    garbage[:80] = 0.125
    presence = pack_presence((True, False))
    coded = encoder.encode(2, BlockValues(0, garbage.data.cast("B"), presence))
    encoder.sealed(2, 1.0, takes_part=True)
    taken = decoded(coded)
    after = encoder.state_dict()["residuals"].numpy()
    assert np.array_equal(after[80:BLOCK], before[80:BLOCK])
    assert np.allclose(taken[:80] + after[:80], before[:80] + 0.125, atol=1e-6)
    encoder.ended(2, StepEnd(discarded={0}))
    back = encoder.state_dict()["residuals"].numpy()
    assert np.array_equal(back[80:BLOCK], before[80:BLOCK]), "servers take nothing of them"
    assert np.allclose(back[:80], before[:80] + 0.125, atol=1e-6)


def test_a_payload_stays_as_it_is_until_its_step_has_ended() -> None:
    """It may be sent again; then its memory serves the next."""
    encoder = PushEncoder(table(), INT8, 0)
    gradient = np.ones(BLOCK, np.float32)
    _, first = encoder.encode(1, BlockValues(0, gradient.data.cast("B")))
    _, again = encoder.encode(1, BlockValues(0, (2 * gradient).data.cast("B")))
    encoder.sealed(1, 1.0, takes_part=True)
    kept = first.tobytes(), again.tobytes()
    _, other = encoder.encode(2, BlockValues(0, (3 * gradient).data.cast("B")))
    assert (first.tobytes(), again.tobytes()) == kept
    assert kept[0] != kept[1]
    encoder.ended(1)
    _, reused = encoder.encode(2, BlockValues(0, gradient.data.cast("B")))
    assert {id(reused)} <= {id(first), id(again)}
    assert reused is not other


def test_a_warm_up_keeps_no_payload_of_the_steps_that_have_ended() -> None:
    """Each of its steps needs another size; after it the memory of one serves the next."""
    encoder, payloads = PushEncoder(table(), PushCodec.parsed("topk:0.01:30"), 0), []
    gradient = BlockValues(0, np.linspace(-1, 1, BLOCK, dtype=np.float32).data.cast("B"))
    for clock in range(1, 41):
        payloads.append(weakref.ref(encoder.encode(clock, gradient).payload))
        encoder.sealed(clock, 1.0, takes_part=True)
        encoder.ended(clock)
    assert len({id(found) for payload in payloads if (found := payload()) is not None}) == 1


def test_the_same_step_has_the_same_bytes_and_another_rank_others() -> None:
    gradient = np.linspace(-1, 0.9, BLOCK, dtype=np.float32)

    def encoded(rank: int, clock: int = 1, block: int = 0) -> bytes:
        encoder = PushEncoder(table(), INT8, rank)
        return encoder.encode(clock, BlockValues(block, gradient.data.cast("B"))).payload.tobytes()

    assert encoded(0) == encoded(0)
    assert len({encoded(0), encoded(1), encoded(0, 2), encoded(0, 1, 1)}) == 4


@pytest.mark.parametrize("codec", ["int8", "lowrank:1"])
def test_residuals_go_on_from_a_checkpoint(codec: str) -> None:
    encoder, resumed = (PushEncoder(table(), PushCodec.parsed(codec), 0) for _ in range(2))
    values = BlockValues(1, np.linspace(-1, 1, BLOCK, dtype=np.float32).data.cast("B"))
    for clock in (1, 2):
        encoder.encode(clock, values)
        encoder.sealed(clock, 0.5, takes_part=True)
    saved = encoder.state_dict()
    resumed.load_state_dict(saved)
    assert np.array_equal(resumed.encode(3, values).payload, encoder.encode(3, values).payload)
    saved["residuals"] = saved["residuals"][1:]
    with pytest.raises(InvalidCheckpoint, match="299"):
        PushEncoder(table(), INT8, 0).load_state_dict(saved)


def test_another_rank_goes_on_from_the_residuals_alone() -> None:
    encoder, other = low_rank_encoder(1), low_rank_encoder(2)
    gradient = np.random.default_rng(1).standard_normal(WIDE, np.float32)
    encoder.encode(1, BlockValues(0, gradient.data.cast("B")))
    encoder.sealed(1, 1.0, takes_part=True)
    other.load_state_dict(encoder.state_dict())
    codec, _ = other.encode(2, BlockValues(0, gradient.data.cast("B")))
    assert codec is Codec.LOW_RANK
    found, saved = other.state_dict(), encoder.state_dict()
    assert np.array_equal(found["residuals"], saved["residuals"])
    assert not found["starts"].any()


WIDE = 1024
"""Elements of a block with room for a matrix of more than rank 1."""


def low_rank_encoder(rank: int, *shapes: tuple[int, ...]) -> PushEncoder:
    """Of a table of tensors of these shapes, in blocks of WIDE elements."""
    layout = [(f"t{at}", shape) for at, shape in enumerate(shapes or [(WIDE,)])]
    spec = table_spec("t", layout, SGD(lr=1.0), {"block_elements": WIDE})
    return PushEncoder(Table(TableId(1), 0, spec), PushCodec.parsed(f"lowrank:{rank}"), 0)


def decoded(coded: CodedPayload, count: int = BLOCK) -> Floats:
    out = np.empty(count, np.float32)
    decode_into(coded.payload.data, coded.codec, out.view(np.uint8), Codec.FP32)
    return out


@pytest.mark.parametrize("shift", [0, 101, WIDE - 33])
def test_rows_of_a_tensor_are_those_of_the_matrix_wherever_blocks_begin(shift: int) -> None:
    """A tensor of rank 1 arrives at once: rows that two blocks share have a direction each."""
    draw, columns = np.random.default_rng(2), 33
    tensor = np.outer(draw.standard_normal(90), draw.standard_normal(columns)).astype(np.float32)
    encoder = low_rank_encoder(3, (shift,), tensor.shape)
    whole = np.concatenate((np.zeros(shift, np.float32), tensor.reshape(-1)))
    for block in (1, 2):
        gradient = whole[block * WIDE : (block + 1) * WIDE]
        coded = encoder.encode(1, BlockValues(block, gradient.data.cast("B")))
        matrix = low_rank.matrix_of(coded.payload, len(gradient))
        assert (matrix.columns, matrix.first) == (columns, (block * WIDE - shift) % columns)
        assert np.allclose(decoded(coded, len(gradient)), gradient, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4 * WIDE,), (32, 0)),
        ((), None),
        ((64, 16), (16, 0)),
        ((16, 4, 16), (64, 0)),
        ((512, 2), (32, 0)),
        ((2, 512), (32, 0)),
        ((10, 10), None),
    ],
)
def test_a_matrix_is_that_of_the_largest_tensor_or_square(
    shape: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    """It must take fewer bytes than INT8, which the block travels as otherwise."""
    encoder = low_rank_encoder(2, shape)
    count = min(WIDE, math.prod(shape))
    gradient = np.linspace(-1, 1, count, dtype=np.float32)
    coded = encoder.encode(1, BlockValues(0, gradient.data.cast("B")))
    if expected is None:
        assert coded.codec is Codec.INT8
    else:
        assert coded.codec is Codec.LOW_RANK
        assert coded.payload.nbytes < Codec.INT8.payload_bytes(count)
        matrix = low_rank.matrix_of(coded.payload, count)
        assert (matrix.columns, matrix.first) == expected


def test_an_iteration_goes_on_from_the_last_push_that_counted() -> None:
    """A step encoded again, withdrawn or skipped leaves the start that it had."""
    draw = np.random.default_rng(3)
    first, other = (
        BlockValues(0, draw.standard_normal(WIDE, np.float32).data.cast("B")) for _ in range(2)
    )

    def second(*, disturb: Callable[[PushEncoder], None]) -> bytes:
        encoder = low_rank_encoder(2)
        encoder.encode(1, first)
        encoder.sealed(1, 1.0, takes_part=True)
        disturb(encoder)
        return encoder.encode(3, first).payload.tobytes()

    def again(encoder: PushEncoder) -> None:
        encoder.encode(3, other)
        encoder.encode(3, first)

    def withdrawn(encoder: PushEncoder) -> None:
        encoder.encode(2, other)
        encoder.keep_only(2, ())
        encoder.sealed(2, 1.0, takes_part=True)

    def skipped(encoder: PushEncoder) -> None:
        encoder.encode(2, other)
        encoder.sealed(2, 1.0, takes_part=False)

    def counted(encoder: PushEncoder) -> None:
        encoder.encode(2, other)
        encoder.sealed(2, 1.0, takes_part=True)

    expected = second(disturb=lambda _: None)
    for nothing in (again, withdrawn, skipped):
        assert second(disturb=nothing) == expected, nothing.__name__
    assert second(disturb=counted) != expected


@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
def test_a_block_whose_factors_would_not_be_finite_travels_as_int8_for_once(bad: float) -> None:
    encoder = low_rank_encoder(2)
    gradient = np.random.default_rng(4).standard_normal(WIDE, np.float32)
    values = BlockValues(0, gradient.data.cast("B"))
    encoder.encode(1, values)
    encoder.sealed(1, 1.0, takes_part=True)
    starts = encoder.state_dict()["starts"].numpy()
    wrong = gradient.copy()
    wrong[7] = bad
    coded = encoder.encode(2, BlockValues(0, wrong.data.cast("B")))
    encoder.sealed(2, 1.0, takes_part=True)
    assert coded.codec is Codec.INT8
    assert np.isfinite(decoded(coded, WIDE)[300:]).all()
    state = encoder.state_dict()
    assert np.isfinite(state["residuals"].numpy()).all()
    assert np.array_equal(state["starts"].numpy(), starts)
    encoder.encode(3, values)
    encoder.sealed(3, 1.0, takes_part=True)
    assert encoder.encode(4, values).codec is Codec.LOW_RANK


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize("codec", [Codec.FP16, Codec.BF16, Codec.INT8, Codec.SIGN])
def test_each_codec_comes_back_as_near_as_it_can(dtype: DType, codec: Codec) -> None:
    encoder = PushEncoder(table(dtype), PushCodec(codec), 0)
    gradient = np.linspace(-1, 1, BLOCK).astype(dtype.value)
    sent, payload = encoder.encode(1, BlockValues(0, gradient.data.cast("B")))
    assert sent is codec
    assert payload.nbytes == codec.payload_bytes(BLOCK)
    out = np.empty(gradient.nbytes, np.uint8)
    decode_into(payload.data, codec, out, Codec.FP32 if dtype is DType.FLOAT32 else Codec.FP64)
    step = {Codec.FP16: 2.0**-11, Codec.BF16: 2.0**-8, Codec.INT8: 1 / 126, Codec.SIGN: 0.55}[codec]
    assert np.abs(out.view(dtype.value) - gradient).max() <= step


def test_what_fp16_cannot_hold_is_refused_with_the_remedy() -> None:
    encoder = PushEncoder(table(), PushCodec(Codec.FP16), 0)
    gradient = np.zeros(BLOCK, np.float32)
    gradient[7] = 1e5
    with pytest.raises(InvalidTensor, match=r"element 7 in block 0 .* unlike bf16 and int8"):
        encoder.encode(1, BlockValues(0, gradient.data.cast("B")))
    gradient[7] = np.inf
    encoder.encode(1, BlockValues(0, gradient.data.cast("B")))  # the servers refuse it


@pytest.mark.parametrize("eager", [(("lr", 0.1),), None], ids=["eager", "sealed"])
def test_of_an_eager_batch_that_fp16_cannot_hold_nothing_is_sent(eager: Any) -> None:
    """What servers have applied cannot be pushed again, as the caller does with the whole batch."""
    sink, gradient = _Sink(), np.zeros(COUNT, np.float32)
    steps = TableSteps(table(), sink, encoder=PushEncoder(table(), PushCodec(Codec.FP16), 0))
    gradient[part(2)] = 1e5
    batch = [BlockValues(block, gradient[part(block)].data.cast("B")) for block in range(3)]
    with pytest.raises(InvalidTensor, match="element 0 in block 2"):
        steps.open_step().push_blocks(batch, eager=eager)
    assert sink.submitted == ([] if eager else [0, 1])
    steps.open_step().push_blocks(batch[:2], eager=eager)
    assert sink.submitted[-2:] == [0, 1]


class _Sink:
    """Takes steps, and sends nothing; keeps the numbers of blocks."""

    def __init__(self) -> None:
        self.submitted: list[int] = []

    def open_step(self, table: Table, clock: int, future: Future[StepResult]) -> None: ...

    def submit(self, table: Table, clock: int, bodies: Sequence[PushBody]) -> None:
        del table, clock
        self.submitted += [body.block for body in bodies]

    def withdraw(self, table: Table, clock: int, but: Collection[int]) -> None: ...
    def together(self, steps: Sequence[tuple[Table, int]]) -> None: ...
    def seal(self, table: Table, clock: int, terms: StepTerms) -> None: ...


@pytest.mark.parametrize("how", ["withdrawn", "edited", "skipped"])
def test_a_step_that_takes_nothing_in_leaves_residuals_as_they_were(how: str) -> None:
    encoder = PushEncoder(table(), INT8, 0)
    steps = TableSteps(table(), _Sink(), encoder=encoder)
    gradient = np.linspace(-1, 1, BLOCK, dtype=np.float32)
    block = BlockValues(0, gradient.data.cast("B"))
    first = steps.open_step()
    first.push_blocks([block])
    first.seal()
    before = encoder.state_dict()["residuals"].numpy().copy()
    assert before.any()
    second = steps.open_step()
    second.push_blocks([block])
    if how == "edited":
        second.edit([block], b"name")
    else:
        if how == "withdrawn":
            second.withdraw()
        second.seal(skip=how == "skipped")
    assert np.array_equal(encoder.state_dict()["residuals"].numpy(), before)


def test_a_clients_codec_is_for_tables_that_can_have_it() -> None:
    """A choice of the table's own is refused instead."""
    rows = table_spec("t", 8, SGD(lr=1.0), {}, has_rows=True)
    half = table_spec("t", 8, SGD(lr=1.0), {"dtype": "bfloat16"})
    given = table_spec("t", 8, Assign(), {})
    for spec in (rows, half, given):
        assert codecs_of(spec, {}, ("bf16", "fp16")) == OWN_CODECS
        with pytest.raises(InvalidConfig, match="push_codec of table 't' is bf16, but"):
            codecs_of(spec, {"push_codec": "bf16"}, ("none", "none"))
    plain = table_spec("t", 8, SGD(lr=1.0), {})
    assert codecs_of(plain, {}, ("int8", "bf16")) == TableCodecs(INT8, Codec.BF16)
    assert codecs_of(plain, {"pull_codec": "none"}, ("int8", "bf16")).pull is None


@pytest.mark.parametrize("text", ["topk:0", "topk:1", "topk:0.5", "topk:-1", "topk:nan", "topk:x"])
def test_a_share_is_a_part_of_the_elements_that_saves_something(text: str) -> None:
    with pytest.raises(InvalidConfig, match=f"push_codec is '{text}'; expected NAME:SHARE"):
        PushCodec.parsed(text)


@pytest.mark.parametrize("text", ["topk:0.1:-1", "topk:0.1:1.5", "randomk:0.1:2:3"])
def test_a_warm_up_is_a_number_of_steps(text: str) -> None:
    with pytest.raises(InvalidConfig, match=f"push_codec is '{text}'; expected NAME:SHARE"):
        PushCodec.parsed(text)


@pytest.mark.parametrize("text", ["lowrank:0", "lowrank:65", "lowrank:x", "lowrank:2:3"])
def test_a_rank_is_a_number_that_saves_something(text: str) -> None:
    words = f"push_codec is '{text}'; expected lowrank:RANK, with a rank of 1 to 64"
    with pytest.raises(InvalidConfig, match=words):
        PushCodec.parsed(text)
    size = limits.DEFAULT_BLOCK_ELEMENTS
    most, beyond = (BlockMatrix.square(size, rank).payload_bytes for rank in (64, 65))
    assert most < Codec.INT8.payload_bytes(size) < beyond


def test_every_dense_table_may_have_low_rank() -> None:
    """Its small blocks travel as INT8, which has fewer bits than any dtype."""
    half = table_spec("t", 8, SGD(lr=1.0), {"dtype": "bfloat16"})
    assert codecs_of(half, {"push_codec": "lowrank:2"}, ("none", "none")).push == PushCodec(
        Codec.LOW_RANK, matrix_rank=2
    )
    codec, size = PushCodec.parsed("lowrank:4"), limits.DEFAULT_BLOCK_ELEMENTS
    assert codec.payload_bytes(2 * size + 100, 1) == 2 * (12 + 16 * 1024) + 104


def test_only_pushes_have_a_share() -> None:
    spec = table_spec("t", 8, SGD(lr=1.0), {})
    with pytest.raises(InvalidConfig, match="pull_codec is 'topk'; expected one of none, fp32"):
        codecs_of(spec, {"pull_codec": "topk"}, ("none", "none"))
    with pytest.raises(InvalidConfig, match=r"push_codec is 'int8:0\.1'; expected one of none"):
        PushCodec.parsed("int8:0.1")
    half = table_spec("t", 8, SGD(lr=1.0), {"dtype": "bfloat16"})
    chosen = codecs_of(half, {"push_codec": "topk:0.2"}, ("none", "none"))
    assert chosen.push == PushCodec(Codec.SPARSE, 0.2)
    with pytest.raises(
        InvalidConfig, match=r"is topk:0\.25, but the table's own bfloat16 takes no"
    ):
        codecs_of(half, {"push_codec": "topk:0.25"}, ("none", "none"))


def test_choices_are_shown_as_they_were_made() -> None:
    for text in ("int8", "sign", "topk:0.01", "randomk:0.001", "topk:0.02:500", "lowrank:2"):
        assert str(PushCodec.parsed(text)) == text
    assert str(PushCodec.parsed("lowrank")) == "lowrank:4"
    assert str(PushCodec.parsed("topk")) == "topk:0.01"
    assert name_of(None) == "none"
    assert name_of(Codec.INT8) == "int8"
    assert name_of(PushCodec.parsed("topk")) == "topk:0.01"


def test_a_warm_up_ends_with_the_share_and_falls_by_the_same_factor() -> None:
    codec = PushCodec.parsed("topk:0.0025:2")
    assert [codec.payload_bytes(10_000, clock) // 8 for clock in (1, 2, 3, 4)] == [
        2500,
        250,
        25,
        25,
    ]
    assert PushCodec.parsed("topk:0.3:2").payload_bytes(100, 1) == 240
    assert PushCodec.parsed("topk").payload_bytes(3, 1) == 8


@pytest.mark.parametrize("terms", [{"contribution_scale": 0.0}, {"clip_scale": math.nan}])
def test_a_scale_that_is_none_is_refused_and_the_step_stays_open(terms: dict[str, Any]) -> None:
    steps = TableSteps(table(), _Sink(), encoder=PushEncoder(table(), INT8, 0))
    for _ in range(2):
        step, gradient = steps.open_step(), np.linspace(-1, 1, BLOCK, dtype=np.float32)
        step.push_blocks([BlockValues(0, gradient.data.cast("B"))])
        with pytest.raises(InvalidConfig, match=f"{next(iter(terms))} is .*; expected finite and"):
            step.seal(**terms)
        assert steps.open_step() is step
        step.seal()
    assert steps.clock == 2


def descended(pushed: Callable[[int, Floats], Floats], every: int = 1) -> float:
    """The largest error after gradient descent on 0.5 * |D * (x - 1)|^2, where one element is far
    steeper than all others. `pushed` has the elements that arrive of each gradient, one in `every`
    so many clocks.
    """
    steep = np.full(BLOCK, 0.1, np.float32)
    steep[5] = 4.0
    x = np.zeros(BLOCK, np.float32)
    for clock in range(1, 399 * every + 1, every):
        x -= np.float32(0.3) * pushed(clock, steep * (x - 1))
    return float(np.abs(x - 1).max())


def through(encoder: PushEncoder) -> Callable[[int, Floats], Floats]:
    def pushed(clock: int, gradient: Floats) -> Floats:
        codec, payload = encoder.encode(clock, BlockValues(0, gradient.data.cast("B")))
        encoder.sealed(clock, 1.0, takes_part=True)
        out = np.empty(BLOCK, np.float32)
        decode_into(payload.data, codec, out.view(np.uint8), Codec.FP32)
        encoder.ended(clock)
        return out

    return pushed


def test_a_run_that_a_codec_makes_diverge_falls_back_and_converges() -> None:
    left = np.zeros(BLOCK, np.float32)

    def without_guard(clock: int, gradient: Floats) -> Floats:
        payload, out = np.empty(8 * 3, np.uint8), np.empty(BLOCK, np.float32)
        sparse.encode_random(gradient, left.copy(), left, payload, clock * 77_777)
        sparse.decode(payload, out)
        return out

    assert descended(without_guard) > 1e6
    for every in (1, 2, 3, 4, 8):  # clocks: a fragment of Outer, or a gradient that comes at times
        told: list[int] = []
        guarded = PushEncoder(table(), PushCodec.parsed("randomk:0.05"), 0, told.append)
        assert descended(through(guarded), every) < 1e-3
        assert told == [1]


@pytest.mark.parametrize("codec", ["sign", "topk:0.05", "int8", "lowrank:1"])
def test_a_run_that_converges_does_not_fall_back(codec: str) -> None:
    told: list[int] = []
    assert descended(through(PushEncoder(table(), PushCodec.parsed(codec), 0, told.append))) < 0.1
    assert not told


def test_one_gradient_far_longer_than_all_others_is_no_reason_to_fall_back() -> None:
    told: list[int] = []
    push = through(PushEncoder(table(), PushCodec.parsed("sign"), 0, told.append))
    small = np.linspace(-1, 1, BLOCK, dtype=np.float32)
    for clock in range(1, 100):
        push(clock, small * np.float32(1000 if clock == 40 else 1))
    assert not told


def test_what_is_left_of_a_block_that_falls_back_goes_in_small_steps() -> None:
    """And all of it in the end (RES-1)."""
    told: list[int] = []
    encoder = PushEncoder(table(), PushCodec.parsed("sign"), 0, told.append)
    push, outlier, dense = through(encoder), np.zeros(BLOCK, np.float32), []
    outlier[5] = 1.0
    total = np.zeros(BLOCK)
    for clock in range(1, 200):
        arrived = push(clock, outlier)
        total += arrived
        dense += [np.linalg.norm(arrived)] * len(told)
    assert max(dense) == pytest.approx(4.0, rel=0.03)
    assert len([length for length in dense if length > 3]) > 2
    assert total[5] == pytest.approx(199, abs=0.1)
    assert np.abs(encoder.state_dict()["residuals"].numpy()).max() < 0.1


def test_a_fall_back_goes_on_from_a_checkpoint() -> None:
    def encoder() -> PushEncoder:
        return PushEncoder(table(), PushCodec.parsed("sign"), 0)

    first, resumed, outlier = encoder(), encoder(), np.zeros(BLOCK, np.float32)
    outlier[5] = 1.0
    push = through(first)
    for clock in range(1, 100):
        push(clock, outlier)
    saved = first.state_dict()
    resumed.load_state_dict(saved)
    values = BlockValues(0, outlier.data.cast("B"))
    ours, theirs = resumed.encode(100, values), first.encode(100, values)
    assert ours.codec is theirs.codec is Codec.INT8
    assert np.array_equal(ours.payload, theirs.payload)
    saved["guard"] = saved["guard"][1:]
    with pytest.raises(InvalidCheckpoint, match="residual guard"):
        encoder().load_state_dict(saved)


@pytest.mark.parametrize("codec", ["int8", "lowrank:1", "sign"])
def test_gradients_that_grow_after_a_fall_back_are_not_withheld_for_good(codec: str) -> None:
    """Also where the run goes on in a codec that needs no guard."""
    first, outlier = PushEncoder(table(), PushCodec.parsed("sign"), 0), np.zeros(BLOCK, np.float32)
    outlier[5] = 1.0
    push = through(first)
    before = sum(push(clock, outlier)[5] for clock in range(1, 101))
    resumed = PushEncoder(table(), PushCodec.parsed(codec), 0)
    resumed.load_state_dict(first.state_dict())
    assert resumed.encode(101, BlockValues(0, outlier.data.cast("B"))).codec is Codec.INT8
    push = through(resumed)
    later = sum(push(clock, 64 * outlier)[5] for clock in range(101, 301))
    assert before + later == pytest.approx(100 + 64 * 200, abs=64)


def test_a_gradient_that_is_not_finite_does_not_spoil_what_is_left_of_a_dense_block() -> None:
    encoder = PushEncoder(table(), PushCodec.parsed("sign"), 0)
    push, outlier = through(encoder), np.zeros(BLOCK, np.float32)
    outlier[5] = 1.0
    for clock in range(1, 60):
        push(clock, outlier)
    assert encoder.encode(60, BlockValues(0, outlier.data.cast("B"))).codec is Codec.INT8
    outlier[6] = np.inf
    encoder.encode(60, BlockValues(0, outlier.data.cast("B")))
    encoder.sealed(60, 1.0, takes_part=True)
    assert np.isfinite(encoder.state_dict()["residuals"].numpy()).all()


def test_what_another_worker_has_left_is_added_in_its_own_unit() -> None:
    drawn = np.random.default_rng(3).normal(size=(2, COUNT)).astype(np.float32)
    own, others = drawn
    residuals, fresh = Residuals(table(), [0, 0, 0]), Residuals(table(), [0, 0, 0])
    residuals.load(own, 2.0, None)
    residuals.add(others, 4.0)
    assert np.allclose(residuals.flat(), own + 2.0 * others)
    residuals.add(others, 0.0)  # of a worker that had taken no step
    assert residuals.unit == 2.0
    fresh.add(others, 4.0)
    assert np.array_equal(fresh.flat(), others)
    assert fresh.unit == 4.0
    with pytest.raises(InvalidCheckpoint, match="expected 300"):
        residuals.add(others[1:], 4.0)
