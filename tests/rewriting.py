"""Test modules with their asserts rewritten, by several processes that each do a share.

pytest rewrites a module when it is imported, and keeps the bytecode. Its processes import all
modules in one order, so in a fresh clone each of them would rewrite all.
"""

from __future__ import annotations

import os
import sys
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


def rewrite_share(config: pytest.Config) -> None:
    """Rewrite the modules that are this process' to rewrite, of those that are to be collected."""
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


def _rewrite(path: Path, bytecode: Path, config: pytest.Config) -> None:
    if _read_pyc(path, bytecode) is None:
        source_hash, code = _rewrite_test(path, config)
        _write_pyc(config.stash[assertstate_key], code, source_hash, bytecode)
