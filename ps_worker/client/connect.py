"""`pushpull.connect`: joins a cluster by its options, by the environment, and by the job that this
process is one of.
"""

from __future__ import annotations

import os
import sys
from typing import TypedDict, Unpack

from ps_core.errors import InvalidConfig, PushpullError
from ps_runtime.observe import logs
from ps_runtime.settings.job_place import REMEDY, JobPlace
from ps_worker.client.client import Client
from ps_worker.client.shown_options import defaults_of, shows
from ps_worker.spec.settings import check_options
from ps_worker.transport.config import WorkerConfig, job_place, worker_config

_earlier: dict[tuple[int, tuple[str, ...], str], int] = {}
"""The rank of the last worker by its process (a fork is another), scheduler and run."""


class ConnectOptions(TypedDict, total=False):
    """The keyword arguments of `connect`, which has their meaning."""

    role: str
    rank: int | None
    world_size: int
    run: str
    identity: str
    cluster_id: str
    connect_deadline_s: float
    request_deadline_s: float
    lane: str
    window_bytes: int
    consistency: str
    push_codec: str
    pull_codec: str
    outer_steps: int
    compute: str
    record: str
    http_listen: str


@shows(ConnectOptions, defaults_of(WorkerConfig))
def connect(scheduler: str | None = None, **options: Unpack[ConnectOptions]) -> Client:
    """Join a cluster as a worker or as a reader.

    Args:
        scheduler: "host:port", or several of them with commas; None means PUSHPULL_SCHEDULER.

    Options (one that is left out comes from its PUSHPULL_* variable, else it has its default):
        role (str, 'worker'): "worker" trains, "reader" only pulls, "operator" looks after the
            cluster: consistency, checkpoints.
        rank (int | None, None): the rank to ask for; None takes that of torchrun, Slurm, MPI or
            Kubernetes, and where there is none the lowest free one.
        world_size (int, 0): the number of workers of the job; a cluster that was started for
            another number refuses this worker at once. 0: the job's number if the rank comes from
            the job, else unknown.
        run (str, ''): the name of this worker's run, which has ranks and tables of its own
            (docs/guides/RUNS.md); empty: the run without a name.
        identity (str, ''): a name that this worker keeps when its process is started again: with
            the same identity it gets its rank back at once. "hostname" means this host's name. If a
            process has several workers, the first has it. Empty: none.
        cluster_id (str, ''): the cluster to join; empty: whichever answers.
        connect_deadline_s (float, 60.0): seconds to go on trying to reach the cluster.
        request_deadline_s (float, 300.0): seconds that a push, a pull or a wait may take.
        lane (str, 'auto'): "auto" shares memory with the servers on this host and sends the others
            bytes, "shm" is an error where memory cannot be shared, "grpc" always sends bytes.
        window_bytes (int, 33554432): payload bytes in flight to one server: sent, and not yet
            received there.
        consistency (str, ''): where the script names none: "bsp" (also if empty), "ssp:4", "asp"...
        push_codec (str, 'none'): the codec of gradients where the script names none: "none" (as
            their dtype), "bf16", "fp16", "int8", "sign", "topk:0.01", "lowrank:4". Tables that
            cannot have it go without.
        pull_codec (str, 'none'): the codec of parameters that this worker pulls: "none", "bf16",
            "fp16" or "int8".
        outer_steps (int, 0): above 0, the inner steps of each outer step: `DistributedOptimizer`
            runs the torch.optim namesake of its `SGD`, `Adam`, `AdamW`, `Adagrad` or `RMSprop` in
            `Outer`, and refuses other optimizers.
        compute (str, ''): emulated computation of a step of `DistributedOptimizer`, such as "30ms",
            or "rotating:30ms,90ms,burst=2,seed=1"; empty emulates none.
        record (str, ''): a directory for a record of the steps, as `pushpull compare` reads it;
            empty records nothing.
        http_listen (str, ''): "host:port" where this process serves /metrics and /healthz; port 0
            takes a free one (`Client.http_address`). Empty: only `pushpull worker` and
            `pushpull train` serve them.

    Returns:
        The client, a context manager. It leaves the cluster when its `with` block ends normally,
        when `close` is called, and when the process ends normally; without `with` that may be by
        `sys.exit(1)`, of which only `pushpull worker` and children of `multiprocessing` know.

    Blocking: until the cluster has answered, at most `connect_deadline_s`.

    Raises:
        InvalidConfig: a wrong setting; a rank that is taken; more workers than the cluster admits.
        Fenced: the scheduler's cluster is not `cluster_id`.
        Unauthenticated: this process lacks the cluster's join secret.
        WaitExpired: no scheduler answered in time.
    """
    check_options("connect", options, ConnectOptions.__annotations__)
    place = config = None
    try:
        _check_not_imported()
        place = job_place(options, os.environ)
        _tell_place(place)
        config = worker_config({"scheduler": scheduler, **options})
        client = Client(config)
    except PushpullError as refusal:
        raise _told(refusal, place, config) from None
    if not client.is_reader:
        _earlier[os.getpid(), config.scheduler, config.run] = client.rank
        logs.info("worker_joined", rank=client.rank, workers=client.world_size)
    return client


def _tell_place(place: JobPlace | None) -> None:
    if place is not None:
        logs.info("rank_of_job", rank=place.rank, workers=place.world_size, source=place.source)


def _check_not_imported() -> None:
    """Refuse a script that a child of `multiprocessing` ("spawn", "forkserver") imports anew before
    its own work: as a worker of the same identity it would end the parent, and without one it would
    take another's rank.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        name = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "<module>" and name == "__mp_main__":
            raise InvalidConfig(
                f"process {os.getpid()} is a child that multiprocessing has started by 'spawn' or "
                f"'forkserver' (as a DataLoader may), and imports {frame.f_code.co_filename} anew; "
                'put what the script does below a line `if __name__ == "__main__":`'
            )


def _told(
    refusal: PushpullError, place: JobPlace | None, config: WorkerConfig | None
) -> PushpullError:
    """The refusal without the frames within, which do not help the caller and hide the reason."""
    return _with_earlier(_with_place(refusal, place), config).with_traceback(None)


def _with_earlier(refusal: PushpullError, config: WorkerConfig | None) -> PushpullError:
    """The refusal of a worker, with the one of the same run that this process was before."""
    if config is None or config.role != "worker" or type(refusal) is not InvalidConfig:
        return refusal
    rank = _earlier.get((os.getpid(), config.scheduler, config.run))
    if rank is None:
        return refusal
    return InvalidConfig(
        f"{refusal.message}. This process has connected as worker {rank} before: go on with that "
        "client, or give connect(run=...) a name for another run"
    )


def _with_place(refusal: PushpullError, place: JobPlace | None) -> PushpullError:
    """The refusal, with the rank that was taken from the job, if it was."""
    if place is None or not isinstance(refusal, InvalidConfig):
        return refusal
    return InvalidConfig(
        f"{refusal.message}; this process is {place}. If these do not count workers, {REMEDY}, or "
        "unset them"
    )
