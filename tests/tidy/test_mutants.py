"""What `make core-mutants` does: the faults it makes, and its two lists. It runs by itself."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.operators import mutants, replaced
from tests.mutation.plan import ROOT, TESTS, equivalents, source_of

COMPILED = {
    "ps_core.compiled_loops",
    "ps_core.codecs.int8_loops",
    "ps_core.codecs.low_rank_loops",
    "ps_core.codecs.sign_loops",
    "ps_core.codecs.sparse_loops",
}
"""Compiling takes seconds for each fault; tests hold these loops to the bits of passes of numpy."""

FAULTS = {
    "x = a < b": ["x = a <= b", "x = a >= b"],
    "x = a == b": ["x = a != b"],
    "x = a not in b": ["x = a in b"],
    "x = a + b": ["x = a - b"],
    "x = a % b": ["x = a + b"],
    "x = a and b": ["x = a or b", "x = b", "x = a"],
    "x = not a": ["x = a"],
    "x = 5": ["x = 6", "x = 4"],
    "x = 0": ["x = 1"],
    "x = 0.5": ["x = 1.5"],
    "x = True": ["x = False"],
    "x = 'word'": ["x = 'wordx'"],
    "x = min(a, b)": ["x = max(a, b)"],
    "x = a if b else c": ["x = a if not b else c"],
    "x = [a for a in b if c]": ["x = [a for a in b]"],
    "a.b = c": ["pass"],
    "a += b": ["a -= b", "pass"],
    "call(a)": ["pass"],
    "del a": ["pass"],
    "raise E(f'{a} came')": ["pass"],
    "def f():\n    return a": ["return None"],
    "if a:\n    b": ["if not a:", "pass"],
    "while a == b:\n    break": ["while a != b:", "pass"],
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_line_is_made_wrong_in_each_way(text: str) -> None:
    assert [each.change.split(" -> ")[1] for each in mutants("m", text)] == FAULTS[text]


@pytest.mark.parametrize(
    "text",
    [
        '"""A docstring."""', "x: Literal[5]", "@decorated(True)\ndef f(): pass",
        "__slots__ = ('a',)", "x = NewType('X', int)", "x = 'so many words'", "import a",
        "x = f'{a} words'", "def f():\n    return None", "if TYPE_CHECKING:\n    import a",
    ],
)  # fmt: skip
def test_what_is_no_rule_is_left_as_it_is(text: str) -> None:
    assert mutants("m", text) == []


@pytest.mark.thorough
@pytest.mark.parametrize("module", TESTS)
def test_every_mutant_is_another_program_and_has_a_name_of_its_own(module: str) -> None:
    text = source_of(module)
    tree, found = ast.parse(text), mutants(module, text)
    assert len({(each.where, each.change) for each in found}) == len(found) > 0
    for each in (found[0], found[-1]):
        changed = replaced(tree, each.place, each.replacement)
        assert ast.dump(changed) != ast.dump(tree)


def test_every_module_of_the_core_has_tests_that_are_run_against_its_mutants() -> None:
    files = [path for path in (ROOT / "ps_core").rglob("*.py") if path.stem != "__init__"]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    assert set(TESTS) == modules - COMPILED
    assert all((ROOT / path).is_file() for paths in TESTS.values() for path in paths)


def test_every_mutant_that_is_called_equivalent_exists_and_has_a_reason() -> None:
    found = {
        module: {(each.where, each.change) for each in mutants(module, source_of(module))}
        for module in {entry.module for entry in equivalents()}
    }
    for entry in equivalents():
        assert (entry.where, entry.change) in found[entry.module], f"{entry} is no mutant"
        assert len(entry.why) > 20
