"""A thread that completes tuples, while a test looks at all objects."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

_LOOKED_AT, _ROUNDS = 200_000, 20
"""A look takes long enough for the threads to take turns."""


def errors_beside(look: Callable[[], object]) -> list[SystemError]:
    """The errors of a thread that completes tuples while this one looks, again and again: a tuple
    cannot be completed while somebody else refers to it.
    """
    errors: list[SystemError] = []
    is_over = threading.Event()

    def make_tuples() -> None:
        while not is_over.is_set():
            try:
                tuple(each + 1 for each in range(12))
            except SystemError as error:
                errors.append(error)

    thread, was_enabled = threading.Thread(target=make_tuples), gc.isenabled()
    gc.disable()  # what is new stays in generation 0
    looked_at: list[list[None]] = [[] for _ in range(_LOOKED_AT)]
    thread.start()
    try:
        for _ in range(_ROUNDS):
            look()
    finally:
        is_over.set()
        thread.join()
        looked_at.clear()
        if was_enabled:
            gc.enable()
    return errors
