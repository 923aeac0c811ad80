"""The lanes of payloads between a worker and a server on one host."""

from __future__ import annotations

from ps_core.errors import InvalidConfig

SHARED_MEMORY, GRPC = "shm", "grpc"
AUTO = "auto"
"""A worker's setting that leaves the choice to the client."""

LANES: tuple[str, ...] = (SHARED_MEMORY, GRPC)
"""In the order of measuring."""


def chosen_lanes(lane: str) -> tuple[str, ...]:
    """The lane of that name; empty: all."""
    if not lane:
        return LANES
    if lane not in LANES:
        raise InvalidConfig(f"lane is '{lane}'; expected {' or '.join(LANES)}")
    return (lane,)
