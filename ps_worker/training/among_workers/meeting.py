"""The meeting of workers that make torch.distributed's process group, and the wait for all.

Rules:
    - Workers meet at worker 0's address on the way to the scheduler. Each one connects there before
      torch does, which tries for minutes and names no remedy. If one is not let in, all are told.
    - gloo listens where this machine's name leads. If that is this machine alone, as Debian's
      /etc/hosts has it (127.0.1.1), gloo is given the device of this worker's address.
    - gloo waits half an hour for a worker that does not come. A wait here ends when a worker does.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from ps_core.cluster_view import Node, Role
from ps_core.errors import InvalidConfig, WaitExpired, WorkerLost, listed
from ps_core.keys import NodeId
from ps_runtime.grpc.addresses import is_loopback
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s

if TYPE_CHECKING:
    from ps_worker.client.client import Client

DEVICE = "GLOO_SOCKET_IFNAME"

_CONNECT_S = 20.0
_LOOK_S = 0.5
"""Between two looks at the cluster during a wait."""

_SHOWN_COUNT = 8
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_IPV6_DEVICES = Path("/proc/net/if_inet6")


def own_host(schedulers: Sequence[str]) -> str:
    """This machine's address on the way to the scheduler, where other workers are reached, too.
    Blocking: resolves a name.
    """
    reason: Exception = ValueError("there is none")
    for scheduler in schedulers:
        host, _, port = scheduler.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                own: str = probe.getsockname()[0]
        except (OSError, ValueError) as error:
            reason = error
        else:
            return own
    raise InvalidConfig(
        f"the way to the scheduler at {', '.join(schedulers)} is not known here: {reason}; "
        "expected host:port, or a process group that the script has made"
    )


def check_reached(client: Client, host: str, port: int) -> None:
    """Raise InvalidConfig at every worker if one does not reach worker 0's port.

    Blocking: until every worker has called this.
    """
    failure = ""
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        failure = str(error) or type(error).__name__
    told = client.gather(failure, name="torch.distributed's store is reached")
    missing = [str(rank) for rank, each in enumerate(told) if each]
    if not missing:
        return
    remedy = "open all ports between the workers' machines"
    if is_loopback(host):
        remedy = (
            "worker 0 reaches the scheduler by an address of its own machine alone; give it the "
            "one that the others have (--scheduler)"
        )
    raise InvalidConfig(
        f"workers {listed(missing, _SHOWN_COUNT)} do not reach worker 0 at {host} port {port}, "
        f"where torch.distributed's workers meet ({told[int(missing[0])]}): {remedy}"
    )


def choose_device(host: str) -> None:
    """Have gloo listen at this worker's address `host`, unless the environment names a device, or
    the machine's name leads to an address that others may reach. Blocking: resolves that name.
    """
    if DEVICE in os.environ or is_loopback(host) or not _name_is_loopback():
        return
    if device := device_of(host):
        os.environ[DEVICE] = device
        logs.info("gloo_device_chosen", device=device, address=host)


def _name_is_loopback() -> bool:
    """True if gloo would listen at loopback: it takes the first address of the machine's name."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return is_loopback(str(found[0][4][0]))


def device_of(host: str) -> str:
    """The network device that has an address; empty: none is known."""
    address = ipaddress.ip_address(host)
    names = [name for _, name in socket.if_nameindex()]
    if address.version == 6:
        lines = _IPV6_DEVICES.read_text().splitlines() if _IPV6_DEVICES.exists() else []
        wanted = address.packed.hex()
        return next((line.split()[-1] for line in lines if line.split()[0] == wanted), "")
    return next((name for name in names if _ipv4_of(name) == address.packed), "")


def _ipv4_of(device: str) -> bytes:
    try:
        import fcntl
    except ImportError:
        return b""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", device.encode()[:15])
        try:
            return fcntl.ioctl(asking.fileno(), _GET_ADDRESS, request)[20:24]
        except OSError:  # it has none
            return b""


def meet(client: Client, make: Callable[[], None]) -> None:
    """Call `make`, which ends when all workers have called it.

    Blocking: as `make`, at most the client's request_deadline_s.

    Raises:
        WorkerLost: a worker has ended meanwhile.
        WaitExpired: not all have come.
        InvalidConfig: `make` has failed.
    """
    before, deadline_s = _ended(client), client.connection.deadline_s(None)
    made: Future[None] = Future()

    def run() -> None:
        try:
            make()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            made.set_exception(error)
        else:
            made.set_result(None)

    # A thread that waits in gloo cannot be ended; it goes with the process.
    threading.Thread(target=run, name="torch.distributed", daemon=True).start()
    end_s = now_s() + deadline_s
    while not made.done():
        try:
            made.exception(_LOOK_S)
        except TimeoutError:
            client.connection.engine.check_alive()
            if lost := [node for each, node in _ended(client).items() if each not in before]:
                words = "; ".join(node.ended_words for node in lost)
                raise WorkerLost(f"{words}, before torch.distributed's workers had met") from None
            if now_s() >= end_s:
                raise WaitExpired(
                    f"torch.distributed's workers have not met within {deadline_s:g} s, though all "
                    f"came: {_REMEDY}"
                ) from None
    failure = made.exception()
    if isinstance(failure, RuntimeError):
        said = str(failure).partition("\n")[0]
        raise InvalidConfig(
            f"torch.distributed's workers do not reach each other ({said}): {_REMEDY}"
        ) from failure
    if failure is not None:
        raise failure


_REMEDY = (
    "open all ports between the workers' machines, and where a machine has several networks name "
    f"the device at each worker ({DEVICE})"
)


def _ended(client: Client) -> dict[NodeId, Node]:
    nodes = client.connection.engine.view.nodes
    return {
        node.node_id: node
        for node in nodes
        if node.role is Role.WORKER and not node.state.is_member
    }
