"""The ready file: a role tells its starter by it that it serves, and at which addresses."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

from ps_core.errors import InvalidConfig, Recovering

_FOR_NOW = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM})
"""Failures of a disk, that another start may not find; all others are a wrong path."""


def write_ready_file(path: Path, address: str, http_address: str) -> None:
    """Write ``{"address": ..., "http_address": ...}`` to `path`. It is renamed into place, so that
    a reader sees all of it or no file. Blocking: writes the file.

    Raises:
        InvalidConfig: there can be no such file.
        Recovering: the disk is full or fails, so that another start may go well.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    content = {"address": address, "http_address": http_address}
    try:
        unfinished.write_text(json.dumps(content) + "\n")
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # as where it could not be made
            unfinished.unlink()
        kind = Recovering if error.errno in _FOR_NOW else InvalidConfig
        raise kind(f"the ready file {path} cannot be written: {error.strerror}") from error
