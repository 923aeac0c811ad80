"""The machine's own limits: a copy in memory, and one TCP connection."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np

from ps_cli.bench.contenders.child import Actions, started
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


@contextlib.contextmanager
def tcp_loopback(byte_count: int) -> Iterator[Callable[[], float]]:
    """A function that sends one buffer in 1 MiB writes over one TCP connection, and returns the
    seconds until the peer, another process, has all of it in memory.
    """
    source = np.ones(byte_count, dtype=np.uint8).data
    with started(("ceilings:tcp_receiver", str(byte_count))) as (receiver,):
        port = receiver.do("port").result
        receiver.tell("receive")
        with socket.create_connection(("127.0.0.1", port)) as connection:

            def send() -> float:
                began_s = time.perf_counter()
                for begin in range(0, byte_count, MIB):
                    connection.sendall(source[begin : begin + MIB])
                connection.recv(1)
                return time.perf_counter() - began_s

            yield send
        receiver.answer()


@contextlib.contextmanager
def tcp_receiver(size: str) -> Iterator[Actions]:
    """Receives buffers of this size, and answers each with a byte."""
    target = np.zeros(int(size), dtype=np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def receive() -> None:
            received_bytes = 0
            with server.accept()[0] as connection:
                while count := connection.recv_into(target[received_bytes : received_bytes + MIB]):
                    received_bytes += count
                    if received_bytes == len(target):
                        connection.sendall(b"1")
                        received_bytes = 0

        yield {"port": lambda: port, "receive": receive}
