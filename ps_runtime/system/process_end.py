"""The end of this process: by a signal, and never later than that of its starter; and the exit
codes that its starter tells apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping

from ps_core.errors import InvalidConfig

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DIE_WITH_PARENT = "PUSHPULL_DIE_WITH_PARENT"
PARENT_PID = "PUSHPULL_PARENT_PID"

REFUSED_EXIT_CODE = 2
"""The exit code of a role that was refused: started again with the same settings, it would be
refused again."""

WORKER_LOST_EXIT_CODE = 75
"""The exit code of a worker that ended because another one had (sysexits: a temporary failure)."""

_PR_SET_PDEATHSIG = 1


def end_at_sigterm_if_first() -> None:
    """End at SIGTERM also where this is a container's first process: until one handles a signal,
    the kernel drops those to it that would end another. Call it from the main thread.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def end_at_sigint() -> None:
    """End at SIGINT with no traceback until `unwind_at_sigint`, unless it is ignored. Call it from
    the main thread.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        is_first = os.getpid() == 1  # to which the kernel drops what nobody handles
        end = signal.SIG_DFL if not is_first else lambda number, _: os._exit(128 + number)
        signal.signal(signal.SIGINT, end)


def unwind_at_sigint() -> None:
    """SIGINT interrupts this process again, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: folders are removed, and processes that it started
    are stopped.
    """

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def wait_for_stop_signal() -> signal.Signals:
    """Wait for SIGTERM or SIGINT; returns the signal.

    Afterwards the signals have their default effect again, so that a second one ends the process at
    once. Call it from the main thread's loop.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, note, number)
    try:
        return await came
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        end_at_sigterm_if_first()


def die_with_parent() -> bool:
    """Have the kernel kill this process with SIGKILL when its parent ends; False if it cannot, as
    on other systems than Linux.

    The kernel sends it when the *thread* that started this process ends, so a parent starts roles
    from a thread that lives as long as they do. If the parent has ended before the call took
    effect, the process ends here.
    """
    if not sys.platform.startswith("linux"):
        return False
    parent = os.getppid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return False
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def dies_with_parent(env: Mapping[str, str]) -> bool:
    """True if this process is a launcher's, and ends when that does."""
    return env.get(DIE_WITH_PARENT, "") == "1"


def die_with_parent_if_asked(env: Mapping[str, str]) -> None:
    """Call `die_with_parent` if PUSHPULL_DIE_WITH_PARENT is 1; a role does so first of all.
    InvalidConfig unless it is 0, 1, empty or absent.

    PUSHPULL_PARENT_PID names the starter: if it ended while the role was still importing (torch
    takes seconds), the role ends here, and not when its adopter does.
    """
    wanted = env.get(DIE_WITH_PARENT, "")
    if wanted not in ("", "0", "1"):
        raise InvalidConfig(f"{DIE_WITH_PARENT} is '{wanted}'; expected 0 or 1")
    if not dies_with_parent(env):
        return
    die_with_parent()
    starter = env.get(PARENT_PID, "")
    if starter and starter != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)


def forget_parent(env: MutableMapping[str, str]) -> None:
    """Remove both variables after `die_with_parent_if_asked`, in a role that runs a user's code: a
    role that this code starts has another parent, and would end at once. The kernel's signal
    stays, also where the process runs another program in its place.
    """
    for name in (DIE_WITH_PARENT, PARENT_PID):
        env.pop(name, None)
