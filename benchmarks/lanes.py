"""The ways that a payload takes between a worker and a server on one host."""

from __future__ import annotations

from typing import cast

import ps_worker as ps
from ps_core.errors import InvalidConfig
from ps_worker.client import ConnectOptions

SHARED_MEMORY, GRPC = "shm", "grpc"
AUTO = "auto"
"""What a worker asks for that leaves the choice to the client."""

LANES: tuple[str, ...] = (
    (SHARED_MEMORY, GRPC) if "lane" in ConnectOptions.__annotations__ else (GRPC,)
)
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


def connect(scheduler: str, lane: str, rank: int | None = None) -> ps.Client:
    """Join as a worker that uses this lane, and no other.

    Blocking, Raises: as `ps.connect`.
    """
    options: dict[str, object] = {"rank": rank}
    if SHARED_MEMORY in LANES:
        options["lane"] = lane
    return ps.connect(scheduler, **cast(ConnectOptions, options))


def lane_of(client: ps.Client) -> str:
    """The lane that the client's payloads take."""
    lane: str = getattr(client.progress(), "lane", GRPC)
    return lane
