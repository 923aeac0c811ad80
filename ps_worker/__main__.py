"""`pushpull worker SCRIPT [args]`: run a training script as one worker of a cluster.

The script's `connect` reads the environment (PUSHPULL_SCHEDULER, PUSHPULL_RANK), which has the
flags before SCRIPT. When the script ends normally, its clients leave the cluster. When an exception
ends it, they do not, and the exit status is not 0.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from ps_core.errors import (
    Fenced,
    InvalidConfig,
    JoinRefused,
    PushpullError,
    Unauthenticated,
    WorkerLost,
)
from ps_runtime.observe import logs
from ps_runtime.settings.config import fields_of, resolve, variable_name
from ps_runtime.system import process_end
from ps_runtime.system.capacity import follow_limit
from ps_runtime.system.collector import spare_import_of
from ps_worker.client.connect import connect
from ps_worker.client.open_clients import close_all
from ps_worker.transport.config import ProcessConfig, WorkerConfig, job_place, parser, worker_config
from ps_worker.transport.metrics import open_ports

_FAILED = 1
_SIGNALLED = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script that `argv` names, and close its clients; returns the exit status."""
    reader = parser()
    given = reader.parse_args(argv)
    try:
        process_end.die_with_parent_if_asked(os.environ)
        process_end.forget_parent(os.environ)
        config = _take_flags(vars(given))
        logs.configure(process_name(vars(given), os.environ), config.log_level, config.log_format)
    except InvalidConfig as error:
        reader.error(error.message)
    if not given.script.is_file():
        reader.error(f"there is no script {given.script}")
    signal.signal(signal.SIGTERM, _stop)
    follow_limit(os.environ)
    spare_import_of("torch")  # the script imports it, after its own settings
    sys.argv = [str(given.script), *given.arguments]
    sys.path.insert(0, str(given.script.resolve().parent))
    close_ports = open_ports(config)
    try:
        return _run(given.script)
    finally:
        _take_signals_at_the_end()
        close_ports()


def _take_flags(flags: Mapping[str, object]) -> ProcessConfig:
    """The settings of this process; those of `connect` go into the environment."""
    # A script may name its scheduler itself.
    where = flags["scheduler"] or os.environ.get("PUSHPULL_SCHEDULER") or ("localhost:1",)
    worker_config({**flags, "scheduler": where})
    for field in fields_of(WorkerConfig):
        if flags[field.name] is not None:
            os.environ[variable_name(field.name)] = str(flags[field.name])
    return resolve(ProcessConfig, flags, os.environ)


def process_name(flags: Mapping[str, object], env: Mapping[str, str]) -> str:
    """The name in this process's log lines: its role, and a worker's rank, if it was given one."""
    place = job_place(flags, env)
    role = env.get("PUSHPULL_ROLE", "") or "worker"
    rank = env.get("PUSHPULL_RANK", "") if place is None else place.rank
    return f"{role}-{rank}" if rank != "" and role == "worker" else role


def _run(script: Path) -> int:
    """Run the script; leave the cluster if it ended normally, else abandon it."""
    status = _FAILED
    logs.info("script_begins", script=script)
    try:
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = _status_of(end)
    except KeyboardInterrupt:
        status = _SIGNALLED + signal.SIGINT
    except BaseException as failure:  # noqa: BLE001 - any end of a script is shown as Python does
        status = _show(failure, script)
    has_closed = _close(f"the script ended with {status}" if status else "")
    status = status if has_closed or status else _FAILED
    logs.info("script_ended", script=script, status=status)
    return status


def _close(failed_by: str) -> bool:
    """Close the script's clients; False if that failed or was interrupted."""
    try:
        close_all(failed_by)
    except PushpullError as error:
        sys.stderr.write(f"pushpull worker: the end was not committed: {error.message}\n")
        return False
    except OSError as error:
        sys.stderr.write(f"pushpull worker: the record or the port failed at the end: {error}\n")
        return False
    except (KeyboardInterrupt, SystemExit):
        return False
    return True


def _status_of(end: SystemExit) -> int:
    """The exit status that the interpreter gives the argument of `sys.exit`."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return _FAILED


def _stop(number: int, _frame: FrameType | None) -> None:
    """End the script where it is, on SIGTERM; its `finally` blocks run."""
    raise SystemExit(_SIGNALLED + number)


def _take_signals_at_the_end() -> None:
    """The process ends without a signal now, so one cuts nothing off, unless it waits for threads
    of the script. A second one ends it. Handlers of the script's own stay.
    """
    for number, ours in ((signal.SIGTERM, _stop), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is ours:
            signal.signal(number, _stop_threads)


def _stop_threads(number: int, _frame: FrameType | None) -> None:
    """End the process at once if threads of the script go on; else the next signal does."""
    others = (each for each in threading.enumerate() if each is not threading.main_thread())
    if any(not each.daemon for each in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_SIGNALLED + number)
    for each in (signal.SIGTERM, signal.SIGINT):  # what the script has for its exit may hang
        if signal.getsignal(each) is _stop_threads:
            signal.signal(each, signal.SIG_DFL)


def _show(failure: BaseException, script: Path) -> int:
    """Print the traceback from the script's first frame on, or, if the cluster could not be joined,
    the reason alone; returns the exit status.
    """
    trace: TracebackType | None = failure.__traceback__
    frames = traceback.extract_tb(trace)
    code = connect.__code__
    if isinstance(failure, PushpullError) and (
        frames and (frames[-1].filename, frames[-1].name) == (code.co_filename, code.co_name)
    ):
        lines = [frame.lineno for frame in frames if frame.filename == str(script)]
        where = f"{script}, line {lines[-1]}" if lines else str(script)
        sys.stderr.write(f"{where}: this worker cannot join: {failure.message}\n")
        is_refused = isinstance(failure, InvalidConfig | Unauthenticated | Fenced)
        return process_end.REFUSED_EXIT_CODE if is_refused else _FAILED
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    # Only our frames are there if the script could not be compiled.
    is_uncompiled = isinstance(failure, SyntaxError) and failure.filename == str(script)
    if trace is None and not is_uncompiled:
        trace = failure.__traceback__
    traceback.print_exception(type(failure), failure, trace)
    if (lost := _loss_behind(failure)) is not None:
        sys.stderr.write(f"pushpull worker: {type(lost).__name__}: {lost.message}\n")
        failure = lost
    if isinstance(failure, WorkerLost):
        return process_end.WORKER_LOST_EXIT_CODE
    return process_end.REFUSED_EXIT_CODE if isinstance(failure, JoinRefused) else _FAILED


def _loss_behind(failure: BaseException) -> PushpullError | None:
    """The error that torch's stands for; None unless the script has peers that were lost."""
    peers = sys.modules.get("ps_worker.training.among_workers.peers")  # which imports torch
    found: PushpullError | None = None if peers is None else peers.loss_behind(failure)
    return found


if __name__ == "__main__":
    sys.exit(main())
