"""Compiled code of all modules, made by several processes that each do a share.

Python compiles a module when it is imported, and keeps the bytecode; pytest rewrites the asserts of
test modules first. Its processes import all modules in one order, so in a fresh clone each of them
would do it for all; so it is with the loops that numba compiles when they are imported. Others'
packages come without bytecode (`make` installs them so): each process begins with other ones.
"""

from __future__ import annotations

import compileall
import fcntl
import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    assertstate_key,
    get_cache_dir,
    try_makedirs,
)

_LARGE = ("sympy", "numba", "torch.distributed.fsdp", "torch._dynamo")
_OTHERS = ("ps_*/**/*.py", "scheduler/**/*.py", "protos/**/*.py", "tests/**/*.py")


def compile_share(config: pytest.Config) -> None:
    """Compile this process' share of the modules: of all of ours, and of tests to be collected."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or sys.dont_write_bytecode:
        return
    place, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    folders = [config.invocation_params.dir / each.partition("::")[0] for each in config.args]
    modules = sorted({path for folder in folders for path in folder.rglob("test_*.py")})
    for path in modules[place::count]:
        cache = get_cache_dir(path)
        if try_makedirs(cache):
            _rewrite(path, cache / (path.stem + PYC_TAIL), config)
    found = {path for pattern in _OTHERS for path in config.rootpath.glob(pattern)}
    others = sorted(path for path in found if not path.name.startswith("test_"))
    for path in others[place::count]:
        compileall.compile_file(path, quiet=2)
    for name in (*_LARGE[place:], *_LARGE[:place]):
        spec = find_spec(name)
        if spec and spec.cached and not Path(spec.cached).exists():
            importlib.import_module(name)
    loops = [path for path in others if path.stem.endswith("_loops")]
    for path in loops[place::count] + loops:
        with path.open() as source:
            fcntl.flock(source, fcntl.LOCK_EX)  # else a second process would compile it meanwhile
            importlib.import_module(
                ".".join(path.relative_to(config.rootpath).with_suffix("").parts)
            )


def _rewrite(path: Path, bytecode: Path, config: pytest.Config) -> None:
    if _read_pyc(path, bytecode) is None:
        source_hash, code = _rewrite_test(path, config)
        _write_pyc(config.stash[assertstate_key], code, source_hash, bytecode)
