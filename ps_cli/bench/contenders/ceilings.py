"""The machine's own limits: a copy in memory, and one TCP connection."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable

import numpy as np

from ps_cli.bench.contenders.child import obey, open_answers
from ps_cli.bench.instruments.sampling import MIB


def memcpy(byte_count: int) -> Callable[[], float]:
    """A function that copies between two existing buffers and returns the seconds."""
    source = np.ones(byte_count, dtype=np.uint8)
    target = np.zeros(byte_count, dtype=np.uint8)

    def copy() -> float:
        began_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began_s

    return copy


class TcpSender:
    """Sends one buffer in 1 MiB writes over one connection; the peer acknowledges all of it.

    Args:
        address: the host and port of a `_receive`.
        byte_count: the size of the buffer.
    """

    def __init__(self, address: tuple[str, int], byte_count: int) -> None:
        self._connection = socket.create_connection(address)
        self._source = np.ones(byte_count, dtype=np.uint8).data

    def send(self) -> float:
        """Send the buffer; the seconds until the peer has all of it in memory."""
        began_s = time.perf_counter()
        for begin in range(0, len(self._source), MIB):
            self._connection.sendall(self._source[begin : begin + MIB])
        self._connection.recv(1)
        return time.perf_counter() - began_s

    def close(self) -> None:
        """End the connection, and with it the peer."""
        self._connection.close()


def main() -> None:
    """`BYTES`: receive buffers of this size, and answer each with a byte."""
    byte_count = int(sys.argv[1])
    answers = open_answers()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                _receive(connection, byte_count)

        obey(answers, {"port": lambda: port, "receive": accept})


def _receive(connection: socket.socket, byte_count: int) -> None:
    target = np.zeros(byte_count, dtype=np.uint8).data
    received_bytes = 0
    while count := connection.recv_into(target[received_bytes : received_bytes + MIB]):
        received_bytes += count
        if received_bytes == byte_count:
            connection.sendall(b"1")
            received_bytes = 0


if __name__ == "__main__":
    main()
