"""All that counts of gradients is applied or kept (RES-1), whatever servers say of a step.

A dumb twin adds up, in float64, the gradients that count and what servers take of the payloads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ps_core.change import TableChange
from ps_core.cluster_view import ClusterView
from ps_core.codecs.choices import PushCodec
from ps_core.codecs.int8_passes import Floats
from ps_core.consistency import Mode
from ps_core.errors import EditRefused, InvalidTensor
from ps_core.keys import TableId
from ps_core.tables.elements import Codec, unpack_presence
from ps_core.tables.table import Table
from ps_worker.compression.push_encoder import PushEncoder, decode_into
from ps_worker.spec.optimizers import SGD
from ps_worker.spec.settings import ASP, TableOptions, table_spec
from ps_worker.spec.values import BlockValues
from ps_worker.steps.setting_by_clock import SettingByClock, reduction_of
from ps_worker.steps.steps import PushBody, PushTicket, StepResult, TableSteps
from ps_worker.window.push_window import StepTerms

Doubles = npt.NDArray[np.float64]

BLOCK, COUNT = 64, 160
CODECS = ("int8", "sign", "topk:0.25", "randomk:0.25", "lowrank:1")
SCALES = (1.0, 1.0, 1.0, 0.5, 4.0)


def table() -> Table:
    """Three blocks; the first has tensor a and the beginning of b."""
    spec = table_spec("t", [("a", (40,)), ("b", (120,))], SGD(lr=1.0), {"block_elements": BLOCK})
    return Table(TableId(1), 0, spec)


def part(block: int) -> slice:
    return slice(block * BLOCK, min((block + 1) * BLOCK, COUNT))


@dataclass
class Sent:
    """A step, as the servers have it."""

    future: Future[StepResult]
    gradients: dict[int, Floats] = field(default_factory=dict)
    payloads: dict[int, Floats] = field(default_factory=dict)
    terms: StepTerms = field(default_factory=StepTerms)
    fails: bool = False


class Servers:
    """Takes steps, and ends each when it is told. A `StepSink`."""

    def __init__(self, codec: str, *, bsp_clocks: Collection[int] = ()) -> None:
        self.bsp_clocks = {*bsp_clocks}  # as the worker sees it
        self.table = table()
        push = PushCodec.parsed(codec)
        self.encoder = PushEncoder(self.table, push, 1, is_bsp=lambda c: c in self.bsp_clocks)
        self.steps = TableSteps(self.table, self, encoder=self.encoder)
        self.sent: dict[int, Sent] = {}
        self.counted: Doubles = np.zeros(COUNT)
        self.applied: Doubles = np.zeros(COUNT)

    def open_step(self, _table: Table, clock: int, future: Future[StepResult]) -> None:
        self.sent[clock] = Sent(future)

    def submit(self, _table: Table, clock: int, bodies: Sequence[PushBody]) -> None:
        for body in bodies:
            out = np.empty(part(body.block).stop - part(body.block).start, np.float32)
            assert body.codec is not None
            decode_into(body.payload, body.codec, out.view(np.uint8), Codec.FP32)
            out[self._absent(body.block, body.presence)] = 0
            self.sent[clock].payloads[body.block] = out

    def withdraw(self, _table: Table, clock: int, _but: Collection[int]) -> None:
        self.sent[clock].payloads.clear()

    def together(self, steps: Sequence[tuple[Table, int]]) -> None: ...

    def seal(self, _table: Table, clock: int, terms: StepTerms) -> None:
        self.sent[clock].terms = terms

    def _absent(self, block: int, presence: bytes) -> npt.NDArray[np.bool_]:
        mask = np.zeros(part(block).stop - part(block).start, np.bool_)
        segments = self.table.segments(block)
        here = unpack_presence(presence, len(segments)) if presence else [True] * len(segments)
        for segment, is_here in zip(segments, here, strict=True):
            mask[segment.begin : segment.end] = not is_here
        return mask

    # --- the worker

    def step(
        self,
        gradients: dict[int, Floats],
        scale: float = 1.0,
        clip: float | None = None,
        *,
        presence: bytes = b"",
        fails: bool = False,
    ) -> PushTicket:
        """Push these blocks, and seal the step; servers refuse one that `fails`.

        Args:
            presence: of the tensors of block 0.
        """
        step = self.steps.open_step()
        for block, gradient in gradients.items():
            bits = presence if block == 0 else b""
            step.push_blocks([BlockValues(block, gradient.data.cast("B"), bits)])
            there = gradient.copy()
            there[self._absent(block, bits)] = 0
            self.sent[step.clock].gradients[block] = there
        self.sent[step.clock].fails = fails
        return step.seal(contribution_scale=scale, clip_scale=clip)

    # --- the servers

    def end(
        self,
        clock: int,
        *,
        is_bsp: bool = False,
        rejected: Collection[int] = (),
        discarded: Collection[int] = (),
    ) -> None:
        """End a step, of which some blocks are not applied."""
        sent = self.sent.pop(clock)
        if sent.fails:
            sent.future.set_exception(EditRefused("another worker made an edit"))
            return
        clip = sent.terms.clip_scale
        scale = sent.terms.contribution_scale * (1.0 if is_bsp or clip is None else clip)
        for block, payload in sent.payloads.items():
            if block in rejected:
                continue
            self.counted[part(block)] += scale * sent.gradients[block].astype(np.float64)
            if block not in discarded:
                self.applied[part(block)] += scale * payload.astype(np.float64)
        squares = dict.fromkeys(range(3), 1.0) if is_bsp and clip is not None else {}
        lost = tuple(sorted({*discarded} & sent.payloads.keys()))
        refused = tuple(sorted({*rejected} & sent.payloads.keys()))
        sent.future.set_result(StepResult(clock, True, 0, refused, bool(lost), lost, squares))

    def kept(self) -> Doubles:
        self.steps.learn_ends()
        state = self.encoder.state_dict()
        found: Doubles = state["residuals"].numpy().astype(np.float64) * state["scale"]
        return found

    def check(self, largest: float) -> None:
        """RES-1, as float32 rounds numbers of that size; once all steps have ended."""
        if self.sent:
            return
        lacks = np.abs(self.counted - self.applied - self.kept()).max()
        assert lacks <= 1e-5 * largest


def gradients_of(draw: np.random.Generator, size: float) -> dict[int, Floats]:
    """Of some blocks."""
    blocks = sorted({*draw.integers(0, 3, 3).tolist()})
    lengths = {block: part(block).stop - part(block).start for block in blocks}
    return {
        block: (size * draw.standard_normal(length)).astype(np.float32)
        for block, length in lengths.items()
    }


# --- clipping


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("mode", ["bsp", "asp"])
@pytest.mark.parametrize("seed", range(4))
def test_a_clipped_gradient_is_kept_as_clipped(codec: str, mode: str, seed: int) -> None:
    """Under BSP servers clip the sum, and a worker keeps what it left of the whole gradient."""
    draw = np.random.default_rng(seed)
    servers = Servers(codec, bsp_clocks=range(50) if mode == "bsp" else ())
    for _ in range(20):
        size = 1000.0 if draw.integers(4) == 0 else 1.0
        clip = 1.0 / size if draw.integers(8) else None
        scale = float(draw.choice(SCALES))
        presence = b"\x01" if draw.integers(3) == 0 else b""
        servers.step(gradients_of(draw, size), scale, clip, presence=presence)
        if draw.integers(2):
            for clock in sorted(servers.sent):
                servers.end(clock, is_bsp=mode == "bsp")
            servers.check(1e5)


def test_a_spike_that_was_clipped_does_not_come_whole_with_the_next_step() -> None:
    """The finding: 16 of 64 elements of 100, where the norm was to be 1."""
    servers = Servers("topk:0.25")
    spike, calm = np.full(BLOCK, 100.0, np.float32), np.zeros(BLOCK, np.float32)
    for clock, (gradient, clip) in enumerate([(spike, 1 / 800), (calm, 1.0), (calm, 1.0)], 1):
        before = servers.applied.copy()
        servers.step({0: gradient}, clip=clip)
        servers.end(clock)
        assert np.linalg.norm(servers.applied - before) == pytest.approx(0.5, rel=1e-5)
    assert np.linalg.norm(servers.kept()) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(4))
def test_a_worker_that_did_not_know_the_setting_mends_its_books(codec: str, seed: int) -> None:
    """Its view is older than the change, in either direction; the step's end tells."""
    draw = np.random.default_rng(seed)
    servers = Servers(codec)
    for _ in range(20):
        seen, is_bsp = (bool(draw.integers(2)) for _ in range(2))
        servers.bsp_clocks = {servers.steps.clock + 1} if seen else set()
        servers.step(gradients_of(draw, 100.0), float(draw.choice(SCALES)), 0.01)
        if draw.integers(2):
            servers.step(gradients_of(draw, 1.0))
        servers.bsp_clocks = set()  # a newer view, or else the squares, say so
        for clock in sorted(servers.sent):
            servers.end(clock, is_bsp=is_bsp)
        servers.check(1e4)


