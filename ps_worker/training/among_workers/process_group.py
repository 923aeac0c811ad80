"""torch.distributed's process group of a cluster's workers.

A script that sets a group up itself has one, for example under torchrun. Otherwise rank 0 opens a
store, and the cluster tells the others where it is.

A restore in place may come while some workers have begun a collective call, and others never begin
it. Calls of one group are matched by their order alone. So a group is of one timeline: another is
made for the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import socket
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from ps_core.errors import InvalidConfig, JoinRefused, WorkerLost, listed
from ps_runtime.observe import logs
from ps_worker.training.among_workers import meeting

if TYPE_CHECKING:
    from ps_worker.client.client import Client

_STORE_S = 60.0
_SHOWN_COUNT = 8

_SOCKETS = Path("/proc/self/fd")

REMEDY = (
    "torch.distributed goes on with all workers or with none: start all of them again, together, "
    "from the last checkpoint (pushpull train --resume)"
)

_Place = Sequence[int] | None
"""A worker's rank in its process group and the size of that; None without a group."""


class _Use(NamedTuple):
    """A process group that this process trains with.

    Attributes:
        timeline: of the cluster at that time.
        made: groups that were made here: this one, and others of some of its workers; none if the
            script has made it.
        sockets: of these.
    """

    group: weakref.ref[Any]
    cluster_id: str
    timeline: bytes
    made: tuple[weakref.ref[Any], ...]
    sockets: frozenset[str]


_use: _Use | None = None


def init_process_group(client: Client) -> None:
    """As `HybridOptimizer.init_process_group`."""
    if client.is_late_joiner:
        raise JoinRefused(
            f"worker {client.rank} joins others that train, and their torch.distributed process "
            "group takes nobody in: start all workers again, together, from the last checkpoint "
            "(pushpull train --resume)"
        )
    if not distributed.is_available():
        raise InvalidConfig("this torch has no torch.distributed; expected a build with it")
    is_replaced = _is_replaced(client)
    if is_replaced and _use is not None:
        # Calls that others never make fail in groups made here, and wait for ever in any other.
        _leave(*(group for group in _groups() if not any(group is each() for each in _use.made)))
        if _use.made:
            shut(_use.sockets)
            distributed.destroy_process_group()
            is_replaced = False
    place: _Place = None
    if distributed.is_initialized():
        place = distributed.get_rank(), distributed.get_world_size()
    told = client.gather((place, is_replaced), name="torch.distributed's ranks")
    places: list[_Place] = [each for each, _ in told]
    if problem := _problem_of(places, client.rank, client.world_size):
        raise InvalidConfig(problem)
    if any(is_replaced for _, is_replaced in told):
        raise WorkerLost(
            "a restore has replaced the cluster that this torch.distributed process group has "
            "trained with, and some workers may wait in a call of the group that others never "
            f"make. {REMEDY}"
        )
    if place is None:
        sockets = _make(client)
        _note_use(client, (weakref.ref(distributed.group.WORLD),), sockets)
    else:
        _note_use(client)


def _is_replaced(client: Client) -> bool:
    """True if this process has trained with its group in a timeline that a restore has ended."""
    session, use = client.session, _use
    if (
        use is None
        or not distributed.is_initialized()
        or use.group() is not distributed.group.WORLD
    ):
        return False
    is_alone = not use.made and distributed.get_world_size() == 1
    is_of_cluster = use.cluster_id == session.cluster_id
    return is_of_cluster and use.timeline != session.timeline and not is_alone


def _note_use(
    client: Client,
    made: tuple[weakref.ref[Any], ...] = (),
    sockets: frozenset[str] = frozenset(),
) -> None:
    global _use
    world, session = distributed.group.WORLD, client.session
    if _use is not None and _use.group() is world:
        made, sockets = _use.made, _use.sockets
    _use = _Use(weakref.ref(world), session.cluster_id, session.timeline, made, sockets)


def subgroups(of_ranks: Iterable[Sequence[int]]) -> list[Any]:
    """Groups of some of the process group's workers each, as `torch.distributed.new_group` makes
    them: each worker makes all, in one order.
    """
    global _use
    sockets, groups = _sockets().keys(), _groups()
    found = [distributed.new_group(ranks, backend=backends()) for ranks in of_ranks]
    if _use is not None and _use.made:
        new = (group for group in _groups() if not any(group is each for each in groups))
        made = (*_use.made, *map(weakref.ref, new))
        _use = _use._replace(made=made, sockets=_use.sockets | (_sockets().keys() - sockets))
    return found


