"""A limit on the length of files, in place of a full disk."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Variables of a process with a limit. Python 3.11 does not notice that a module's bytecode was cut
by one, and every later process would fail to read it.
"""


@contextmanager
def no_file_above(byte_count: int) -> Iterator[None]:
    """No file of this process gets longer: a write that would is short, and the next one fails."""
    before, wrote_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (byte_count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = wrote_none


def limiting(byte_count: int) -> partial[None]:
    """Of `preexec_fn`: the same for a process that is about to be started, with `NO_BYTECODE`."""
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (byte_count, byte_count))
