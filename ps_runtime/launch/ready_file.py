"""The ready file: a role tells its starter by it that it serves, and at which addresses."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ps_core.errors import InvalidConfig


def write_ready_file(path: Path, address: str, http_address: str) -> None:
    """Write ``{"address": ..., "http_address": ...}`` to `path`; InvalidConfig if that fails. It is
    renamed into place, so that a reader sees all of it or no file. Blocking: writes the file.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    content = {"address": address, "http_address": http_address}
    try:
        unfinished.write_text(json.dumps(content) + "\n")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise InvalidConfig(f"the ready file {path} cannot be written: {error.strerror}") from error
