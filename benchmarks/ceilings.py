"""The physical limits that transfers are measured against."""

from __future__ import annotations

import socket
import threading

import numpy as np

from benchmarks.measure import rate_samples

MESSAGE_BYTES = 1024 * 1024


def memcpy(byte_count: int, round_count: int) -> list[float]:
    """GB/s of a copy between two buffers that exist already."""
    source = np.ones(byte_count, dtype=np.uint8)
    target = np.zeros(byte_count, dtype=np.uint8)
    return rate_samples(lambda: np.copyto(target, source), byte_count, round_count)


def tcp_loopback(byte_count: int, round_count: int) -> list[float]:
    """GB/s of 1 MiB writes over one TCP connection on this machine, acknowledged at the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = threading.Thread(target=_receive, args=(server, byte_count))
        receiver.start()
        with socket.create_connection(server.getsockname()) as connection:
            message = bytes(MESSAGE_BYTES)

            def send() -> None:
                for _ in range(byte_count // MESSAGE_BYTES):
                    connection.sendall(message)
                connection.recv(1)

            samples = rate_samples(send, byte_count, round_count)
        receiver.join()
    return samples


def _receive(server: socket.socket, byte_count: int) -> None:
    """Read rounds of `byte_count`, answer each with one byte, until the sender closes."""
    buffer = bytearray(MESSAGE_BYTES)
    connection, _ = server.accept()
    with connection:
        received_bytes = 0
        while count := connection.recv_into(buffer):
            received_bytes += count
            if received_bytes == byte_count:
                connection.sendall(b"1")
                received_bytes = 0
