"""A cluster on Ray: its scheduler and servers are actors, placed by a placement group.

Rules:
    - A role is a child process of its actor; each ends with the other.
    - Ray places a server whose actor ended or whose node died again, on any node with enough
      resources, and it joins as a new server. It does not restart the scheduler, because another
      one would be another cluster.
    - The join secret travels in arguments, which Ray does not show, and never in a runtime_env.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from ps_core.errors import InvalidConfig, PushpullError, Recovering, WaitExpired
from ps_runtime.cluster import join_secret
from ps_runtime.launch.cluster_shape import ClusterShape, UpdateLogPlan, checkpoints_of
from ps_runtime.launch.launcher import (
    CHECKPOINT_GRACE_S,
    READY_DEADLINE_S,
    Launcher,
    RoleExit,
    RoleProcess,
    describe_exit,
    start_scheduler,
    start_server,
)
from ps_worker.client.client import Client
from ps_worker.client.connect import ConnectOptions, connect

_STOP_WITHIN_S = 15.0
_FAILED = 1
_LOG_LEVEL = "PUSHPULL_LOG_LEVEL"


@dataclass(frozen=True, slots=True)
class RayRole:
    """A role of a cluster on Ray.

    Attributes:
        name: "scheduler", "server 0", ...
        address: its "host:port".
        node_id: Ray's id of its node.
        process_id: on that node.
    """

    name: str
    address: str
    node_id: str
    process_id: int


class RayCluster:
    """A scheduler and servers on Ray. Made by `ray_cluster`.

    Tasks and actors that have it as an argument join with its `connect`. Such a copy has the
    address; only the original can stop the cluster. It ends with `stop`, at the end of its `with`
    block, and with the Ray job.
    """

    def __init__(self, address: str, secret: str, actors: _Actors | None) -> None:
        self._address = address
        self._secret = secret
        self._actors = actors

    def __reduce__(self) -> tuple[Any, ...]:
        return (RayCluster, (self._address, self._secret, None))

    @property
    def address(self) -> str:
        """The scheduler's "host:port"."""
        return self._address

    def connect(self, **options: Unpack[ConnectOptions]) -> Client:
        """Join the cluster as a worker or a reader; takes the options of `ps.connect`.

        Blocking, Raises: as `ps.connect`.
        """
        os.environ[join_secret.SECRET] = self._secret
        return connect(self._address, **options)

    def roles(self, timeout_s: float = READY_DEADLINE_S) -> list[RayRole]:
        """The places of the scheduler and the servers; waits for one that Ray is placing again.

        Blocking: up to `timeout_s`.

        Raises:
            InvalidConfig: this is a copy, which does not know.
            Recovering: a role has ended for good; the message says why.
            WaitExpired: a role was not placed in time: no node has enough resources.
        """
        return self._original().roles(timeout_s)

    def stop(self) -> None:
        """End all roles, after a checkpoint that is being made, and release their resources.
        Idempotent.

        Blocking: a few seconds; half a minute while a checkpoint is written.

        Raises:
            InvalidConfig: this is a copy.
        """
        self._original().stop()

    def _original(self) -> _Actors:
        if self._actors is None:
            raise InvalidConfig("this is a copy of the cluster; ask where ray_cluster was called")
        return self._actors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def ray_cluster(
    servers: int = 1,
    workers: int = 1,
    *,
    replicas: int = 1,
    resources: Mapping[str, float] | None = None,
    checkpoint_url: str = "",
    resume: str = "",
) -> RayCluster:
    """Start a scheduler and servers on a Ray cluster, spread over its nodes.

        with ps.ray_cluster(servers=2, workers=4, replicas=2) as cluster:
            ray.get([train.remote(cluster) for _ in range(4)])    # cluster.connect() in each

    Needs Ray, as `pip install 'pushpull[ray]'` has it, and `ray.init` before; pushpull is installed
    on every node.

    Args:
        servers: the number of servers.
        workers: the number of workers that clock 1 of a BSP table waits for.
        replicas: the number of servers that hold each range; with 2, training survives a node.
        resources: Ray's reservation for each server, such as {"CPU": 4}; {"CPU": 1} by default. The
            scheduler takes {"CPU": 0.1}.
        checkpoint_url: where checkpoints go, reachable from every node; empty:
            PUSHPULL_CHECKPOINT_URL, else nowhere.
        resume: the checkpoint that it starts from: its directory, or a directory of checkpoints;
            empty: PUSHPULL_RESUME, else none.

    Returns:
        The cluster, an argument for tasks and actors.

    Blocking: until all roles serve, at most two minutes.

    Raises:
        InvalidConfig: Ray is not installed or not initialized, or a number is wrong.
        Recovering: a role ended before it served; the message says why.
        WaitExpired: Ray has too few free resources for a role.
    """
    checkpoints = checkpoints_of(checkpoint_url, resume, os.environ)
    # Ray shows a driver what its actors print: by default only warnings.
    level = {_LOG_LEVEL: os.environ.get(_LOG_LEVEL, "warning")}
    shape = ClusterShape(
        servers, workers, replica_count=replicas, checkpoints=checkpoints, environment=level
    )
    join_secret.ensure(os.environ)
    secret = join_secret.found().decode()
    actors = _Actors(_ray(), secret, shape, dict(resources or {"CPU": 1}))
    try:
        return RayCluster(actors.start(), secret, actors)
    except BaseException:
        actors.stop()
        raise


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as missing:
        raise InvalidConfig("Ray is not installed; run: pip install 'pushpull[ray]'") from missing
    if not ray.is_initialized():
        raise InvalidConfig("Ray is not initialized; call ray.init() first")
    return ray


