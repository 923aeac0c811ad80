"""The work of `sparse`, as passes of numpy, for where numba is not installed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_core.codecs.int8_passes import Floats

NOT_SIGN = np.int32(0x7FFFFFFF)
"""The bits of a float32 that order absolute values; those of NaN are above infinity's."""

RUN, STRIDE = 16, 1024
"""A sample is the first RUN elements of each STRIDE."""

Places = npt.NDArray[np.uint32]
Magnitudes = npt.NDArray[np.int32]
"""Absolute values of float32, by their bits."""


def sample(gradient: Floats, before: Floats) -> Magnitudes:
    """The magnitudes of a sample of the sums."""
    whole = len(gradient) - len(gradient) % STRIDE
    own, old = (each[:whole].reshape(-1, STRIDE)[:, :RUN] for each in (gradient, before))
    with np.errstate(over="ignore", invalid="ignore"):
        return (own + old).view(np.int32).reshape(-1) & NOT_SIGN


def add(gradient: Floats, before: Floats, left: Floats, threshold: np.int32) -> Places:
    """Write the sums to `left`; returns the places of those whose magnitude is `threshold` or
    above, ascending. Shapes: (n,).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(gradient, before, out=left)
    return np.flatnonzero(left.view(np.int32) & NOT_SIGN >= threshold).astype(np.uint32)


def take_largest(left: Floats, places: Places, values: Floats, sent: Places) -> None:
    """Move the largest elements among those at `places`, the first of equal ones, to `values`, and
    their places to `sent`, ascending. Shapes: (n,), (m,), (k,), (k,), k <= m.
    """
    magnitudes: Magnitudes = left[places].view(np.int32) & NOT_SIGN
    at = len(places) - len(sent)
    least = np.partition(magnitudes, at)[at]
    is_taken = magnitudes > least
    equal = np.flatnonzero(magnitudes == least)
    is_taken[equal[: len(sent) - np.count_nonzero(is_taken)]] = True
    sent[:] = places[is_taken]
    values[:] = left[sent]
    left[sent] = 0
