"""Conversions between FP32 and BF16: the compiled loops give torch's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_core.tables.elements import Codec
from ps_worker.compression import bf16_loops, torch_casts

ANY_BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300)


def of_torch(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy()).bfloat16()


@given(ANY_BITS)
def test_any_number_is_rounded_as_torch_rounds_it(bits: list[int]) -> None:
    """NaN stays one, whatever its bits."""
    expected = of_torch(bits)
    made = np.zeros(len(bits), np.uint16)
    bf16_loops.narrow(np.array(bits, np.uint32), made)
    found = torch.from_numpy(made.view(np.int16)).view(torch.bfloat16)
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    number, other = found[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16)
    assert torch.equal(number, other)


def test_what_lies_between_two_goes_to_the_even_one() -> None:
    """1 + 2^-8 lies between 1 and 1 + 2^-7, and the next such number between that and the next."""
    made = np.zeros(3, np.uint16)
    between = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], np.float32)
    bf16_loops.narrow(between.view(np.uint32), made)
    assert made.tolist() == [0x3F80, 0x3F82, 0xBF80]


def test_every_bf16_is_itself_as_fp32() -> None:
    all_bits = np.arange(2**16, dtype=np.uint16)
    made = np.zeros(2**16, np.uint32)
    bf16_loops.widen(all_bits, made)
    assert np.array_equal(made, all_bits.astype(np.uint32) << 16)


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize(("codec", "to"), [(Codec.FP32, Codec.BF16), (Codec.BF16, Codec.FP32)])
def test_payloads_may_lie_anywhere(codec: Codec, to: Codec, offset: int) -> None:
    values = np.linspace(-3, 3, 501, dtype=np.float32)
    as_bf16 = torch.from_numpy(values).bfloat16()
    payloads = {
        Codec.BF16: as_bf16.view(torch.int16).numpy().tobytes(),
        Codec.FP32: (values if to is Codec.BF16 else as_bf16.float().numpy()).tobytes(),
    }
    source = bytearray(offset) + payloads[codec]
    out = np.zeros(len(payloads[to]), np.uint8)
    torch_casts.convert(memoryview(source)[offset:].toreadonly(), codec, out, to)
    assert out.tobytes() == payloads[to]
