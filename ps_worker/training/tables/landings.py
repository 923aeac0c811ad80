"""A thread that sees copies to the host end, so that what they complete leaves at once: a script
that waits for its device between backward and step, as `loss.item()` does, holds nothing up.

Device by device copies end in the order in which they began, so it waits for one after the other.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

from ps_worker.training.tables.device_copies import Arrival

_LOOK_S = 0.0005
"""Time between two looks at a copy; a block of 4 MB takes about as long."""


class Landings:
    """The copies of this process whose end is to be told. Thread-safe."""

    def __init__(self) -> None:
        self._copies: queue.SimpleQueue[tuple[Arrival, weakref.WeakMethod[Callable[[], None]]]]
        self._copies = queue.SimpleQueue()
        self._pid = 0
        self._lock = threading.Lock()

    def tell(self, arrival: Arrival, landed: Callable[[], None]) -> None:
        """Call the method `landed` when the copy has ended, unless its object is gone by then."""
        with self._lock:
            if self._pid != os.getpid():  # the first, or the first of a forked child
                self._pid, self._copies = os.getpid(), queue.SimpleQueue()
                threading.Thread(target=self._run, name="pushpull-landings", daemon=True).start()
        self._copies.put((arrival, weakref.WeakMethod(landed)))

    def _run(self) -> None:
        copies = self._copies
        while True:
            _tell(*copies.get())


def _tell(arrival: Arrival, reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    # `synchronize` would tell torch's sanitizer that the script had waited.
    with contextlib.suppress(RuntimeError):  # of the device; the script's own calls raise it
        while not arrival.query():
            time.sleep(_LOOK_S)
        landed = reference()
        if landed is not None:
            landed()


LANDINGS = Landings()
