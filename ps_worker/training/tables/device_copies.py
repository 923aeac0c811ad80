"""Copies between devices and host memory, each way on a stream of its own, so that they run beside
the device's computation.

A device has streams if torch's module for its type has (`torch.cuda`, for ROCm too, and
`torch.xpu`). Copies to and from others (`torch.mps`) block.

Rules:
    - To the host: later work of the current stream does not wait, and may change the source during
      the copy; `staging` compares afterwards.
    - To a device: later work of the current stream waits, and so finds the new values.
    - The copy owns the host's memory until its arrival. If that is not pinned, the copy blocks.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Moves: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors to copy, by (target, source), each pair of one shape."""


class Arrival(Protocol):
    """The end of copies in flight; a `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """True once they have ended. Never blocks."""

    def synchronize(self) -> None:
        """Wait until they have ended."""


_PINNED: dict[int, int] = {}
"""The bytes pinned in place, by address."""


def has_streams(device: torch.device) -> bool:
    return _runtime(device.type) is not None


@cache
def _runtime(device_type: str) -> Any:
    """Torch's module for devices of a type; None if they have no streams."""
    module = None if device_type in ("cpu", "meta") else getattr(torch, device_type, None)
    return module if hasattr(module, "Stream") and hasattr(module, "Event") else None


def can_pin(device: torch.device) -> bool:
    """True if torch pins host memory for copies to and from this device."""
    return device.type in ("cuda", "xpu")


@cache
def stream_to_host(device: torch.device) -> Any:
    return _runtime(device.type).Stream(device)


@cache
def stream_from_host(device: torch.device) -> Any:
    return _runtime(device.type).Stream(device)


def current_streams(device: torch.device, known: list[Any]) -> list[Any]:
    """The streams in `known`, and the device's current one. One after the other of a backward pass
    makes its gradients on the same, as a rule.
    """
    runtime = _runtime(device.type)
    stream = None if runtime is None else runtime.current_stream(device)
    return known if stream is None or stream in known else [*known, stream]


def follow(streams: Iterable[Any]) -> None:
    """Have the current streams wait for the present work of these, each of its device."""
    for stream in streams:
        current = _runtime(stream.device.type).current_stream(stream.device)
        if current != stream:
            current.wait_stream(stream)


def to_host(moves: Moves) -> Arrival | None:
    """Copy tensors of one device into host memory. Targets have their sources' dtypes, and are
    pinned if they can be; the caller keeps the sources until the copies have ended. Returns their
    arrival; None: they are complete, as from a device without streams.
    """
    device = moves[0][1].device
    runtime = _runtime(device.type)
    if runtime is None:
        for target, source in moves:
            target.copy_(source)
        return None
    stream = stream_to_host(device)
    stream.wait_stream(runtime.current_stream(device))
    with runtime.stream(stream):
        _copy_late(moves)
        return _recorded(stream, device)


def _copy_late(moves: Moves) -> None:
    """Queue copies on the current stream: in one call, because a call from Python may have to wait
    for the interpreter.
    """
    targets, sources = map(list, zip(*moves, strict=True))
    torch._foreach_copy_(targets, sources, non_blocking=True)


def from_host(moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Arrival]:
    """Copy host memory into tensors on any devices, by (target, source) pairs; sources are pinned
    if they can be. Returns the arrivals after which the sources may be
    written again; empty: at once.
    """
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in moves:
        if has_streams(target.device):
            by_device.setdefault(target.device, []).append((target, source))
        else:
            target.copy_(source)
    return [_to_device(device, found) for device, found in by_device.items()]


def _to_device(device: torch.device, moves: list[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
    runtime, stream = _runtime(device.type), stream_from_host(device)
    current = runtime.current_stream(device)
    stream.wait_stream(current)  # its work may still read the old values
    with runtime.stream(stream):
        _copy_late(moves)
        arrival = _recorded(stream, device)
    # So targets need no `record_stream`: the next user of their memory waits too.
    current.wait_event(arrival)
    return arrival


def zero_pages(byte_count: int) -> npt.NDArray[np.uint8]:
    """Zeros on pages of their own, as memory that is pinned in place needs."""
    return np.frombuffer(mmap.mmap(-1, max(byte_count, 1)), np.uint8, byte_count)


def pin_in_place(array: npt.NDArray[np.uint8], device: torch.device) -> bool:
    """Pin memory that was not allocated pinned, for copies to and from `device`, until the array is
    dropped. False: the driver refuses, or it is none of CUDA.
    """
    if device.type != "cuda":
        return False
    driver = torch.cuda.cudart()
    address = array.ctypes.data
    with torch.cuda.device(device):
        if int(driver.cudaHostRegister(address, array.nbytes, 0)) != 0:
            with contextlib.suppress(RuntimeError):  # the next launch reports the refusal
                torch.zeros(1, device=device)
            return False
    _PINNED[address] = array.nbytes
    weakref.finalize(array, _unpin, address, device)
    return True


def pinned_bytes() -> int:
    """The memory that `pin_in_place` has pinned."""
    return sum(_PINNED.values())


def _unpin(address: int, device: torch.device) -> None:
    del _PINNED[address]
    stream_to_host(device).synchronize()  # copies that nobody waits for any more
    stream_from_host(device).synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def _recorded(stream: Any, device: torch.device) -> Arrival:
    """The end of all present work of `stream`."""
    # Of CUDA, waits sleep: a spin would take the transfer's core.
    options = {"blocking": True} if device.type == "cuda" else {}
    event: Any = _runtime(device.type).Event(**options)
    event.record(stream)
    found: Arrival = event
    return found
