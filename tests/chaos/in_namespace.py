"""`python -m tests.chaos.in_namespace NAME MODULE ...`: a role in a network namespace.

It becomes the role, so that signals and the parent's end reach it as they do elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWNET = 0x40000000


def main() -> None:
    """Enter the namespace, and become the role."""
    name, *role = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"network namespace {name}: {os.strerror(number)}")
    os.close(descriptor)
    os.execv(sys.executable, [sys.executable, "-P", "-m", *role])  # noqa: S606 - the role


if __name__ == "__main__":
    main()
