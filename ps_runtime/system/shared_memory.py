"""Memory that processes of one host share: anonymous files (memfd), sealed and reserved.

A segment has no name in any file system: it goes with its last holder. Only its owner writes.

Rules:
    - A segment is sealed against growing, shrinking and further seals before another process sees
      it, so that no mapping of it can lie beyond its end (SIGBUS).
    - Its pages are reserved when it is made: a lack of memory shows then, not at first access.
    - After its owner has mapped it, it is sealed against future writes: no process can map it for
      writing, and none, its owner included, can punch holes into it.
    - A process that maps another's segment checks all of that first. It checks the seals before
      the rest, because no process can change a sealed segment afterwards.

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
"""The unit of st_blocks on every file system."""


def allocate(name: str, byte_count: int) -> tuple[int, Any]:
    """Allocate memory that other processes may map for reading; returns its file and its mapping,
    a buffer that ends with the last array over it. `name` is for people, in /proc. OSError if there
    is no such memory, or the system has no memfd.
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


class SharedSegment:
    """Memory of this process that others may read, as an array; made as by `allocate`."""

    def __init__(self, name: str, byte_count: int) -> None:
        self.byte_count = byte_count
        self.fd, memory = allocate(name, byte_count)
        self.array: Bytes = np.frombuffer(memory, np.uint8)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)  # the memory stays until the last mapping ends
            self.fd = -1


def map_segment(fd: int, byte_count: int) -> Bytes:
    """Map another process's segment for reading; it is unmapped with the last view of it. The
    caller closes its file `fd`; `byte_count` is its size, as its owner says.

    Shapes:
        result: flat, `byte_count` long, not writable. Its owner may change it at any moment.

    Raises:
        InvalidConfig: it is no sealed memfd of that size with all pages reserved.
        OSError: it cannot be mapped.
    """
    # The seals come first: they hold what is checked next, and no owner's file system is asked.
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise InvalidConfig(
            f"a shared segment has seals {seals:#x}; expected a memfd with {_SEALS:#x}: sealed "
            "against growth, shrinking, future writes and further seals"
        )
    status = os.fstat(fd)
    if status.st_size != byte_count or byte_count <= 0:
        raise InvalidConfig(
            f"a shared segment has {status.st_size} bytes; its owner said {byte_count}"
        )
    reserved_bytes = status.st_blocks * _BLOCK_BYTES
    if reserved_bytes < byte_count:
        raise InvalidConfig(
            f"a shared segment of {byte_count} bytes has pages for {reserved_bytes}; expected "
            "pages for all"
        )
    memory = np.frombuffer(_map(fd, byte_count, mmap.PROT_READ), np.uint8)
    memory.flags.writeable = False
    return memory


def _map(fd: int, byte_count: int, protection: int, flags: int = 0) -> Any:
    """Map a file as a buffer, which is unmapped with the last array over it.

    `mmap.mmap` keeps a descriptor open as long (before Python 3.13): one for each table in every
    process, where a process may often have no more than 1024.
    """
    address = _libc.mmap(None, byte_count, protection, mmap.MAP_SHARED | flags, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_uint8 * byte_count).from_address(address)
    unmapping = weakref.finalize(memory, _libc.munmap, address, byte_count)
    unmapping.atexit = False  # threads may still read it; the system unmaps at the process's end
    return memory


def receive(connection: socket.socket, byte_count: int, *, takes_file: bool) -> tuple[bytes, int]:
    """The next message of a Unix socket that separates messages, empty at the connection's end, and
    the file descriptor that came with it, which the caller closes; -1 for none.

    Of a message, bytes beyond `byte_count` are lost. Unless it `takes_file`, the system closes a
    descriptor that comes. `socket.recv_fds` leaves descriptors open in programs that this process
    starts. OSError if the connection is broken, or nothing is there.
    """
    space = socket.CMSG_LEN(array.array("i").itemsize) if takes_file else 0
    message, extras, _, _ = connection.recvmsg(byte_count, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and content:
            return message, array.array("i", content)[0]
    return message, -1