# --- what is too stale


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(6))
def test_a_rejected_block_leaves_what_was_left_before(codec: str, seed: int) -> None:
    """Its gradient is computed anew. Some ends are known only after later steps were sealed."""
    draw = np.random.default_rng(seed)
    servers = Servers(codec)
    for _ in range(30):
        clip = 0.25 if draw.integers(4) == 0 else None
        presence = b"\x01" if draw.integers(3) == 0 else b""
        gradients = gradients_of(draw, 10.0 ** draw.integers(-1, 2))
        servers.step(gradients, float(draw.choice(SCALES)), clip, presence=presence)
        for clock in sorted(servers.sent):
            if draw.integers(3):
                servers.end(clock, rejected=np.flatnonzero(draw.integers(0, 2, 3)).tolist())
                servers.check(1e3)


@pytest.mark.parametrize("codec", CODECS)
def test_the_round_of_a_rejected_block_begins_where_its_step_did(codec: str) -> None:
    """All bits are as if the step had not been taken, where LOW_RANK goes on, too."""
    draw = np.random.default_rng(7)
    servers, twin = Servers(codec), Servers(codec)
    first, stale = (draw.standard_normal(BLOCK).astype(np.float32) for _ in range(2))
    for each in (servers, twin):
        each.step({0: first})
        each.end(1)
    servers.step({0: stale}, clip=0.5)
    servers.end(2, rejected=[0])
    assert np.array_equal(servers.kept(), twin.kept())
    found, expected = servers.encoder.state_dict(), twin.encoder.state_dict()
    assert np.array_equal(found.get("starts", ()), expected.get("starts", ()))


