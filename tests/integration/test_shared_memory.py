"""Segments: their seals, what is refused in place of one, and how long the memory lives."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_core.errors import InvalidConfig
from ps_runtime.system.shared_memory import SharedSegment, map_segment, receive
from ps_worker.transport.lane import collected_count, empty_shared, find, is_live
from tests.integration.no_segments import pipe_end, plain_file

SIZE = 4 * mmap.PAGESIZE
FUTURE_WRITE = 0x10
FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
ALL_SEALS = FIXED_SIZE | FUTURE_WRITE | fcntl.F_SEAL_SEAL
KEEP_SIZE_AND_PUNCH_HOLE = 3  # of fallocate(2)

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    made = SharedSegment("test", SIZE)
    yield made
    made.close()


def _open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def _mapped(fd: int, byte_count: int, protection: int) -> mmap.mmap:
    return mmap.mmap(fd, byte_count, mmap.MAP_SHARED, protection)


def _punch(fd: int, byte_count: int) -> int:
    """Give pages of a file back; 0, or what the system says against it."""
    failed = _libc.fallocate(
        fd, KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(byte_count)
    )
    return ctypes.get_errno() if failed else 0


# --- the owner's side


def test_a_segment_is_zeros_that_only_its_owner_writes(segment: SharedSegment) -> None:
    theirs = map_segment(segment.fd, SIZE)
    assert theirs.shape == (SIZE,)
    assert not theirs.any()
    segment.array[:] = 7
    assert (theirs == 7).all()
    assert not theirs.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        theirs[0] = 1


def test_a_segment_keeps_its_size_and_its_pages(segment: SharedSegment) -> None:
    for byte_count in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, byte_count)
    assert _punch(segment.fd, SIZE) == errno.EPERM
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) == ALL_SEALS
    assert os.fstat(segment.fd).st_blocks * 512 >= SIZE


def test_nobody_else_gets_to_write(segment: SharedSegment) -> None:
    segment.array[:] = 7
    again = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
    try:
        for fd in (segment.fd, again):
            with pytest.raises(PermissionError):
                _mapped(fd, SIZE, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
        with _mapped(again, SIZE, mmap.PROT_READ) as theirs:
            address = ctypes.c_void_p(np.frombuffer(theirs, np.uint8).ctypes.data)
            both = mmap.PROT_READ | mmap.PROT_WRITE
            assert _libc.mprotect(address, ctypes.c_size_t(SIZE), both) != 0
            del address
    finally:
        os.close(again)
    assert (segment.array == 7).all()


def test_the_memory_outlives_its_file_and_its_owner(segment: SharedSegment) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source = (
        "import socket, sys; from ps_runtime.system.shared_memory import SharedSegment\n"
        f"made = SharedSegment('child', {SIZE}); made.array[:] = 9\n"
        "line = socket.socket(fileno=int(sys.argv[1]))\n"
        "socket.send_fds(line, [b'here'], [made.fd])\n"
        "line.recv(1); import os; os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", source, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child, ours:
        theirs.close()
        message, fd = receive(ours, 100, takes_file=True)
        assert (message, fd >= 0) == (b"here", True)
        assert not os.get_inheritable(fd), "a program that is started would keep the memory"
        memory = map_segment(fd, SIZE)
        os.close(fd)
        ours.send(b"x")
        assert child.wait(20) == -9
    assert (memory == 9).all()
    segment.array[:] = 5
    segment.close()
    segment.close()
    assert (segment.array == 5).all()


def test_a_segment_has_no_name_in_any_file_system(segment: SharedSegment) -> None:
    assert os.fstat(segment.fd).st_nlink == 0
    (line,) = re.findall(r".*memfd:test.*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    assert line.endswith("/memfd:test (deleted)")


def test_a_segment_goes_with_the_last_view_of_it() -> None:
    before = _open_files()
    made = SharedSegment("gone", SIZE)
    view = map_segment(made.fd, SIZE)[mmap.PAGESIZE :]
    made.close()
    assert _open_files() == before, "what is mapped needs no descriptor"
    del made
    maps = Path("/proc/self/maps")
    assert "memfd:gone" in maps.read_text(encoding="utf-8")
    del view
    assert "memfd:gone" not in maps.read_text(encoding="utf-8")


def test_without_memory_a_segment_is_refused_when_it_is_made() -> None:
    source = (
        "import os, resource; from ps_runtime.system.shared_memory import SharedSegment\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({SIZE - 1}, {SIZE - 1}))\n"
        "before = os.listdir('/proc/self/fd')\n"
        "try:\n"
        f"    SharedSegment('large', {SIZE})\n"
        "except OSError as error:\n"
        "    print(error.errno, before == os.listdir('/proc/self/fd'))\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    command = [sys.executable, "-B", "-c", source]  # it keeps no cut bytecode
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert said.stdout.split() == [str(errno.EFBIG), "True"]


# --- what is no segment


def _memfd(byte_count: int, seals: int, *, reserve: bool = True) -> int:
    fd = os.memfd_create("bad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, byte_count)
    if reserve and byte_count:
        os.posix_fallocate(fd, 0, byte_count)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


NO_SEGMENTS: dict[str, tuple[Callable[[], int], str]] = {
    "pipe": (pipe_end, "seals 0x0; expected a memfd"),
    "socket": (lambda: socket.socket().detach(), "seals 0x0; expected a memfd"),
    "folder": (lambda: os.open("/", os.O_RDONLY), "seals 0x0; expected a memfd"),
    "file": (lambda: plain_file(SIZE), "expected a memfd"),
    "memfd without seals": (lambda: _memfd(SIZE, 0), "seals 0x0"),
    "it may grow": (lambda: _memfd(SIZE, ALL_SEALS & ~fcntl.F_SEAL_GROW), "seals 0x13"),
    "it may shrink": (lambda: _memfd(SIZE, ALL_SEALS & ~fcntl.F_SEAL_SHRINK), "seals 0x15"),
    "its pages may go": (lambda: _memfd(SIZE, ALL_SEALS & ~FUTURE_WRITE), "seals 0x7"),
    "seals may come": (lambda: _memfd(SIZE, ALL_SEALS & ~fcntl.F_SEAL_SEAL), "seals 0x16"),
    "too small": (lambda: _memfd(SIZE - 1, ALL_SEALS), f"{SIZE - 1} bytes; its owner said {SIZE}"),
    "too large": (lambda: _memfd(SIZE + 1, ALL_SEALS), f"{SIZE + 1} bytes; its owner said {SIZE}"),
    "empty": (lambda: _memfd(0, ALL_SEALS), f"0 bytes; its owner said {SIZE}"),
    "sparse": (lambda: _memfd(SIZE, ALL_SEALS, reserve=False), "has pages for 0"),
}


@pytest.mark.parametrize("case", NO_SEGMENTS)
def test_what_is_no_segment_is_refused(case: str) -> None:
    make, words = NO_SEGMENTS[case]
    fd = make()
    try:
        with pytest.raises(InvalidConfig, match=re.escape(words)):
            map_segment(fd, SIZE)
        os.fstat(fd)  # it is the caller's to close
    finally:
        os.close(fd)


def test_a_segment_of_no_bytes_is_refused() -> None:
    fd = _memfd(0, ALL_SEALS)
    try:
        with pytest.raises(InvalidConfig, match="0 bytes"):
            map_segment(fd, 0)
    finally:
        os.close(fd)


# --- what comes with a message


def test_a_descriptor_that_is_not_wanted_is_not_taken() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(theirs, [b"unasked"], [0, 1, 2])
        before = _open_files()
        assert receive(ours, 100, takes_file=False) == (b"unasked", -1)
        assert _open_files() == before
        socket.send_fds(theirs, [b"three"], [0, 1, 2])
        message, fd = receive(ours, 100, takes_file=True)
        os.close(fd)
        assert message == b"three"
        assert _open_files() == before, "one is taken, the others are closed"
        theirs.send(b"plain")
        assert receive(ours, 100, takes_file=True) == (b"plain", -1)
        theirs.close()
        assert receive(ours, 100, takes_file=True) == (b"", -1)


# --- arrays in shared memory


def test_an_array_is_found_by_its_parts_as_long_as_it_lives() -> None:
    made = empty_shared((3, 1000))
    made[:] = np.arange(3000).reshape(3, 1000)
    found = find(made[1].data.cast("B"))
    assert found is not None
    buffer, offset = found
    assert offset == 4000
    theirs = map_segment(buffer.fd, buffer.byte_count).view(np.float32)
    assert theirs[1000] == 1000.0
    assert find(memoryview(bytearray(10))) is None
    before, view = collected_count(), made[2]
    del made
    assert is_live(buffer)
    del view
    assert not is_live(buffer)
    assert collected_count() == before + 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(buffer.fd)


def test_only_memory_inside_one_array_is_found_in_it() -> None:
    """A server would be told of bytes beyond the file, and close the connection."""
    made = empty_shared(100, np.uint8)
    buffer, _ = find(made.data) or pytest.fail("an array is not found")
    inside = {(begin, end) for begin in (0, 1, 99) for end in (1, 2, 99, 100) if begin < end}
    for begin, end in inside:
        assert find(made[begin:end].data) == (buffer, begin)
    for begin, byte_count in ((0, 101), (1, 100), (99, 2), (100, 1), (101, 1)):
        # The page that the array ends in is mapped to its end, and nothing is read.
        beyond = (ctypes.c_uint8 * byte_count).from_address(buffer.begin + begin)
        assert find(memoryview(beyond).cast("B")) is None, (begin, byte_count)
    before = (ctypes.c_uint8 * 100).from_address(buffer.begin - 1)
    assert find(memoryview(before).cast("B")) is None


@pytest.mark.parametrize("shape", [0, (3, 0), -1, 2**40])
def test_arrays_of_no_or_any_size_are_refused(shape: Any) -> None:
    with pytest.raises(OSError, match="bytes are asked for"):
        empty_shared(shape)


def test_arrays_may_be_collected_at_any_moment() -> None:
    """The collector comes while the arrays are being looked at, in the same thread."""
    kept = empty_shared(100)
    wanted = kept.data.cast("B")
    thresholds = gc.get_threshold()
    gc.collect()  # arrays in cycles that other tests left
    before = collected_count()
    try:
        for _ in range(50):
            gc.set_threshold(0)
            for _ in range(3):
                cycle: list[Any] = [empty_shared(100)]
                cycle.append(cycle)
            del cycle
            gc.set_threshold(1, 1, 1)
            found, one_more = find(wanted), empty_shared(100)
            assert found is not None
            assert found[1] == 0
            del one_more
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert collected_count() == before + 50 * 4
