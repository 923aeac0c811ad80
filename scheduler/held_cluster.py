"""`python -m scheduler.held_cluster DIR`: exit code 1 if the journal in DIR has no cluster, else 0.

`docker-compose.yml` asks before it counts the containers of a new cluster. A journal that cannot be
read may have one; its scheduler names the reason.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from ps_core.errors import PushpullError
from scheduler.edge.sqlite_store import SqliteStore


def may_hold_cluster(directory: Path) -> bool:
    """False if a scheduler with this journal begins a new cluster. Blocking: reads the journal."""
    try:
        with contextlib.closing(SqliteStore(directory)) as store:
            return bool(store.read())
    except PushpullError:
        return True


if __name__ == "__main__":
    sys.exit(not may_hold_cluster(Path(sys.argv[1])))
