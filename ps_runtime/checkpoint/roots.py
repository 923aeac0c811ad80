"""The roots that a restore's URL must lie in, because the scheduler's process opens it.

Rules:
    - A local path lies in a root with symbolic links and `..` resolved.
    - Any other URL begins with the root's and goes on with plain names, because filesystems differ
      about `..`, escapes and chains of URLs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ps_core.errors import NotPermitted
from ps_runtime.checkpoint.directory import locate

_LOCAL = ("file://", "local://")
_PLAIN = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[\w.@=+-]+)*/?", re.ASCII)


def check_root(url: str, roots: Sequence[str]) -> None:
    """Raise NotPermitted for a URL outside all roots (URLs or paths; empty ones do not count),
    InvalidConfig for one that is empty or not printable. Blocking: resolves links.
    """
    if not any(_is_within(url, root) for root in roots if root):
        there = ", ".join(filter(None, roots)) or "nowhere"
        raise NotPermitted(
            f"a restore from {url[:200]!r}, which is in none of the places that the scheduler was "
            f"started with ({there}); start it with --checkpoint-roots"
        )


def _is_within(url: str, root: str) -> bool:
    own, its = _local_path(url), _local_path(root)
    if its is None:
        base = root.rstrip("/")
        return url.startswith(base) and _PLAIN.fullmatch(url[len(base) :]) is not None
    if own is None:
        return False
    try:
        path, base = os.path.realpath(own), os.path.realpath(its)
    except (OSError, ValueError):  # too many links, or a character that no path has
        return False
    return os.path.commonpath((path, base)) == base


def _local_path(url: str) -> str | None:
    """The path of a URL without a protocol, or with the local one; None for others."""
    if "::" in url or ("://" in url and not url.startswith(_LOCAL)):
        return None
    return locate(url).path  # resolved as it would be opened, with `~` and `file:`
