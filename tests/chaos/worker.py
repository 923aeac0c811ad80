"""`python -m tests.chaos.worker WORLD`: a worker that pushes and reads until SIGUSR1.

Worker 0 begins a step when the one before is committed, so that its first commit after a fault
tells when that was possible again; the others have several under way.

It prints JSON lines: when steps were begun and committed, and in the end how many there were and
whether the values have exactly those of all workers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import ps_worker as ps
from ps_runtime.system.process_end import die_with_parent_if_asked
from tests.integration.counted_steps import Counted, Load

_REPORT_S = 0.1
_BLOCK_COUNT = 24
"""Each in a range of its own, so that every server has some: two cores have enough to do."""


def main() -> None:
    """Run one worker."""
    world = int(sys.argv[1])
    die_with_parent_if_asked(os.environ)
    with ps.connect(request_deadline_s=120.0) as client:
        counted = Counted(world, _BLOCK_COUNT)
        table = counted.create(client, "counted")
        load = Load(counted, client, table, in_flight=1 if client.rank == 0 else 4)
        steps = Steps()
        load.on_commit = steps.add
        signal.signal(signal.SIGUSR1, lambda *_: load.stop())
        reporting = threading.Thread(target=steps.report, daemon=True)
        reporting.start()
        try:
            taken = load.run()
        except (AssertionError, ps.PushpullError) as error:
            say(failure=f"{type(error).__name__}: {error}")
            client.close(leave=False)
            sys.exit(1)
        steps.end()
        reporting.join()
        say(taken=taken)
        done = client.create_table("done", 1, optimizer=ps.SGD(lr=1.0))
        client.push_pull(done, [1.0])  # BSP: every worker has taken its last step
        found = counted.steps(client.pull(table))
        say(found=sorted(map(list, {tuple(row) for row in found.tolist()})))


class Steps:
    """Steps on their way to whoever reads what this process prints."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: list[tuple[float, float]] = []
        self._over = threading.Event()

    def add(self, begun_s: float, ended_s: float) -> None:
        """One was committed."""
        with self._lock:
            self._times.append((round(begun_s, 4), round(ended_s, 4)))

    def report(self) -> None:
        """Print them from time to time, until `end`."""
        is_over = False
        while not is_over:
            is_over = self._over.wait(_REPORT_S)
            with self._lock:
                times, self._times = self._times, []
            if times:
                say(steps=times)

    def end(self) -> None:
        """No more come."""
        self._over.set()


def say(**what: Any) -> None:
    """Tell the driver, in a line."""
    # In one write, because stdout is not buffered: a warning of another thread could come before
    # the line's end.
    sys.stdout.write(f"chaos {json.dumps(what, separators=(',', ':'))}\n")


if __name__ == "__main__":
    main()
