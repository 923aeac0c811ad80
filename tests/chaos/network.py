"""A network of its own for a cluster, whose servers can be cut off one by one, or one way.

The whole run lives in a network namespace and a mount namespace that end with it: nothing of it is
seen outside, and nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_INSIDE = "CHAOS_INSIDE"
_BRIDGE = "chaos"
_SUBNET = "10.77.0"
_TOOLS = ("unshare", "ip", "iptables")

WAYS = {"in": ("INPUT",), "out": ("OUTPUT",), "both": ("INPUT", "OUTPUT")}
"""What is dropped at a server that is cut off."""


def enter() -> str:
    """Run this program again in namespaces of its own; returns there, with "", or at once with the
    reason why it cannot be done.
    """
    if os.environ.get(_INSIDE):
        return ""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    refusals = []
    for options in ([], ["--user", "--map-root-user"]):
        command = ["unshare", "--net", "--mount", *options, "--"]
        tried = subprocess.run([*command, "sh", "-ec", _TRIAL], capture_output=True, text=True)
        if tried.returncode == 0:
            os.environ[_INSIDE] = "1"
            main = sys.modules["__main__"].__spec__
            name = main.name.removesuffix(".__main__") if main is not None else "tests.chaos"
            again = [*command, sys.executable, "-m", name, *sys.argv[1:]]
            os.execvp("unshare", again)  # noqa: S606 - itself
        refusals.append(tried.stderr.strip().splitlines()[-1] if tried.stderr else "refused")
    return "; ".join(dict.fromkeys(refusals))


_TRIAL = """
mount -t tmpfs none /run
ip netns add trial
ip link add trial-a type veth peer name trial-b
ip link set trial-b netns trial
ip link add trial-c type bridge
ip netns exec trial iptables -A INPUT -s 10.77.0.1 -j DROP
"""


class Network:
    """A bridge, and a namespace for each server. Only inside `enter`."""

    address = f"{_SUBNET}.1"

    def __init__(self) -> None:
        self._count = 0
        _run("mount", "-t", "tmpfs", "none", "/run")
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{self.address}/24", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")

    def add(self) -> tuple[str, str]:
        """Another server's namespace: its name, and its address."""
        self._count += 1
        name, address = f"s{self._count}", f"{_SUBNET}.{self._count + 1}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"{name}b", "type", "veth", "peer", "name", f"{name}e")
        _run("ip", "link", "set", f"{name}e", "netns", name)
        _run("ip", "link", "set", f"{name}b", "master", _BRIDGE, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", f"{name}e")
        _run("ip", "-n", name, "link", "set", f"{name}e", "up")
        return name, address

    @contextmanager
    def cut(self, name: str, way: str, peer: str = "") -> Iterator[None]:
        """Drop what goes to, or comes from, a server; with `peer`, only this address's."""
        rules = [(chain, *_match(chain, peer)) for chain in WAYS[way]]
        for chain, *match in rules:
            _run("ip", "netns", "exec", name, "iptables", "-A", chain, *match, "-j", "DROP")
        try:
            yield
        finally:
            for chain, *match in rules:
                _run("ip", "netns", "exec", name, "iptables", "-D", chain, *match, "-j", "DROP")


def _match(chain: str, peer: str) -> Sequence[str]:
    if not peer:
        return ("!", "-i" if chain == "INPUT" else "-o", "lo")
    return ("-s" if chain == "INPUT" else "-d", peer)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
