"""gRPC channels and event loops, tuned once for every role.

A stream of 1 MiB messages on one machine runs at 1.0-1.4 GB/s with gRPC's default frame,
write-buffer and look-ahead sizes, and at 1.8-2.2 GB/s with these.
"""

from __future__ import annotations

import asyncio
import ctypes
import encodings.idna  # noqa: F401 - the first look-up of a host would import it on the event loop
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc.aio

from ps_core import limits

ResultT = TypeVar("ResultT")

ChannelOptions = tuple[tuple[str, int], ...]

_MIB = 1024 * 1024
KEEPALIVE_TIME_S = 10.0
"""A silent connection is pinged after this time."""

_KEEPALIVE_TIME_MS = int(KEEPALIVE_TIME_S * 1000)
_KEEPALIVE_TIMEOUT_MS = 5_000

_TRANSPORT_OPTIONS: ChannelOptions = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    # The largest message fits one frame; the default of 16 KiB cuts it into 256.
    ("grpc.http2.max_frame_size", 4 * _MIB),
    ("grpc.http2.write_buffer_size", 8 * _MIB),
    ("grpc.http2.lookahead_bytes", 64 * _MIB),
    # A peer that is paused or cut off is noticed within the sum of these two.
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: ChannelOptions = (
    *_TRANSPORT_OPTIONS,
    # Nodes reach each other directly; a proxy of the environment is for other traffic.
    ("grpc.enable_http_proxy", 0),
    # A returning node is found within a second, and not after gRPC's default two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A node that comes back at another IP address, under its name, is found as soon.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Two clients in one process do not share a connection, as two processes would not.
    ("grpc.use_local_subchannel_pool", 1),
)
"""The options of every channel between nodes."""

_SCHEDULER_OPTIONS: ChannelOptions = (
    *(each for each in CHANNEL_OPTIONS if each[0] != "grpc.max_reconnect_backoff_ms"),
    ("grpc.max_reconnect_backoff_ms", int(limits.SCHEDULER_RECONNECT_S * 1000)),
)
"""The options of every channel to a scheduler. A restarted scheduler judges nodes after a lease, so
nodes try to reconnect more often than that."""

SERVER_OPTIONS: ChannelOptions = (
    *_TRANSPORT_OPTIONS,
    # Of two nodes with the same port, the second fails instead of taking half of the calls.
    ("grpc.so_reuseport", 0),
    # Half of what our own clients send, so that their keepalive never counts as abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)
"""The options of every gRPC server of pushpull."""


def aio_channel(address: str) -> grpc.aio.Channel:
    """A channel to "host:port", which connects at its first call. The caller closes it."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def scheduler_channel(address: str) -> grpc.aio.Channel:
    """As `aio_channel`, to a scheduler: it reconnects within `SCHEDULER_RECONNECT_S`."""
    return grpc.aio.insecure_channel(address, options=_SCHEDULER_OPTIONS)


def tune_allocator() -> bool:
    """Keep freed memory in the process: this doubles the throughput of the data path. False where
    the allocator is not glibc's, which by default maps every 1 MiB payload anew: an mmap, 256 page
    faults and an munmap each.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    # glibc refuses an mmap threshold above half of an arena's heap, which differs by version.
    took = any(mallopt(mmap_threshold, size) == 1 for size in (1024 * _MIB, 32 * _MIB))
    return took and mallopt(trim_threshold, 1024 * _MIB) == 1 and mallopt(top_pad, 64 * _MIB) == 1


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop's if it is installed, else of asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `main` to its end on a new event loop, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