def test_what_is_discarded_while_a_step_is_open_comes_back_though_it_was_encoded() -> None:
    """A checkpoint asks for what is left in the middle of a step."""
    servers = Servers("topk:0.25")
    gradient = np.linspace(-1, 1, BLOCK, dtype=np.float32)
    servers.step({0: gradient})
    step = servers.steps.open_step()
    step.push_blocks([BlockValues(0, gradient.data.cast("B"))])
    servers.sent[2].gradients[0] = gradient
    servers.end(1, discarded=[0])
    servers.check(10.0)
    step.seal()
    servers.end(2)
    servers.check(10.0)


# --- steps that fail


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(6))
def test_a_step_that_fails_leaves_what_was_left_before(codec: str, seed: int) -> None:
    """A NaN in one block has all blocks skipped; an edit of another worker is as bad."""
    draw = np.random.default_rng(seed)
    servers = Servers(codec)
    for _ in range(30):
        gradients = gradients_of(draw, 10.0 ** draw.integers(-1, 2))
        fails = draw.integers(3) == 0
        if fails and draw.integers(2):
            gradients[min(gradients)][3] = np.nan
        servers.step(gradients, float(draw.choice(SCALES)), fails=fails)
        for clock in sorted(servers.sent):
            if draw.integers(3):
                servers.end(clock)
                servers.check(1e3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_of_an_eager_step_that_fails_only_what_was_refused_is_as_before(bad: float) -> None:
    """Servers have applied the other blocks on arrival."""
    servers, gradient = Servers("int8"), np.linspace(-1, 1, BLOCK, dtype=np.float32)
    servers.step({0: gradient, 1: gradient})
    servers.end(1)
    before = servers.kept()
    wrong = gradient.copy()
    wrong[40] = bad
    step = servers.steps.open_step()
    for block, pushed in enumerate((gradient, wrong)):
        step.push_blocks([BlockValues(block, pushed.data.cast("B"))], eager=())
    step.seal()
    arrived = servers.sent[2].payloads[0]
    servers.sent.pop(2).future.set_exception(InvalidTensor("non-finite gradient"))
    kept = servers.kept()
    assert np.array_equal(kept[part(1)], before[part(1)])
    assert np.allclose(kept[part(0)], before[part(0)] + gradient - arrived, atol=1e-6)
    assert not np.array_equal(kept[part(0)], before[part(0)])


# --- resumed runs


@pytest.mark.parametrize(("before", "now", "factor"), [(4, 2, 0.5), (2, 3, 1.5), (3, 3, 1.0)])
def test_what_was_owed_as_part_of_a_mean_is_the_same_amount_of_another(
    before: int, now: int, factor: float
) -> None:
    """Of this worker's own, and of another's; in no mean it is a part of the sum, as it is."""
    gradient = np.linspace(-1, 1, BLOCK, dtype=np.float32)

    def encoder(count: int) -> PushEncoder:
        return PushEncoder(table(), PushCodec.parsed("topk:0.1"), 0, mean_of=lambda: count)

    old = encoder(before)
    old.encode(1, BlockValues(0, gradient.data.cast("B")))
    old.sealed(1, 0.5, takes_part=True)
    saved = old.state_dict()
    left = saved["residuals"].numpy()
    assert left.any()
    for count, expected in ((now, factor), (0, 1.0)):
        new = encoder(count)
        new.load_state_dict(saved)
        assert np.allclose(new.state_dict()["residuals"].numpy(), expected * left)
        new.take_over(saved)
        assert np.allclose(new.state_dict()["residuals"].numpy(), 2 * expected * left)
    del saved["mean_of"]  # of an older checkpoint
    older = encoder(now)
    older.load_state_dict(saved)
    assert np.array_equal(older.state_dict()["residuals"].numpy(), left)


def test_what_is_owed_is_part_of_the_mean_that_the_last_step_was_in() -> None:
    """Workers leave one after another, and a checkpoint has what each left."""
    present = 3

    def encoder() -> PushEncoder:
        return PushEncoder(table(), PushCodec.parsed("topk:0.1"), 0, mean_of=lambda: present)

    leaves, resumed, again = encoder(), encoder(), encoder()
    leaves.encode(1, BlockValues(0, np.linspace(-1, 1, BLOCK, dtype=np.float32).data.cast("B")))
    leaves.sealed(1, 1.0, takes_part=True)
    present = 1
    leaves.sealed(2, 1.0, takes_part=False)  # the last one
    saved = leaves.state_dict()
    present = 3
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.state_dict()["residuals"], saved["residuals"])
    present = 1
    unchanged = resumed.state_dict()
    present = 3
    again.load_state_dict(unchanged)
    assert torch.equal(again.state_dict()["residuals"], saved["residuals"])


