"""The files and connections that a process may have open."""

from __future__ import annotations

import contextlib
import resource


def allow_most() -> int:
    """Have as many as the system allows; returns their number. A shell gives 1,024 of them, as for
    programs that wait with `select`.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # it allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
