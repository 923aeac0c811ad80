"""`python -P -m ps_runtime.launch.role_entry MODULE ...` runs one of our roles.

`python -m scheduler` would run a user's own `scheduler.py`, in the working directory or in a folder
on PYTHONPATH, instead of ours.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import NoReturn

import ps_core
from ps_runtime.launch.role_environment import python_path
from ps_runtime.system.process_end import end_at_sigint, end_at_sigterm_if_first

SERVING = ("scheduler", "ps_server")
ROLES = (*SERVING, "ps_worker")

_REFUSED = 2  # the exit code of a role that is started again in vain

_NOT_IN_EVERY_IMAGE = ("numpy", "safetensors", "torch")
"""Packages that the scheduler's image does not have."""


def words_for_missing(error: ModuleNotFoundError, what: str) -> str | None:
    """The line for a person about a package that `what` needs and the scheduler's image lacks; None
    about any other module.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _NOT_IN_EVERY_IMAGE:
        return None
    return (
        f"{what} needs {package}, which is not installed here; the scheduler's image has none: "
        "take the image of servers and workers (docs/guides/CONTAINERS.md)"
    )


def command_of(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a process that runs `python -m module arguments`."""
    # -P: Python does not look for our modules in the working directory.
    return [sys.executable, "-P", "-m", "ps_runtime.launch.role_entry", module, *arguments]


def become(module: str, arguments: Sequence[str], inherited: Mapping[str, str]) -> NoReturn:
    """Replace this process by a role, so that signals and its end are the role's."""
    sys.stdout.flush()
    environment = {**inherited, "PYTHONPATH": python_path(inherited)}
    os.execve(sys.executable, command_of(module, arguments), environment)  # noqa: S606 - the role


def claim(module: str) -> None:
    """Import a role's package from beside this one, even if another package has its name."""
    spec = PathFinder.find_spec(module, [str(Path(ps_core.__file__).parents[1])])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"pushpull is not whole: there is no {module} beside ps_core")
    package = module_from_spec(spec)
    sys.modules[module] = package
    spec.loader.exec_module(package)


def main() -> None:
    """Run the module of the command line, as `python -m` would."""
    end_at_sigterm_if_first()  # a role imports for seconds before it handles signals itself
    _, module, *arguments = sys.argv
    if module in SERVING:  # a worker's script handles its signals as any
        end_at_sigint()
    sys.argv[1:] = arguments
    try:
        if module in ROLES:
            claim(module)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        words = words_for_missing(error, "this role") if module in ROLES else None
        if words is None:
            raise
        sys.stderr.write(f"pushpull: {words}\n")
        sys.exit(_REFUSED)


if __name__ == "__main__":
    main()
