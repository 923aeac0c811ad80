"""In a process of its own: what a filesystem takes of somebody who only writes, the ceiling of a
checkpoint.

Pieces of 1 MiB, the CRC-32 of each, one fsync at the end. With two threads each takes the next
piece that is free, as the threads of a checkpoint do.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from ps_cli.bench.contenders.child import obey, open_answers
from ps_cli.bench.instruments.sampling import MIB

THREAD_COUNTS = (1, 2)
_SOURCE_BYTES = 256 * MIB
"""More than the caches hold: what is written comes out of memory, as a table does."""


def action_of(thread_count: int) -> str:
    """What the child is told."""
    return f"write {thread_count}"


def _write(path: Path, source: memoryview, byte_count: int, thread_count: int) -> float:
    """Write a file, and remove it; the seconds until it was durable."""
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
    """Write pieces for as long as there are any; `next` of a range's iterator is one operation."""
    for begin in places:
        at = begin % len(source)
        piece = source[at : at + min(MIB, byte_count - begin)]
        zlib.crc32(piece)
        while piece:
            count = os.pwrite(descriptor, piece, begin)
            piece, begin = piece[count:], begin + count


def main() -> None:
    """`FOLDER BYTES`."""
    folder, size = sys.argv[1:]
    answers = open_answers()
    byte_count = int(size)
    pages = max(MIB, min(_SOURCE_BYTES, byte_count // MIB * MIB))
    source = np.random.default_rng(1).bytes(pages)
    path = Path(folder, "ceiling")
    actions: dict[str, Callable[[], object]] = {
        action_of(count): partial(_write, path, memoryview(source), byte_count, count)
        for count in THREAD_COUNTS
    }
    obey(answers, actions)


if __name__ == "__main__":
    main()
