"""Every invariant has a number of its own, and code that checks it or a test that names it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from docs import invariants
from docs.invariants import NUMBER, Found, found_in
from tests.tidy.source import PACKAGES, ROOT, files_under

NO_INVARIANTS = {"CRC", "GPT", "SHA", "UTF"}
"""What else is written so."""


@cache
def found() -> Found:
    """The repository's own."""
    return found_in(invariants.sources())


def test_the_page_is_what_the_modules_and_tests_say() -> None:
    assert invariants.PAGE.read_text(encoding="utf-8") == invariants.page(found()), (
        "run `make reference`"
    )


def test_each_is_checked_or_named_by_a_test() -> None:
    assert not [f"{each.path}: {each.number}" for each in invariants.unproved(found())]


def test_no_two_have_one_number() -> None:
    assert not invariants.listed_twice(found())


def named() -> Iterator[tuple[str, str]]:
    """Every number that a text names, with the text's path."""
    for folder in (*PACKAGES, "tests", "docs", "examples", "deploy", "clients"):
        for path in files_under(ROOT / folder, ".py", ".md"):
            inside = path.relative_to(ROOT).as_posix()
            if not inside.startswith("tests/tidy/"):
                for number in NUMBER.findall(path.read_text(encoding="utf-8")):
                    yield inside, number


def test_every_number_that_a_text_names_is_listed() -> None:
    """By a module, or among the rules of SEMANTICS that are not one module's."""
    rules = (ROOT / "docs" / "reference" / "SEMANTICS.md").read_text(encoding="utf-8")
    known = {each.number for each in found().invariants}
    unknown = {
        (path, number)
        for path, number in named()
        if number not in known
        and f"**{number}**" not in rules
        and number.split("-")[0] not in NO_INVARIANTS
    }
    assert not unknown


MODULE = '''"""Keys.

Invariants:
    KEY-1  Ranges
           never overlap.
    KEY-2  Slots are numbers.
    KEY-3  So are ranges.

What it does not do: `LIM-*`.
"""
class Keys:
    def ranges(self):
        check(a < b, "KEY-1", "they do")
check(c == d, "LIM-7", "another")
'''

TEST = '''"""Keys."""
def test_slots():
    """KEY-2."""
'''


def test_what_is_proved_and_what_is_not_is_seen() -> None:
    here = found_in({"ps_core/keys.py": MODULE, "tests/unit/test_keys.py": TEST})
    assert [each.number for each in here.invariants] == ["KEY-1", "KEY-2", "KEY-3", "LIM-7"]
    assert here.invariants[0].sentence == "Ranges never overlap."
    assert here.invariants[3].sentence == "`c == d`"
    assert [each.number for each in invariants.unproved(here)] == ["KEY-3"]
    assert [place.name for place in here.raised["KEY-1"]] == ["Keys.ranges"]
    assert [place.name for place in here.cited["KEY-2"]] == ["test_slots"]
    twice = found_in({"ps_core/keys.py": MODULE, "ps_core/slots.py": MODULE})
    assert invariants.listed_twice(twice) == ["KEY-1", "KEY-2", "KEY-3", "LIM-7"]
    row = "| KEY-2 | Slots are numbers. | [ps_core.keys](../../ps_core/keys.py) |  | "
    row += "[test_keys](../../tests/unit/test_keys.py) `test_slots` |"
    assert row in invariants.page(here)