def test_an_update_is_a_mean_of_workers_under_bsp_alone() -> None:
    """Without those that it may lack; of a sum it is none."""
    view = ClusterView(1, "c", 5, 1, (), (), ())
    for setting, reduction, expected in (
        ("bsp", "mean", 5),
        ("bsp:backup=2", "mean", 3),
        ("bsp", "sum", 0),
        ("ssp:1", "mean", 0),
        ("asp", "mean", 0),
    ):
        options: TableOptions = {"consistency": setting, "reduction": reduction}
        spec = table_spec("t", 8, SGD(lr=1.0), options)
        seen = replace(view, tables=(Table(TableId(1), 0, spec),))
        is_bsp, mean_of = reduction_of(seen.tables[0], lambda: seen)  # noqa: B023 - called here
        assert mean_of() == expected
        assert is_bsp(3) == setting.startswith("bsp")


def test_a_step_that_is_far_behind_has_the_first_setting_that_is_known() -> None:
    """Clocks may be skipped while it is on its way."""
    settings, seen = SettingByClock(), table()
    assert settings.at(seen, 1).mode is Mode.BSP
    seen = replace(seen, change=TableChange(1, 20, ASP()))
    assert [settings.at(seen, clock).mode for clock in (101, 5, 21)] == [Mode.ASP] * 3
    assert SettingByClock().at(seen, 20).mode is Mode.BSP
