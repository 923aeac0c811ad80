"""Arrays and tensors as the raw bytes of a table, and back.

Rules:
    - A value's dtype must be the table's: nothing is converted behind the caller's back.
    - Raw bytes are C-contiguous little-endian; numpy lacks bfloat16, so there torch carries it.
    - torch is imported only where a torch tensor is in play.

What it deliberately does not do: know blocks (`ps_worker.spec.cutting` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ps_core.errors import InvalidTensor
from ps_core.tables import NATIVE_CODEC, DType

if TYPE_CHECKING:
    import torch

    Values: TypeAlias = npt.NDArray[Any] | torch.Tensor | Sequence[Any] | float
    Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
else:
    Values = Any
    Array = Any

Raw: TypeAlias = npt.NDArray[np.uint8]
"""A flat view of bytes."""

_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT16: np.dtype("<f2"),
    DType.FLOAT64: np.dtype("<f8"),
}


def element_bytes(dtype: DType) -> int:
    """Bytes of one element."""
    return NATIVE_CODEC[dtype].element_bytes


def is_tensor(values: object) -> bool:
    """Whether `values` is a torch tensor; does not import torch to find out."""
    return any(
        kind.__name__ == "Tensor" and kind.__module__.partition(".")[0] == "torch"
        for kind in type(values).__mro__
    )


def shape_of(values: Values) -> tuple[int, ...]:
    """The shape of an array, a tensor, a sequence or a number."""
    found = getattr(values, "shape", None)
    return np.shape(values) if found is None else tuple(found)


def raw_of(values: Values, dtype: DType, what: str) -> Raw:
    """The bytes of `values`, as a view where they lie C-contiguous in host memory, else as a copy.

    Plain numbers and sequences of them, which have no dtype of their own, are converted.

    Raises:
        InvalidTensor: its dtype is not `dtype`; `what` names it in the message.
    """
    if not isinstance(values, np.ndarray | np.generic):
        if is_tensor(values):
            return _raw_of_tensor(values, dtype, what)
        if dtype is DType.BFLOAT16:
            raise InvalidTensor(
                f"{what} is a {type(values).__name__}; expected a torch.bfloat16 tensor"
            )
        values = np.asarray(values, dtype=_NUMPY[dtype])
    expected = _NUMPY.get(dtype)
    if expected is None or values.dtype != expected:
        hint = " (a torch tensor: numpy has no bfloat16)" if expected is None else ""
        raise InvalidTensor(f"{what} has dtype {values.dtype}; expected {dtype.value}{hint}")
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _raw_of_tensor(values: Any, dtype: DType, what: str) -> Raw:
    import torch

    expected = getattr(torch, dtype.value)
    if values.dtype != expected:
        raise InvalidTensor(f"{what} has dtype {values.dtype}; expected {expected}")
    if values.layout is not torch.strided:
        raise InvalidTensor(f"{what} has layout {values.layout}; expected a dense tensor")
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    raw: Raw = flat.view(torch.uint8).numpy()
    return raw


def writable_raw_of(out: Array, dtype: DType, what: str) -> Raw:
    """The bytes of the caller's own array, to be written into.

    Raises:
        InvalidTensor: another dtype, or memory that is not C-contiguous, on the host and writable.
    """
    if not isinstance(out, np.ndarray):
        if not is_tensor(out):
            kind = type(out).__name__
            raise InvalidTensor(f"{what} is a {kind}; expected a numpy array or a tensor")
        if out.device.type != "cpu" or not out.is_contiguous():
            raise InvalidTensor(
                f"{what} is on {out.device}, contiguous: {out.is_contiguous()}; expected a "
                "contiguous tensor on the CPU"
            )
        return _raw_of_tensor(out, dtype, what)
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise InvalidTensor(f"{what} is not C-contiguous and writable")
    return raw_of(out, dtype, what)


def empty(shape: tuple[int, ...], dtype: DType) -> Array:
    """An uninitialised numpy array; a torch tensor for bfloat16."""
    if dtype is DType.BFLOAT16:
        import torch

        return torch.empty(shape, dtype=torch.bfloat16)
    return np.empty(shape, dtype=_NUMPY[dtype])
