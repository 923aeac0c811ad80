"""What a server finds of the packages that are installed, and what it says of broken ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ps_core.errors import InvalidConfig
from ps_core.update_offer import UpdateOffer
from ps_server.installed_updates import InstalledUpdates, installed_updates
from tests.unit.package_folder import install

GOOD = """
class Plain:
    hyperparameters = {"lr": 0.5, "alpha": 2}
    slots = {}

    def update(self, values, state, gradient, numbers, step):
        return values.sub_(gradient, alpha=numbers["lr"]), state

class Summing(Plain):
    def update(self, values, state, gradient, numbers, step):
        return values - gradient.sum(), state

class Bare:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def problem(installed: InstalledUpdates, name: str) -> str:
    """Why an update is not offered; it must not be runnable either."""
    (offer,) = [offer for offer in installed.offers if offer.name == name]
    assert name not in installed.updates
    assert offer.validated() is offer
    return offer.problem


def test_what_is_installed_is_found_by_its_entry_point(folder: Path) -> None:
    install(folder, "zoo-updates", "1.2", {"zoo_good": GOOD}, {"plain": "zoo_good:Plain"})
    installed = installed_updates()
    (offer,) = installed.offers
    assert offer.hyperparameters == (("alpha", 2.0), ("lr", 0.5))
    assert offer.fingerprint.startswith("zoo-updates 1.2;selftest=")
    assert offer.problem == ""
    values, _ = installed.updates["plain"].call(
        torch.ones(64), {}, torch.ones(64), {"lr": 0.5, "alpha": 2.0}, 1
    )
    assert values.tolist() == [0.5] * 64
    (message,) = installed.to_proto()
    assert (message.name, message.fingerprint) == ("plain", offer.fingerprint)
    assert [(n.name, n.value) for n in message.hyperparameters] == list(offer.hyperparameters)


def test_another_version_has_another_fingerprint(folder: Path) -> None:
    install(folder, "zoo", "1.2", {"zoo_one": GOOD}, {"one": "zoo_one:Plain"})
    install(folder, "zoo-too", "1.2", {"zoo_too": GOOD}, {"too": "zoo_too:Plain"})
    other = GOOD.replace('alpha=numbers["lr"]', "alpha=0.5 + 1e-9")
    install(folder, "zoo-three", "1.2", {"zoo_three": other}, {"three": "zoo_three:Plain"})
    marks = {o.name: o.fingerprint.split(";") for o in installed_updates().offers}
    assert [marks[name][0] for name in ("one", "too")] == ["zoo 1.2", "zoo-too 1.2"]
    assert marks["one"][1] == marks["too"][1] != marks["three"][1]


BROKEN = {
    "no module": (
        "zoo_nowhere:Plain",
        "zoo_nowhere:Plain of zoo 0.1 cannot be loaded: ModuleNotFoundError: No module named",
    ),
    "no attribute": ("zoo_here:Lion", "cannot be loaded: AttributeError"),
    "raises": ("zoo_raising:Plain", "cannot be loaded: ZeroDivisionError: .* (zoo_raising.py:2)"),
    "exits": ("zoo_exiting:Plain", "cannot be loaded: SystemExit: 0 (zoo_exiting.py:3)"),
    "no contract": ("zoo_here:Bare", "is a Bare without a method 'update' (zoo 0.1)"),
    "not by element": ("zoo_here:Summing", "depends on how the vector is cut"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_one_that_is_broken_harms_no_other(
    folder: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    value, words = BROKEN[case]
    modules = {
        "zoo_here": GOOD,
        "zoo_raising": "\n1 / 0\n",
        "zoo_exiting": "import sys\n\nsys.exit(0)\n",
    }
    install(folder, "zoo", "0.1", modules, {"lion": value, "plain": "zoo_here:Plain"})
    installed = installed_updates()
    told = problem(installed, "lion")
    for word in words.split(".*"):
        assert word.strip() in told
    assert set(installed.updates) == {"plain"}
    (warned,) = [r for r in caplog.records if "update_not_offered" in r.getMessage()]
    assert "update=lion" in warned.getMessage()


def test_nobody_chooses_between_two_packages(folder: Path) -> None:
    for package, version in (("zoo", "1.0"), ("farm", "2.0")):
        modules = {f"{package}_good": GOOD}
        install(folder, package, version, modules, {"lion": f"{package}_good:Plain"})
    told = problem(installed_updates(), "lion")
    assert told == "several packages have it: farm 2.0, zoo 1.0"


def test_a_long_reason_is_cut(folder: Path) -> None:
    source = f"raise ValueError('é' * {10_000})\n"
    install(folder, "zoo", "0.1", {"zoo_long": source}, {"lion": "zoo_long:Plain"})
    assert 400 < len(problem(installed_updates(), "lion").encode()) <= 500


def test_a_name_that_cannot_be_told_is_an_error_at_the_start(folder: Path) -> None:
    install(folder, "zoo", "0.1", {"zoo_name": GOOD}, {"n" * 65: "zoo_name:Plain"})
    with pytest.raises(InvalidConfig, match="its name has 65 bytes; expected 1 to 64"):
        installed_updates()


def test_too_many_are_an_error_at_the_start(folder: Path) -> None:
    many = {f"n{i}": "zoo_many:Plain" for i in range(65)}
    install(folder, "zoo", "0.1", {"zoo_many": GOOD}, many)
    with pytest.raises(InvalidConfig, match=r"65 updates .* expected at most 64"):
        installed_updates()


def test_nothing_installed_is_nothing_offered(folder: Path) -> None:
    del folder
    assert installed_updates() == InstalledUpdates((), {})


def test_an_offer_is_comparable() -> None:
    assert UpdateOffer("a", (("lr", 1.0),), "f") == UpdateOffer("a", (("lr", 1.0),), "f")
