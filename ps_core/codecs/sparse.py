"""SPARSE payloads: some of the elements, and their places.

    payload = elements (float32) | places (uint32, ascending, each below the block's length)
    an element whose place is not there is zero

Rules:
    - `encode_largest` takes the largest elements; of equal ones, the first. `encode_random` takes
      one of each of so many parts of about the same length, drawn by a hash of a key; in its place
      an element of the part that is not finite.
    - What is not taken is given back to the caller, to be added to the next gradient.
    - An element that is not finite is larger than all others, and leaves what was left before.

Invariants:
    SP-1  decoded(payload) + what is left = the gradient + what was left before, bit for bit, where
          that is finite.
"""

from __future__ import annotations

import numpy as np

from ps_core.codecs import sparse_passes
from ps_core.codecs.int8 import Bytes
from ps_core.codecs.int8_passes import Floats, draws
from ps_core.codecs.kernels import Kernels
from ps_core.codecs.sparse_passes import Places
from ps_core.errors import InvalidTensor
from ps_core.tables.elements import SPARSE_ELEMENT_BYTES

_MORE = 1.5
"""Elements that a threshold should let pass, over those that are wanted: samples are uneven."""

KERNELS = Kernels(sparse_passes, "ps_core.codecs.sparse_loops")
"""Those of this process."""


def parts(payload: Bytes) -> tuple[Floats, Places]:
    """A payload's elements and places, as views."""
    half = payload.nbytes // 2
    return payload[:half].view(np.float32), payload[half:].view(np.uint32)


def encode_largest(gradient: Floats, before: Floats, left: Floats, payload: Bytes) -> None:
    """Encode the largest elements of a gradient plus what earlier ones have left (SP-1).

    Shapes:
        gradient, before, left: (n,); `before` was left by earlier ones, `left` is written.
        payload: (8 * k,), aligned to 4 bytes, of k elements, 1 <= k <= n; written.
    """
    kernels = KERNELS.used()
    values, sent = parts(payload)
    for bits in (threshold(gradient, before, len(sent)), 1, 0):
        places = kernels.add(gradient, before, left, np.int32(bits))
        if len(places) >= len(sent):
            break
    kernels.take_largest(left, places, values, sent)
    _give_back(before, left, values, sent)


def encode_random(gradient: Floats, before: Floats, left: Floats, payload: Bytes, key: int) -> None:
    """Encode elements at random places, as `encode_largest`.

    Args:
        key: of the draws; 0 to 2**32 - 1.
    """
    count = payload.nbytes // SPARSE_ELEMENT_BYTES
    bounds = np.arange(count + 1) * len(gradient) // count
    share = draws(count, np.uint32(key)) * np.float32(1 / 65536)
    places = (bounds[:-1] + share.astype(np.float64) * np.diff(bounds)).astype(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(gradient, before, out=left)
    if not np.isfinite(left).all():
        broken = np.flatnonzero(~np.isfinite(left))
        places[np.searchsorted(bounds, broken, side="right") - 1] = broken
    values, sent = parts(payload)
    sent[:] = places
    values[:] = left[places]
    left[places] = 0
    _give_back(before, left, values, sent)


def decode(payload: Bytes, out: Floats) -> None:
    """Write the elements of a payload. Shapes: as of `encode_largest`; payload may change at any
    time, as shared memory does.

    Raises:
        InvalidTensor: places are not ascending, or one is beyond the end.
    """
    values, found = parts(payload)
    places = found.copy()
    if not (places[-1] < len(out) and (places[1:] > places[:-1]).all()):
        raise InvalidTensor(f"places of elements that are not ascending, or not below {len(out)}")
    out.fill(0)
    out[places] = values


def threshold(gradient: Floats, before: Floats, count: int) -> int:
    """The bits of an absolute value that somewhat more than `count` elements should reach."""
    length = len(gradient)
    magnitudes = KERNELS.used().sample(gradient, before)
    rank = len(magnitudes) - round(len(magnitudes) * count * _MORE / length) - 1
    return max(1, int(np.partition(magnitudes, rank)[rank])) if rank > 0 else 1


def _give_back(before: Floats, left: Floats, values: Floats, sent: Places) -> None:
    """Leave what was left before, where an element is not finite."""
    if not np.isfinite(values).all():
        broken = ~np.isfinite(left)
        broken[sent[~np.isfinite(values)]] = True
        left[broken] = before[broken]
