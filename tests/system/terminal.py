"""A line that was typed, its process, and what it prints."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading

STARTED_WITHIN_S = 120.0
ENDED_WITHIN_S = 90.0


class Terminal:
    """A line that was typed at a machine, what it prints, and its process."""

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        self.process = process
        self._lines = [f"$ {line}\n"]
        self._arrived = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._arrived:
                    self._lines.append(line)
                    self._arrived.notify_all()
        with self._arrived:
            self._has_ended = True
            self._arrived.notify_all()

    @property
    def text(self) -> str:
        with self._arrived:
            return "".join(self._lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until it shows the pattern."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, "".join(self._lines))

        with self._arrived:
            self._arrived.wait_for(lambda: self._has_ended or found(), STARTED_WITHIN_S)
            match = found()
        assert match, f"{pattern!r} did not come\n{self.text}"
        return match

    def end(self, within_s: float) -> int:
        """Wait for its end, and all that it prints."""
        code = self.process.wait(within_s)
        self._reader.join(ENDED_WITHIN_S)
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.end(ENDED_WITHIN_S)
