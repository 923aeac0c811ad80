"""INT8 payloads: whole numbers of 8 bits, and a scale for each 256 elements.

    payload = scales (float32, one for each group of 256) | numbers (int8, one an element)
    element = number * scale of its group, in float32

Rules:
    - The largest element of a group is 127 times its scale, or a little more: no product overflows.
    - A gradient's elements are rounded up or down with draws that are a function of a key and the
      element's place, so that the mean is right. Values are rounded to the nearest.
    - What is rounded off is given back to the caller, to be added to the next gradient.
    - A group with an element that is not finite decodes to NaN; a group without an element above
      1e-30 decodes to zeros.

Invariants:
    Q8-1  decoded(payload) + what is left = the gradient + what was left before, as float32 rounds;
          of groups that are finite.

Compiled loops are ten times as fast as passes of numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_core.codecs import int8_passes
from ps_core.codecs.int8_passes import Floats
from ps_core.codecs.kernels import Kernels
from ps_core.tables.elements import SCALED_GROUP_COUNT

Bytes = npt.NDArray[np.uint8]


KERNELS = Kernels(int8_passes, "ps_core.codecs.int8_loops")
"""Those of this process."""


def parts(payload: Bytes) -> tuple[Floats, npt.NDArray[np.int8]]:
    """A payload's scales and numbers, as views."""
    count = element_count(payload.nbytes)
    return payload[: payload.nbytes - count].view(np.float32), payload[-count:].view(np.int8)


def element_count(payload_bytes: int) -> int:
    """The elements of a payload of so many bytes."""
    group_bytes = SCALED_GROUP_COUNT + 4
    whole_count, rest = divmod(payload_bytes, group_bytes)
    return whole_count * SCALED_GROUP_COUNT + max(0, rest - 4)


def encode_gradient(
    gradient: Floats, before: Floats, left: Floats, payload: Bytes, key: int
) -> None:
    """Encode a gradient plus what earlier ones have left, rounded at random (Q8-1).

    Args:
        key: of the draws; 0 to 2**32 - 1.

    Shapes:
        gradient, before, left: (n,); `before` was left by earlier ones, `left` is written.
        payload: (Codec.INT8.payload_bytes(n),), aligned to 4 bytes; written.
    """
    scales, numbers = parts(payload)
    KERNELS.used().encode(gradient, before, left, scales, numbers, np.uint32(key))


def encode_values(values: Floats, payload: Bytes) -> None:
    """Encode values, rounded to the nearest. Shapes: as of `encode_gradient`."""
    scales, numbers = parts(payload)
    KERNELS.used().round_to_nearest(values, scales, numbers)


def decode(payload: Bytes, out: Floats) -> None:
    """Write the elements of a payload. Shapes: as of `encode_gradient`."""
    scales, numbers = parts(payload)
    KERNELS.used().decode(scales, numbers, out)
