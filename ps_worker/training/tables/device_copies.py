"""Copies between CUDA devices and host memory, each way on a stream of its own.

On the stream that a device computes on, a copy would hold up what comes behind it; beside it, both
go on at once.

Rules:
    - A copy begins when its device has done all that the current stream had been given before.
    - To the host: what the current stream is given later does not wait, and may change the source
      under the copy. Whoever cares compares afterwards.
    - To a device: what the current stream is given later waits, and so finds the new values.
    - The host's end belongs to the copy until its arrival.

Only pinned memory lets a copy run by itself; with other memory the call waits, and all else holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Protocol

import torch


class Arrival(Protocol):
    """The end of copies that are on their way; a `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether they have ended. Never blocks."""

    def synchronize(self) -> None:
        """Wait until they have ended."""


@cache
def stream_to_host(device: torch.device) -> torch.cuda.Stream:
    """The stream of the copies from a device; the same one for all that asks."""
    return torch.cuda.Stream(device)


@cache
def stream_from_host(device: torch.device) -> torch.cuda.Stream:
    """The stream of the copies to a device; the same one for all that asks."""
    return torch.cuda.Stream(device)


def to_host(source: torch.Tensor, target: torch.Tensor) -> Arrival | None:
    """Copy a tensor into host memory.

    Args:
        source: where from, on any device.
        target: where to, of the same shape and dtype; pinned if the source is on a CUDA device.

    Returns:
        When it will be there; None: it is.

    Blocking: from a CUDA device no; else until it is copied.
    """
    if source.device.type != "cuda":
        target.copy_(source)
        return None
    stream = stream_to_host(source.device)
    stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        arrival = _recorded(stream)
    # Its owner may drop it before the copy has ended; nobody must get its memory until then.
    source.record_stream(stream)
    return arrival


def from_host(moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Arrival]:
    """Copy host memory into tensors on any devices.

    Args:
        moves: (target, source) pairs; sources are pinned if their targets are on CUDA devices.

    Returns:
        When the sources may be written to again; empty: they may.

    Blocking: to CUDA devices no; else until it is copied.
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
    stream.wait_stream(current)  # on it the old values may still be read
    with torch.cuda.stream(stream):
        for target, source in moves:
            target.copy_(source, non_blocking=True)
        arrival = _recorded(stream)
    # Also what lets the targets go without `record_stream`: their memory's next user waits too.
    current.wait_event(arrival)
    return arrival


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The moment when all that `stream` has been given by now is done.

    Whoever waits for it sleeps: by default it would spin, on a core that the transfer needs.
    """
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
