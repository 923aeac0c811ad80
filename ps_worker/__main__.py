"""`python -m ps_worker SCRIPT [args]`: run a training script as one worker of a cluster.

The script finds its cluster and its rank through the environment (PUSHPULL_SCHEDULER,
PUSHPULL_RANK), which `ps_worker.connect()` reads. When it ends normally its clients leave: nobody
waits for it any more. When an exception ends it they do not, and the exit status is not 0.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

from ps_core.errors import PushpullError
from ps_runtime import logs, shutdown
from ps_runtime.environment import check_known
from ps_worker.connection import close_all

_USAGE = "usage: python -m ps_worker SCRIPT [args]"
_WRONG_USAGE = 2
_FAILED = 1
_SIGNALLED = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script that `argv` names; the exit status to end with.

    Blocking: until the script has ended and its clients have left.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\n{__doc__}", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else _WRONG_USAGE
    try:
        shutdown.die_with_parent_if_asked(os.environ)
        check_known(os.environ)
        rank = os.environ.get("PUSHPULL_RANK", "")
        role = os.environ.get("PUSHPULL_ROLE", "") or "worker"
        logs.configure(
            f"{role}-{rank}" if rank else role,
            os.environ.get("PUSHPULL_LOG_LEVEL", "") or "warning",
        )
    except PushpullError as error:
        print(f"ps_worker: {error.message}", file=sys.stderr)
        return _WRONG_USAGE
    script = Path(arguments[0])
    if not script.exists():
        print(f"ps_worker: there is no script {script}", file=sys.stderr)
        return _WRONG_USAGE
    signal.signal(signal.SIGTERM, _stop)
    sys.argv = [str(script), *arguments[1:]]
    sys.path.insert(0, str(script.resolve().parent))
    return _run(script)


def _run(script: Path) -> int:
    """Run the script; leave the cluster if it ended well, else only let go of it."""
    status = _FAILED
    try:
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = _status_of(end)
    except KeyboardInterrupt:
        status = _SIGNALLED + signal.SIGINT
    except BaseException as failure:  # noqa: BLE001 - whatever ends a script ends it with a traceback
        _print_failure(failure, script)
    finally:
        left = _close(status == 0)
    return status if left or status else _FAILED


def _close(leave: bool) -> bool:
    """Close the script's clients; whether they could do so as wished."""
    try:
        close_all(leave=leave)
    except PushpullError as error:
        print(f"ps_worker: the end was not committed: {error.message}", file=sys.stderr)
        return False
    except KeyboardInterrupt:
        return False
    return True


def _status_of(end: SystemExit) -> int:
    """What the interpreter would make of `sys.exit`'s argument."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return _FAILED


def _stop(number: int, _frame: FrameType | None) -> None:
    """SIGTERM: end the script where it is; its `finally` blocks run."""
    raise SystemExit(_SIGNALLED + number)


def _print_failure(failure: BaseException, script: Path) -> None:
    """The traceback as the script's author knows it, from the script's first frame on."""
    trace: TracebackType | None = failure.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    traceback.print_exception(type(failure), failure, trace or failure.__traceback__)


if __name__ == "__main__":
    sys.exit(main())