def _problem_of(places: Sequence[_Place], rank: int, worker_count: int) -> str:
    """Words for process groups that are not of all workers, the same at each; empty if they are."""
    without = [str(each) for each, place in enumerate(places) if place is None]
    if len(places) < worker_count:
        return (
            f"{len(places)} of {worker_count} workers are left; expected all: start them again, "
            "together, from the last checkpoint (pushpull train --resume)"
        )
    if 0 < len(without) < worker_count:
        return (
            f"workers {listed(without, _SHOWN_COUNT)} have no torch.distributed process group, and "
            "the others have one; expected one of all workers: call init_process_group at each, or "
            "at none, and it is made"
        )
    for worker, place in sorted(enumerate(places), key=lambda each: each[0] != rank):
        if place is None or tuple(place) == (worker, worker_count):
            continue
        who = "this process" if worker == rank else f"worker {worker}"
        words = (
            f"{who} is rank {place[0]} of {place[1]} in torch.distributed, and worker {worker} of "
            f"{worker_count} in the cluster; expected the same"
        )
        if place[1] != worker_count:
            return (
                f"{words}: start the cluster for as many workers as the process group has "
                "(--workers), and connect in each of its processes; part of a group will not do"
            )
        return (
            f"{words}: connect with rank=torch.distributed.get_rank(), or set the group up with "
            "rank=client.rank, or call init_process_group at no worker, and it is made"
        )
    return ""


def data_parallel_modules() -> list[DistributedDataParallel]:
    """All modules of this process that torch's DistributedDataParallel has wrapped.

    Looks at all objects, but refers only to those that refer to the class: another thread cannot
    complete a tuple that somebody else refers to meanwhile (SystemError).
    """
    kinds = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


def check_reduces_alone(groups: Iterable[Mapping[str, Any]], worker_count: int) -> None:
    """Refuse parameters of a module in torch's DistributedDataParallel, which reduces their
    gradients as well: a framework wraps modules if it finds torchrun's variables. Looks at all
    objects of a process that is in a process group of several.
    """
    if worker_count == 1 or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_world_size() == 1:
        return
    ours = {id(parameter) for group in groups for parameter in group["params"]}
    for found in data_parallel_modules():
        process_count, left_out = found.process_group.size(), found.parameters_to_ignore
        named = found.module.named_parameters()
        if process_count > 1 and any(id(p) in ours for name, p in named if name not in left_out):
            raise InvalidConfig(
                f"the model is in DistributedDataParallel with {process_count} processes, and this "
                f"is one of {worker_count} workers: gradients would be reduced twice, and a "
                "framework deals out the data twice. Train the module itself; if a framework "
                "has wrapped it, remove RANK, WORLD_SIZE and LOCAL_RANK from os.environ after "
                "ps.connect(), before the framework is set up"
            )


def backends() -> str:
    """The backends of a process group, for each kind of device."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _make(client: Client) -> frozenset[str]:
    """Make a group of all workers, and return the sockets that were opened meanwhile."""
    global _others
    _others = before = _sockets().keys()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    own = meeting.own_host(client.connection.config.scheduler)
    store: TCPStore | None = None
    place: tuple[str, int] | None = None
    if client.rank == 0:
        store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
        place = own, store.port
    host, port = client.broadcast(place, name="torch.distributed's store")
    meeting.check_reached(client, host, port)
    meeting.choose_device(own)
    backend = backends()

    def make() -> None:
        at = store or TCPStore(host, port, timeout=timedelta(seconds=_STORE_S))
        distributed.init_process_group(
            backend, store=at, rank=client.rank, world_size=client.world_size
        )

    meeting.meet(client, make)
    atexit.unregister(_end)
    atexit.register(_end)
    logs.info("process_group_made", backend=backend, store=f"{host}:{port}")
    return frozenset(_sockets().keys() - before)


_others: Collection[str] | None = None
"""Sockets of this process that are not the process group's; None: the script has made the group."""


def _sockets() -> dict[str, int]:
    """This process's sockets: their descriptors by their names. None where there is no /proc."""
    found: dict[str, int] = {}
    for entry in _SOCKETS.iterdir() if _SOCKETS.is_dir() else ():
        with contextlib.suppress(OSError):  # one that was closed meanwhile
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[name] = int(entry.name)
    return found


def group_sockets() -> Collection[str]:
    """The names of sockets that were opened since this process made its group, which are the
    group's, or can be opened anew; none if the script made the group.
    """
    return () if _others is None else _sockets().keys() - _others


def shut(names: Collection[str]) -> None:
    """Shut the connections among these that are still open: gloo's calls that wait for them fail.
    A socket that listens stays: gloo ends the process where accept fails.
    """
    for name, descriptor in _sockets().items():
        if name in names:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.shutdown(socket.SHUT_RDWR)


_left: list[Any] = []
"""Collective calls that have not ended, and their groups."""


def leave_as_it_is(*works: Any) -> None:
    """Let this process end although a collective call has not: gloo's destructor would wait for it.
    The objects of the call, and its groups, are never destroyed.
    """
    _leave(*works, *_groups())


def _groups() -> list[Any]:
    """All process groups of this process."""
    return list(distributed.distributed_c10d._world.pg_map)


def _leave(*objects: Any) -> None:
    for found in objects:
        if not any(found is each for each in _left):
            _left.append(found)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


def _end() -> None:
    with contextlib.suppress(RuntimeError, AssertionError):  # the others may have gone first
        if distributed.is_initialized() and not any(
            group is each for group in _groups() for each in _left
        ):
            distributed.destroy_process_group()
