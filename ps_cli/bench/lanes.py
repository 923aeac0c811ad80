"""The ways that a payload takes between a worker and a server on one host."""

from __future__ import annotations

from ps_core.errors import InvalidConfig

SHARED_MEMORY, GRPC = "shm", "grpc"
AUTO = "auto"
"""What a worker asks for that leaves the choice to the client."""

LANES: tuple[str, ...] = (SHARED_MEMORY, GRPC)
"""Each is measured, in this order."""


def chosen_lanes(lane: str) -> tuple[str, ...]:
    """The one that a person named, or all of them.

    Raises:
        InvalidConfig: there is none of that name.
    """
    if not lane:
        return LANES
    if lane not in LANES:
        raise InvalidConfig(f"lane is '{lane}'; expected {' or '.join(LANES)}")
    return (lane,)
