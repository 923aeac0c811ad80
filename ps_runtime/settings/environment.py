"""Every environment variable that pushpull reads, with its meaning.

One registry serves all roles: a role tolerates another's variables and refuses a misspelt one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from ps_core.errors import InvalidConfig

PREFIX = "PUSHPULL_"

VARIABLES: dict[str, str] = {
    "PUSHPULL_SCHEDULER": "Addresses of the scheduler: host:port, or several with commas.",
    "PUSHPULL_JOIN_SECRET": "The join secret, the same in every process of a cluster; 16 bytes up.",
    "PUSHPULL_JOIN_SECRET_FILE": "A file with the join secret; the scheduler makes it. Default: "
    "~/.pushpull/join-secret.",
    "PUSHPULL_WORKERS": "The number of workers that opens clock 1 of a BSP table.",
    "PUSHPULL_MAX_WORKERS": "The number of workers at most, those that join later included.",
    "PUSHPULL_SERVERS": "The number of servers that must have registered before a table is placed.",
    "PUSHPULL_REPLICAS": "Servers that hold each range, so that all but one of them may die.",
    "PUSHPULL_RANGES": "Key ranges of the cluster; 0: as many as suit the servers.",
    "PUSHPULL_MIN_IN_SYNC": "Replicas that must hold a push before it counts.",
    "PUSHPULL_RANK": "The rank a worker asks for; unset: the job's, or the scheduler's choice.",
    "PUSHPULL_WORLD_SIZE": "Workers of the job; a cluster for another number refuses it.",
    "PUSHPULL_RUN": "The run of a worker or reader; empty: the run without a name.",
    "PUSHPULL_IDENTITY": "The name that gives a restarted worker its rank; hostname: the host's.",
    "PUSHPULL_ROLE": "The role of a client: worker, reader or operator.",
    "PUSHPULL_LISTEN": "host:port that the role's gRPC server binds; port 0 chooses a free one.",
    "PUSHPULL_ADVERTISE": "host:port or host under which others reach the role.",
    "PUSHPULL_STREAM_LISTEN": "host:port of a server's stream port; auto: a free one; off: none.",
    "PUSHPULL_HTTP_LISTEN": "host:port for /metrics and /healthz; port 0 chooses a free one.",
    "PUSHPULL_CLUSTER_ID": "The cluster that a node joins; empty accepts any.",
    "PUSHPULL_LOG_LEVEL": "debug, info, warning or error.",
    "PUSHPULL_LOG_FORMAT": "text, or json: log lines are objects, one a line.",
    "PUSHPULL_STOP_WHEN_DONE": "1 ends the cluster when all workers have left.",
    "PUSHPULL_CONNECT_DEADLINE_S": "Seconds to go on trying to reach the scheduler at start.",
    "PUSHPULL_REQUEST_DEADLINE_S": "Seconds that a worker's push or pull may wait.",
    "PUSHPULL_LANE": "The lane of payloads on one host: auto, shm (shared memory) or grpc.",
    "PUSHPULL_WINDOW_BYTES": "Payload bytes that a worker has in flight to one server.",
    "PUSHPULL_PUSH_CODEC": "How gradients travel by default: none, bf16, int8, topk:0.01, ...",
    "PUSHPULL_PULL_CODEC": "How parameters travel by default: none, bf16, fp16, int8.",
    "PUSHPULL_OUTER_STEPS": "Steps of a worker by itself in each outer step (DiLoCo); 0: none.",
    "PUSHPULL_CONSISTENCY": "The consistency of tables whose script names none: bsp, ssp:4, asp.",
    "PUSHPULL_COMPUTE": "Emulated computation of a worker's step, such as 30ms.",
    "PUSHPULL_RECORD": "A directory where workers record their steps as JSON lines.",
    "PUSHPULL_HEARTBEAT_INTERVAL_S": "Seconds between two heartbeats of a node.",
    "PUSHPULL_LEASE_S": "Seconds without a heartbeat after which a node counts as silent.",
    "PUSHPULL_WORKER_TIMEOUT_S": "Seconds of silence after which a worker is gone; 0: never.",
    "PUSHPULL_ADAPTATION_INTERVAL_S": "Seconds between two moves of a bound of ssp:LEAST..MOST.",
    "PUSHPULL_JOURNAL": "Scheduler: the directory of its journal.",
    "PUSHPULL_CHECKPOINT_URL": "The place of checkpoints: a path, or a URL that fsspec knows.",
    "PUSHPULL_CHECKPOINT_ROOTS": "Further places that a restore may name, with commas.",
    "PUSHPULL_CHECKPOINT_EVERY_S": "A checkpoint in so many seconds; 0: not by time.",
    "PUSHPULL_CHECKPOINT_EVERY_CLOCKS": "A checkpoint in so many clocks; 0: not by clocks.",
    "PUSHPULL_CHECKPOINT_KEEP": "Checkpoints that are kept; 0: all.",
    "PUSHPULL_CHECKPOINT_FULL_EVERY": "One of so many checkpoints is full; 1: all are.",
    "PUSHPULL_CHECKPOINT_LAST_S": "Seconds that a last checkpoint may take; 0: none is made.",
    "PUSHPULL_CHECKPOINT_RATE_MB_S": "MB a second that a server reads for a checkpoint.",
    "PUSHPULL_MEMORY_MB": "MiB that tables may take on a server; 0: a share of what it has.",
    "PUSHPULL_ROWS_DIR": "Directory for rows of a server that memory_mb has no space for.",
    "PUSHPULL_CHECKPOINT_BUFFER_MB": "MiB of copies that may wait to be written to a checkpoint.",
    "PUSHPULL_UPDATE_LOG": "The directory of a server's update log.",
    "PUSHPULL_UPDATE_LOG_MB": "MB of an update log above which the oldest updates are removed.",
    "PUSHPULL_UPDATE_LOG_SYNC": "1: an update counts only when the disk has it.",
    "PUSHPULL_RESUME": "The checkpoint that a cluster starts from.",
    "PUSHPULL_DRAIN_GRACE_S": "Seconds for calls to finish when a role is told to stop, and for "
    "another server to get anything of which a server has the only copy.",
    "PUSHPULL_READY_FILE": "A file that the role writes when it serves: its addresses as JSON.",
    "PUSHPULL_DIE_WITH_PARENT": "1 kills the role when its parent ends; a script does not have it.",
    "PUSHPULL_PARENT_PID": "The process that started the role, for PUSHPULL_DIE_WITH_PARENT.",
    "PUSHPULL_LAUNCH_ID": "A secret that a worker tells the scheduler, by which the starter of its "
    "process can report its end; 32 hexadecimal digits.",
    "PUSHPULL_THREADS": "Threads that torch uses in the role; 0 leaves torch's own choice.",
}
"""Name to meaning, in the order of the reference page."""


def check_known(env: Mapping[str, str], also: Iterable[str] = ()) -> None:
    """Raise InvalidConfig, with the nearest known one, for a PUSHPULL_* variable that neither
    `VARIABLES` nor `also` has: it may be misspelt.
    """
    known = {*VARIABLES, *also}
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in known:
            # The prefix would make all names similar.
            endings = sorted(one.removeprefix(PREFIX) for one in known)
            raise InvalidConfig(
                f"environment variable {name} is unknown"
                f"{nearest(name.removeprefix(PREFIX), endings, PREFIX)}"
            )


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown name: the nearest known name, or all of them."""
    names = list(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; expected one of {', '.join(prefix + one for one in names)}"
