"""Imports that the garbage collector passes by."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ps_runtime.system.collector import spare_import_of, spared

SAYS = """
import gc
collects = gc.isenabled()
made = [[] for _ in range(1000)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_what_is_made_inside_is_passed_by() -> None:
    before = gc.get_freeze_count()
    with spared():
        assert not gc.isenabled()
        made = [[None] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with spared():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_import_of_the_one_named_is_spared_and_no_other(folder: Path) -> None:
    for name in ("spared_one", "not_named"):
        (folder / f"{name}.py").write_text(SAYS)
    finders = list(sys.meta_path)
    spare_import_of("spared_one")
    other = import_module("not_named")
    assert other.collects
    before = gc.get_freeze_count()
    module = import_module("spared_one")
    assert not module.collects
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(module.made)
    assert sys.meta_path == finders
    del sys.modules["spared_one"]
    assert import_module("spared_one").collects, "once"


def test_one_that_fails_leaves_the_collector_on(folder: Path) -> None:
    (folder / "spared_and_bad.py").write_text("raise ValueError('mine')")
    spare_import_of("spared_and_bad")
    with pytest.raises(ValueError, match="mine"):
        import_module("spared_and_bad")
    assert gc.isenabled()


def test_one_that_is_nowhere_is_said_to_be_nowhere(folder: Path) -> None:
    finders = list(sys.meta_path)
    spare_import_of("spared_and_absent")
    with pytest.raises(ModuleNotFoundError, match="spared_and_absent"):
        import_module("spared_and_absent")
    assert sys.meta_path == finders


def test_one_that_has_been_imported_needs_nothing() -> None:
    finders = list(sys.meta_path)
    spare_import_of("gc")
    assert sys.meta_path == finders
