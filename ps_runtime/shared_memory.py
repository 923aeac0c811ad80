"""Memory that processes of one host share: anonymous files (memfd), sealed and reserved.

A segment has no name in any file system: it goes away with the last process that holds it, however
that ends. Its owner alone writes to it.

Rules:
    - A segment is sealed against growing, shrinking and further seals before anybody else sees it,
      so that no mapping of it can ever lie beyond its end (SIGBUS).
    - Its pages are reserved when it is made: a machine without memory refuses then, and not at the
      first write.
    - After the owner has mapped it, nobody can map it for writing.
    - Whoever maps another's segment checks the first two rules first.

Reference: memfd_create(2), fcntl(2) on file sealing.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.errors import InvalidConfig

Bytes = npt.NDArray[np.uint8]

_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python names it from 3.13 on
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_GROW") else 0
_BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the file system's own is."""


class Segment:
    """Memory of this process that others may read.

    Args:
        name: for people, in /proc; it names nothing.
        byte_count: its size.

    Raises:
        OSError: there is no memory for it, or the system has no such files.
    """

    def __init__(self, name: str, byte_count: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memfd")
        self.byte_count = byte_count
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, byte_count)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            # Unmapped with the last array that looks into it.
            memory = mmap.mmap(self.fd, byte_count, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            seals = _FIXED_SIZE | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self.fd)
            raise
        self.array: Bytes = np.frombuffer(memory, np.uint8)

    def close(self) -> None:
        """Drop the file; the memory stays as long as anybody has it mapped. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_segment(fd: int, byte_count: int) -> Bytes:
    """Another process's segment, mapped for reading; unmapped with the last view of it.

    Args:
        fd: its file; the caller closes it.
        byte_count: the size that its owner says it has.

    Shapes:
        result: flat, `byte_count` long, not writable. Its owner may change it at any moment.

    Raises:
        InvalidConfig: it is no sealed memfd of that size with all pages reserved.
        OSError: it cannot be mapped.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != byte_count or byte_count <= 0:
        raise InvalidConfig(
            f"a shared segment has {status.st_size} bytes (mode {status.st_mode:o}); its owner "
            f"said {byte_count}"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _FIXED_SIZE != _FIXED_SIZE or not seals & fcntl.F_SEAL_SEAL:
        raise InvalidConfig(
            f"a shared segment has seals {seals:#x}; expected a memfd that is sealed against "
            "growing, shrinking and further seals"
        )
    reserved_bytes = status.st_blocks * _BLOCK_BYTES
    if reserved_bytes < byte_count:
        raise InvalidConfig(
            f"a shared segment of {byte_count} bytes has pages for {reserved_bytes}; expected all "
            "of them to be reserved"
        )
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    memory: Any = mmap.mmap(fd, byte_count, flags, mmap.PROT_READ)
    return np.frombuffer(memory, np.uint8)
