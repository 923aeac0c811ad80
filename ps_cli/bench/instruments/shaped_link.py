"""A network of two ends on this machine: namespaces, and a link between them of a given rate.

Made with `ip` and `tc` as root; it carries nothing but what its ends send each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ps_core.errors import InvalidConfig

_ADDRESSES = ("198.18.0.1", "198.18.0.2")
"""The range 198.18.0.0/15 is set aside for benchmarks (RFC 2544)."""

_LEAST_BURST_BYTES, _BURST_MS = 4 * 1024, 2
_QUEUE_MS = 50

HEADER_BYTES = 66
"""The bytes before the data of a TCP packet, as a device counts them; all of an acknowledgement."""


class End(NamedTuple):
    """One end of the link: its namespace, its address there, and the name of its device."""

    namespace: str
    address: str
    device: str


def burst_bytes(rate_mbit: int) -> int:
    """The most bytes that an end sends at once after a rest, faster than the link: what it carries
    in 2 ms, for a timer is no more exact, or 4 KiB.
    """
    return max(_LEAST_BURST_BYTES, rate_mbit * 125 * _BURST_MS)


@contextlib.contextmanager
def shaped_link(rate_mbit: int) -> Iterator[tuple[End, End]]:
    """A link of so many Mbit/s each way.

    Raises:
        InvalidConfig: this process may not make one.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        reason = f"{' and '.join(missing)} are missing" if missing else "this user is not root"
        raise InvalidConfig(
            f"a link between network namespaces cannot be made: {reason}; run the benchmark as "
            "root where iproute2 is installed, for example in a container with --cap-add NET_ADMIN"
        )
    first, second = (
        End(f"pushpull-{os.getpid()}-{at}", address, f"pp{os.getpid() % 10**6}{at}")
        for at, address in enumerate(_ADDRESSES)
    )
    with contextlib.ExitStack() as stack:
        for end in (first, second):
            _run("ip", "netns", "add", end.namespace)
            stack.callback(_run, "ip", "netns", "del", end.namespace)
        _run("ip", "link", "add", first.device, "netns", first.namespace, "type", "veth",
             "peer", "name", second.device, "netns", second.namespace)  # fmt: skip
        for end in (first, second):
            inside = ("ip", "-n", end.namespace)
            _run(*inside, "addr", "add", f"{end.address}/30", "dev", end.device)
            for device in ("lo", end.device):
                _run(*inside, "link", "set", device, "up")
            _run("tc", "-n", end.namespace, "qdisc", "add", "dev", end.device, "root", "tbf",
                 "rate", f"{rate_mbit}mbit", "burst", f"{burst_bytes(rate_mbit)}b",
                 "latency", f"{_QUEUE_MS}ms")  # fmt: skip
        yield first, second


def within(namespace: str) -> tuple[str, ...]:
    """Put before a command, this runs it in a namespace, as one process."""
    return "ip", "netns", "exec", namespace


class Traffic(NamedTuple):
    """Bytes that a device has sent and received, and packets, both ways."""

    sent_bytes: int
    received_bytes: int
    packet_count: int


def traffic(device: str) -> Traffic:
    """All traffic of a device of this process's namespace."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            fields = numbers.split()
            return Traffic(int(fields[8]), int(fields[0]), int(fields[1]) + int(fields[9]))
    raise InvalidConfig(f"there is no network device '{device}' here")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidConfig(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
