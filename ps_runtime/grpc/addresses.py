"""Addresses as "host:port": those that a role listens on, and those that others reach it at."""

from __future__ import annotations

import ipaddress
import socket

from ps_core.errors import InvalidConfig
from ps_runtime.observe import logs

MAX_PORT = 65_535

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
    `listen_host`; if that is a wildcard, the address of this machine's name is taken. Blocking: may
    resolve that name.

    Raises:
        InvalidConfig: `advertise` is malformed or a wildcard.
    """
    if not advertise:
        return join_address(_own_host() if _is_wildcard(listen_host) else listen_host, port)
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


def _own_host() -> str:
    name = socket.gethostname()
    try:
        host = socket.gethostbyname(name)
    except OSError:
        host = "127.0.0.1"
    if ipaddress.ip_address(host).is_loopback:
        logs.warning("advertised_address_is_loopback", host=host, remedy="give --advertise")
    return host
