"""A process: plain writes to a filesystem, the ceiling of a checkpoint.

A file is written in pieces of 1 MiB, with the CRC-32 of each and one fsync at the end. Each thread
takes the next piece, as the threads of a checkpoint do.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.instruments.sampling import MIB

THREAD_COUNTS = (1, 2)
_SOURCE_BYTES = 256 * MIB
"""More than the caches hold: pieces come from memory, as those of a table do."""


def action_of(thread_count: int) -> str:
    return f"write {thread_count}"


def _write(path: Path, source: memoryview, byte_count: int, thread_count: int) -> float:
    """Write a file and remove it; the seconds until it was durable."""
    places = iter(range(0, byte_count, MIB))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        began_s = time.perf_counter()
        with ThreadPoolExecutor(thread_count) as threads:
            for writing in [
                threads.submit(_write_pieces, descriptor, source, byte_count, places)
                for _ in range(thread_count)
            ]:
                writing.result()
        os.fsync(descriptor)
        return time.perf_counter() - began_s
    finally:
        os.close(descriptor)
        path.unlink()


def _write_pieces(
    descriptor: int, source: memoryview, byte_count: int, places: Iterator[int]
) -> None:
    """Write the remaining pieces; threads share `places`, because its `next` is atomic."""
    for begin in places:
        at = begin % len(source)
        piece = source[at : at + min(MIB, byte_count - begin)]
        zlib.crc32(piece)
        while piece:
            count = os.pwrite(descriptor, piece, begin)
            piece, begin = piece[count:], begin + count


@contextlib.contextmanager
def disk_writes(folder: str, size: str) -> Iterator[Actions]:
    byte_count = int(size)
    pages = max(MIB, min(_SOURCE_BYTES, byte_count // MIB * MIB))
    source = memoryview(np.random.default_rng(1).bytes(pages))
    path = Path(folder, "ceiling")
    yield {
        action_of(count): partial(_write, path, source, byte_count, count)
        for count in THREAD_COUNTS
    }
