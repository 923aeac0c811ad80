"""File descriptors that are no segments, for tests of those who must refuse them."""

from __future__ import annotations

import os
import tempfile


def pipe_end() -> int:
    """The reading end of a pipe; the caller closes it."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end


def plain_file(byte_count: int) -> int:
    """A regular file of that size, without a name; the caller closes it."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(byte_count))
        file.flush()
        return os.dup(file.fileno())
