"""Copies between CUDA devices and host memory, each way on a stream of its own, so that they run
beside the device's computation.

Rules:
    - To the host: later work of the current stream does not wait, and may change the source during
      the copy; `staging` compares afterwards.
    - To a device: later work of the current stream waits, and so finds the new values.
    - The copy owns the host's memory until its arrival. If that is not pinned, the copy blocks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Arrival(Protocol):
    """The end of copies in flight; a `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """True once they have ended. Never blocks."""

    def synchronize(self) -> None:
        """Wait until they have ended."""


@cache
def stream_to_host(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def stream_from_host(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def to_host(source: torch.Tensor, target: torch.Tensor) -> Arrival | None:
    """Copy a tensor into host memory: `target` has its shape and dtype, and is pinned if `source`
    is on a CUDA device. Returns the copy's arrival; None: it is complete, as from any other device.
    """
    if source.device.type != "cuda":
        target.copy_(source)
        return None
    stream = stream_to_host(source.device)
    stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        arrival = _recorded(stream)
    # Its owner may drop it during the copy; the allocator must not give its memory away until then.
    source.record_stream(stream)
    return arrival


def from_host(moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Arrival]:
    """Copy host memory into tensors on any devices, by (target, source) pairs; sources are pinned
    if their targets are on CUDA devices. Returns the arrivals after which the sources may be
    written again; empty: at once.
    """
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for target, source in moves:
        if target.device.type == "cuda":
            by_device.setdefault(target.device, []).append((target, source))
        else:
            target.copy_(source)
    return [_to_device(device, found) for device, found in by_device.items()]


def _to_device(device: torch.device, moves: list[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
    stream, current = stream_from_host(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)  # its work may still read the old values
    with torch.cuda.stream(stream):
        for target, source in moves:
            target.copy_(source, non_blocking=True)
        arrival = _recorded(stream)
    # So targets need no `record_stream`: the next user of their memory waits too.
    current.wait_event(arrival)
    return arrival


def pin_in_place(array: npt.NDArray[np.uint8], device: torch.device) -> bool:
    """Pin memory that was not allocated pinned, for copies to and from `device`, until the array is
    dropped. False: the driver refuses.
    """
    driver = torch.cuda.cudart()
    address = array.ctypes.data
    with torch.cuda.device(device):
        if int(driver.cudaHostRegister(address, array.nbytes, 0)) != 0:
            with contextlib.suppress(RuntimeError):  # the next launch reports the refusal
                torch.zeros(1, device=device)
            return False
    weakref.finalize(array, _unpin, address, device)
    return True


def _unpin(address: int, device: torch.device) -> None:
    stream_to_host(device).synchronize()  # copies that nobody waits for any more
    stream_from_host(device).synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The end of all present work of `stream`."""
    event = torch.cuda.Event(blocking=True)  # waits sleep; a spin would take the transfer's core
    event.record(stream)
    return event
