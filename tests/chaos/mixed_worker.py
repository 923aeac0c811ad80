"""`python -m tests.chaos.mixed_worker WORLD`: a worker of tables of every kind, until SIGUSR1.

It prints what `tests.chaos.worker` does, of one of its tables, and fails if any table is wrong.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch

import ps_worker as ps
from ps_runtime.system.process_end import die_with_parent_if_asked
from tests.chaos.features import CountedTable, Features
from tests.chaos.worker import Steps, say

_LOOKS_S = 0.1
_ENDS_S = 90.0


def main() -> None:
    """Run one worker."""
    world = int(sys.argv[1])
    die_with_parent_if_asked(os.environ)
    torch.set_num_threads(1)
    told = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: told.set())
    with ps.connect(request_deadline_s=120.0) as client:
        features = Features(client, world)
        counted = features.of["counted asp"]
        assert isinstance(counted, CountedTable)
        steps = Steps()
        counted.load.on_commit = steps.add
        reporting = threading.Thread(target=steps.report, daemon=True)
        reporting.start()
        features.start()
        while not told.is_set() and not features.failed.wait(_LOOKS_S):
            pass
        if not features.failures:
            features.finish(_ENDS_S)
        steps.end()
        reporting.join()
        if features.failures:
            say(failure="; ".join(features.failures))
            client.close(leave=False)
            sys.exit(1)
        say(taken=counted.pushed)
        say(found=counted.found())


if __name__ == "__main__":
    main()
