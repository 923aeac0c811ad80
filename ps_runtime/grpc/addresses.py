"""Addresses as "host:port": those that a role listens on, and those that others reach it at."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

from ps_core.errors import InvalidConfig
from ps_runtime.observe import logs

MAX_PORT = 65_535

_BACKLOG = 100
"""Connections that wait to be accepted, as asyncio's own default."""

_OTHER_FORMS = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:", "vsock:")


def split_address(address: str, field: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port"; InvalidConfig names `field`."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    well_formed = bool(colon and bare) and (bare != host or ":" not in host)
    if not (well_formed and port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
        raise InvalidConfig(
            f"{field} is '{address}'; expected host:port with a port of 0 to {MAX_PORT}"
        )
    return bare, int(port)


def check_scheduler_address(address: str) -> None:
    """Raise InvalidConfig, with the right form, for an impossible address of a scheduler; other
    forms of gRPC's (dns:, unix:) pass.
    """
    if address.startswith(_OTHER_FORMS):
        return
    _, scheme, bare = address.rpartition("://")
    bare = bare.split("/", 1)[0]
    _, colon, port = bare.rpartition(":")
    if not colon or bare.endswith("]"):
        bare, port = f"{bare or 'HOST'}:7000", ""
    asked = f"the scheduler's address is '{address}'; expected host:port"
    if scheme:
        raise InvalidConfig(f"{asked}, without {address.partition('://')[0]}://, such as {bare}")
    if not port:
        raise InvalidConfig(f"{asked}, such as {bare}: the scheduler says its port when it starts")
    if split_address(address, "the scheduler's address")[1] == 0:
        raise InvalidConfig(f"{asked}; 0 is no scheduler's port: the scheduler says its own")


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised(advertise: str | None, listen_host: str, port: int) -> str:
    """The address at which others reach a server that listens on `listen_host` and `port`.

    `advertise` is "host:port", or "host" or "host:0" for the bound port. None derives the host from
    `listen_host`; if that is a wildcard, an address of this machine's name is taken, which for "::"
    may be one of IPv6. Blocking: may resolve that name.

    Raises:
        InvalidConfig: `advertise` is malformed or a wildcard.
    """
    if not advertise:
        host = _own_host(listen_host) if _is_wildcard(listen_host) else listen_host
        return join_address(host, port)
    text = advertise if advertise.endswith("]") or ":" not in advertise else None
    host, given = split_address(f"{text}:0" if text else advertise, "advertise")
    if _is_wildcard(host):
        raise InvalidConfig(f"advertise is '{advertise}'; expected a host that others can reach")
    return join_address(host, given or port)


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def listening(host: str, port: int) -> dict[str, Any]:
    """The arguments with which asyncio listens at a host and port: "::" takes IPv4 too, as gRPC's
    port does. Raises OSError.
    """
    if not (_is_wildcard(host) and ":" in host and socket.has_dualstack_ipv6()):
        return {"host": host, "port": port}
    both = socket.create_server(
        (host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
    )
    return {"sock": both}


def reachable(addresses: Iterable[str]) -> str:
    """The address of a machine that others most likely reach: not loopback, nor of one link alone;
    of IPv4 if there is one.
    """

    def rank(address: str) -> tuple[bool, bool, int]:
        found = ipaddress.ip_address(address)
        return found.version == 6 and found.is_link_local, found.is_loopback, found.version

    return min(addresses, key=rank, default="127.0.0.1")


def warn_of_loopback(own: str, listen: str, schedulers: Iterable[str]) -> None:
    """Log that only its machine reaches a role at its `own` address, if its scheduler is elsewhere.
    For a wildcard in `listen`, `advertised` has done so.
    """
    host, listen_host = (split_address(each, "address")[0] for each in (own, listen))
    is_derived = _is_wildcard(listen_host)
    is_alone = any(is_loopback(each.rpartition(":")[0]) for each in schedulers)
    if is_loopback(host) and not (is_derived or is_alone):
        logs.warning("advertised_address_is_loopback", host=host, remedy="give --listen")


def is_loopback(host: str) -> bool:
    """True for an address that leads a machine to itself; a name is not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _own_host(wildcard: str) -> str:
    family = socket.AF_UNSPEC if ":" in wildcard else socket.AF_INET
    try:
        found = socket.getaddrinfo(
            socket.gethostname(), None, family=family, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):
        found = []
    host = reachable(str(place[4][0]) for place in found)
    if is_loopback(host):
        logs.warning("advertised_address_is_loopback", host=host, remedy="give --advertise")
    return host
