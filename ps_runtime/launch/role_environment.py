"""The environment of a local cluster's roles, and the cores and threads that they share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import ps_core
from ps_runtime.system.process_end import DIE_WITH_PARENT, PARENT_PID
from pushpull.v1 import types_pb2

_ADDRESSING = (
    "ADVERTISE", "CLUSTER_ID", "HTTP_LISTEN", "JOURNAL", "LAUNCH_ID", "LISTEN", "MIN_IN_SYNC",
    "RANK", "READY_FILE", "REPLICAS", "ROLE", "RUN", "SCHEDULER", "SERVERS", "STOP_WHEN_DONE",
    "WORKERS", "WORLD_SIZE",
)  # fmt: skip
"""PUSHPULL_ variables of a process's identity and cluster, which roles never inherit. A container
of a cluster may have them, and start another cluster: that has a journal and ports of its own, and
trains in the run without a name, of which checkpoints are.
"""

_STREAM_LISTEN = "PUSHPULL_STREAM_LISTEN"

_PLACES = ("CHECKPOINT_URL", "RESUME", "UPDATE_LOG")
"""PUSHPULL_ variables that the starter of a cluster reads: it has work to do for these settings,
and gives them to its roles as flags."""


def role_environment(inherited: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a role: the caller's, without the caller's identity and the settings that
    are its starter's, and `added`. Our packages come from the folders where this process found
    them.
    """
    dropped = {f"PUSHPULL_{name}" for name in (*_ADDRESSING, *_PLACES)}
    if ":" in inherited.get(_STREAM_LISTEN, ""):  # an address; "off" is for all servers
        dropped.add(_STREAM_LISTEN)
    environment = {name: value for name, value in inherited.items() if name not in dropped}
    environment["PYTHONPATH"] = python_path(inherited)
    environment[DIE_WITH_PARENT] = "1"
    environment[PARENT_PID] = str(os.getpid())
    # Python's output to a pipe is block-buffered: a killed role's last lines would be lost.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.update(added)
    return environment


def python_path(inherited: Mapping[str, str]) -> str:
    """The PYTHONPATH of a role, absolute: the folders of our packages, less those that Python finds
    by itself, and the caller's.
    """
    roots = (Path(ps_core.__file__).parents[1], Path(types_pb2.__file__).parents[2])
    own = [root for root in roots if root.name not in ("site-packages", "dist-packages")]
    given = [Path(p) for p in inherited.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join(dict.fromkeys(str(path.absolute()) for path in (*own, *given)))


def thread_count(core_count: int, process_count: int) -> int:
    """Threads for each of `process_count` processes that share `core_count` cores; at least 1."""
    return max(1, core_count // max(1, process_count))
