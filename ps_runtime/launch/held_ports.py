"""Ports that stay a cluster's own while nobody listens on them: a scheduler that was started again
has to have its old one, and the kernel gives a free port to whoever asks next.
"""

from __future__ import annotations

import socket
import sys

_FREE_PORT = "0"


class HeldPorts:
    """Free ports, each held by a socket that is bound and never listens. On Linux, a process that
    asks for that very port gets it beside such a socket, and one that asks for any port does not;
    elsewhere nothing is held. Not thread-safe. The owner closes it.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def hold(self, listen: str) -> str:
        """`listen` with a held port in the place of port 0. Anything else is returned as it came:
        another port, and a host that is not this machine's, about which the role says more.
        """
        host, _, port = listen.rpartition(":")
        if port != _FREE_PORT or not sys.platform.startswith("linux"):
            return listen
        is_ipv6 = host.startswith("[")
        held = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host.strip("[]"), 0))
        except OSError:
            held.close()
            return listen
        self._sockets.append(held)
        return f"{host}:{held.getsockname()[1]}"

    def close(self) -> None:
        """Let the ports go. Idempotent."""
        while self._sockets:
            self._sockets.pop().close()
