"""`python -m tests.integration.counted_server`: a server that says which of our files ran.

It is `ps_server` with a profile function in each of its threads. Who sets `COUNTED_SOCKET` listens
there; the server comes, and answers a line `begin` or `end`, the latter with the files since.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("ps_core", "ps_runtime", "ps_server", "ps_worker")
SOCKET = "COUNTED_SOCKET"


class RunFiles:
    """Which files of our packages have functions that run in this process, in threads that begin
    after `watch`, and in the one that calls it.
    """

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._has_left = False

    def watch(self) -> None:
        """Look from now on."""
        threading.setprofile(self._look)
        self.watch_thread()

    def watch_thread(self) -> None:
        """Look at the calling thread, which may have begun before `watch`."""
        sys.setprofile(self._look)

    def leave(self) -> None:
        """Look no more."""
        self._has_left = True
        sys.setprofile(None)
        threading.setprofile(None)

    def begin(self) -> None:
        """Forget what ran until now."""
        self._codes = set()

    @property
    def files(self) -> set[str]:
        """The files that ran since `begin`, as paths in the repository."""
        paths = (Path(code.co_filename) for code in tuple(self._codes))
        ours = {path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT)}
        return {str(path) for path in ours if path.parts[0] in PACKAGES}

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if self._has_left:
            sys.setprofile(None)  # of the thread that runs
        elif event == "call":
            self._codes.add(frame.f_code)


def answer(there: socket.socket, run: RunFiles) -> None:
    """Do what the lines say that come, until no more do."""
    with there, there.makefile("rw") as lines:
        for line in lines:
            found = sorted(run.files) if line == "end\n" else []
            run.begin()
            lines.write(json.dumps(found) + "\n")
            lines.flush()


def main() -> None:
    """Run the server; the thread that answers is not looked at."""
    run = RunFiles()
    there = socket.socket(socket.AF_UNIX)
    there.connect(os.environ[SOCKET])
    threading.Thread(target=answer, args=(there, run), daemon=True).start()
    run.watch()
    from ps_server import process

    process.main()


if __name__ == "__main__":
    main()
