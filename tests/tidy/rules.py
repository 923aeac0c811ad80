"""Every rule that is checked file by file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.tidy import conduct, layers, prose, shape
from tests.tidy.source import Finding, Source

Rule = Callable[[Source], Iterator[Finding]]

RULES: dict[str, Rule] = {
    rule.__name__.removeprefix("check_"): rule
    for rule in (
        layers.check_layers,
        shape.check_function_length,
        shape.check_file_length,
        shape.check_parameters,
        shape.check_line_length,
        shape.check_names,
        shape.check_units,
        shape.check_marks,
        prose.check_first_words,
        prose.check_glossary,
        conduct.check_sleep,
        conduct.check_fixed_ports,
        conduct.check_hidden_tests,
        conduct.check_mocks,
        conduct.check_pure_tests,
        conduct.check_deadlines,
        conduct.check_invariants,
        conduct.check_equal_bits,
        conduct.check_prints,
    )
}