class _Actors:
    def __init__(
        self, ray: Any, secret: str, shape: ClusterShape, resources: dict[str, float]
    ) -> None:
        self._ray = ray
        self._secret = secret
        self._shape = shape
        self._resources = resources
        self._group: Any = None
        self._actors: list[Any] = []

    def start(self) -> str:
        """Place all roles; returns the scheduler's address."""
        bundles = [{"CPU": 0.1}, *[self._resources] * self._shape.server_count]
        self._group = self._ray.util.placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(READY_DEADLINE_S):
            raise WaitExpired(f"Ray could not reserve {bundles} within {READY_DEADLINE_S:g} s")
        self._actors.append(self._actor(None, ""))
        (scheduler,) = self.roles(READY_DEADLINE_S)
        for index in range(self._shape.server_count):
            self._actors.append(self._actor(index, scheduler.address))
        self.roles(READY_DEADLINE_S)
        return scheduler.address

    def _actor(self, index: int | None, scheduler: str) -> Any:
        strategies = self._ray.util.scheduling_strategies
        bundle = 0 if index is None else index + 1
        reserved = {"CPU": 0.1} if index is None else self._resources
        others = {name: count for name, count in reserved.items() if name not in ("CPU", "GPU")}
        max_restarts = 0 if index is None else -1
        actor = self._ray.remote(_RoleActor).options(
            num_cpus=reserved.get("CPU", 0),
            num_gpus=reserved.get("GPU", 0),
            resources=others,
            max_restarts=max_restarts,
            max_task_retries=max_restarts,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
        )
        return actor.remote(self._secret, self._shape, index, scheduler)

    def roles(self, timeout_s: float) -> list[RayRole]:
        exceptions = self._ray.exceptions
        try:
            found: list[RayRole] = self._ray.get(
                [actor.where.remote() for actor in self._actors], timeout=timeout_s
            )
        except exceptions.GetTimeoutError as late:
            raise WaitExpired(f"not every role was placed after {timeout_s:g} s") from late
        except exceptions.RayTaskError as failed:
            cause = failed.cause
            raise cause if isinstance(cause, PushpullError) else Recovering(str(failed)) from None
        except exceptions.RayActorError as ended:
            raise Recovering(f"a role of the cluster has ended for good: {ended}") from ended
        return found

    def stop(self) -> None:
        """End the roles, servers first. If the cluster keeps checkpoints, the scheduler ends first,
        because servers have to live until a checkpoint that is being made is complete.
        """
        actors, self._actors = self._actors, []
        if actors and self._shape.checkpoints.url:
            ending = actors[0].stop_scheduler.options(max_task_retries=0).remote()
            self._ray.wait([ending], timeout=CHECKPOINT_GRACE_S + _STOP_WITHIN_S)
        for actor in reversed(actors):
            stopping = actor.stop.options(max_task_retries=0).remote()
            self._ray.wait([stopping], timeout=_STOP_WITHIN_S)
            self._ray.kill(actor, no_restart=True)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None


class _RoleActor:
    """A role as a child process of an actor."""

    def __init__(self, secret: str, shape: ClusterShape, index: int | None, scheduler: str) -> None:
        import ray

        os.environ[join_secret.SECRET] = secret
        host = ray.util.get_node_ip_address()
        log = UpdateLogPlan(os.environ.get("PUSHPULL_UPDATE_LOG", ""))  # of this node
        shape = replace(shape, listen=f"{host}:0", server_listen=f"{host}:0", update_log=log)
        self._launcher = Launcher(on_line=print_line, on_exit=_end_with)
        if index is None:
            address = start_scheduler(self._launcher, shape).address
        else:
            server = start_server(self._launcher, shape, scheduler, index)
            address = self._launcher.wait_ready(server).address
        name = "scheduler" if index is None else f"server {index}"
        node_id = ray.get_runtime_context().get_node_id()
        (process,) = self._launcher.processes
        self._role = RayRole(name, address, node_id, process.pid)

    def where(self) -> RayRole:
        """The role; Ray answers once it serves."""
        return self._role

    def stop_scheduler(self) -> None:
        """End the role, if it is the scheduler, when no checkpoint is being made."""
        self._launcher.end("scheduler", CHECKPOINT_GRACE_S)

    def stop(self) -> None:
        self._launcher.stop()


def print_line(process: RoleProcess, line: str) -> None:
    """Copy a role's output to the actor's log, which Ray sends to the driver."""
    print(f"[{process.name}] {line}", flush=True)


def _end_with(role_exit: RoleExit) -> None:
    """End the actor when its role has ended, so that Ray starts both again."""
    if role_exit.was_ready and not role_exit.was_stopped:
        sys.stderr.write(f"{describe_exit(role_exit, 'while it served')}\n")
        sys.stderr.flush()
        os._exit(_FAILED)
