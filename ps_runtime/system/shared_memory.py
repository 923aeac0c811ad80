"""Memory that processes of one host share: anonymous files (memfd), sealed and reserved.

A segment has no name in any file system: it goes away with the last process that holds it, however
that ends. Its owner alone writes to it.

Rules:
    - A segment is sealed against growing, shrinking and further seals before anybody else sees it,
      so that no mapping of it can ever lie beyond its end (SIGBUS).
    - Its pages are reserved when it is made: a machine without memory refuses then, and not at the
      first access.
    - After its owner has mapped it, it is sealed against future writes: nobody can map it for
      writing, and nobody, its owner included, can punch holes into it and so take pages away.
    - Whoever maps another's segment checks all of that first, and the seals before the rest, which
      nobody can change behind them.

Reference: memfd_create(2), fcntl(2) on file sealing.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.errors import InvalidConfig

Bytes = npt.NDArray[np.uint8]

_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python names it from 3.13 on
_SEALS = (
    fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
    if hasattr(fcntl, "F_SEAL_GROW")
    else 0
)
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the file system's own is."""


def allocate(name: str, byte_count: int) -> tuple[int, Any]:
    """New memory of this process that others may map for reading: its file, and its mapping.

    The mapping is a buffer, and ends with the last array that looks into it.

    Args:
        name: for people, in /proc; it names nothing.
        byte_count: its size.

    Raises:
        OSError: there is no memory for it, or the system has no such files.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, byte_count)
        memory = _map(fd, byte_count, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_POPULATE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, memory


def release(fd: int) -> None:
    """Drop the file; the memory stays as long as anybody has it mapped."""
    os.close(fd)


class Segment:
    """Memory of this process that others may read, as an array; unmapped with its last view.

    Args, Raises: as `allocate`.
    """

    def __init__(self, name: str, byte_count: int) -> None:
        self.byte_count = byte_count
        self.fd, memory = allocate(name, byte_count)
        self.array: Bytes = np.frombuffer(memory, np.uint8)

    def close(self) -> None:
        """Drop the file. Idempotent."""
        if self.fd >= 0:
            release(self.fd)
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
    # First the seals: they hold what comes after, and a file system of its owner's is not asked.
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise InvalidConfig(
            f"a shared segment has seals {seals:#x}; expected a memfd with {_SEALS:#x}: sealed "
            "against growing, shrinking, future writes and further seals"
        )
    status = os.fstat(fd)
    if status.st_size != byte_count or byte_count <= 0:
        raise InvalidConfig(
            f"a shared segment has {status.st_size} bytes; its owner said {byte_count}"
        )
    reserved_bytes = status.st_blocks * _BLOCK_BYTES
    if reserved_bytes < byte_count:
        raise InvalidConfig(
            f"a shared segment of {byte_count} bytes has pages for {reserved_bytes}; expected all "
            "of them to be reserved"
        )
    memory = np.frombuffer(_map(fd, byte_count, mmap.PROT_READ), np.uint8)
    memory.flags.writeable = False
    return memory


def _map(fd: int, byte_count: int, protection: int, flags: int = 0) -> Any:
    """Map a file: a buffer, unmapped with the last array that looks into it.

    `mmap.mmap` would keep a descriptor of it as long (before Python 3.13): one for each table in
    every process, where a process may often have no more than 1024.
    """
    address = _libc.mmap(None, byte_count, protection, mmap.MAP_SHARED | flags, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_uint8 * byte_count).from_address(address)
    unmapping = weakref.finalize(memory, _libc.munmap, address, byte_count)
    unmapping.atexit = False  # threads may still look into it; the system unmaps what a process had
    return memory


def receive(connection: socket.socket, byte_count: int, *, takes_file: bool) -> tuple[bytes, int]:
    """The next message of a Unix socket, and the file descriptor that came with it.

    As `socket.recv_fds`, which leaves the descriptors open in programs that this process starts.

    Args:
        connection: the socket, of a type that keeps messages apart.
        byte_count: the most that a message has; what is beyond is lost.
        takes_file: whether to take a descriptor at all; what is not taken is closed by the system.

    Returns:
        The message, empty at the connection's end, and the descriptor, which is the caller's to
        close; -1 for none.

    Raises:
        OSError: the connection is broken, or nothing is there.
    """
    space = socket.CMSG_LEN(array.array("i").itemsize) if takes_file else 0
    message, extras, _, _ = connection.recvmsg(byte_count, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and content:
            return message, array.array("i", content)[0]
    return message, -1
