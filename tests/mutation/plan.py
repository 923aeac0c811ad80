"""Which tests speak for which module of `ps_core`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_WORDS = "tests/unit/test_contract_words.py"
_VECTORS = "tests/unit/test_published_vectors.py"

TESTS: dict[str, tuple[str, ...]] = {
    "ps_core.change": ("tests/unit/test_cluster_view.py", "tests/unit/test_manifest_places.py"),
    "ps_core.cluster_view": (
        "tests/unit/test_cluster_view.py",
        "tests/unit/test_cluster_runs.py",
        _WORDS,
        _VECTORS,
    ),
    "ps_core.codecs.choices": ("tests/unit/test_residuals.py",),
    "ps_core.codecs.int8": ("tests/unit/test_int8.py", "tests/unit/test_residuals.py", _VECTORS),
    "ps_core.codecs.int8_passes": ("tests/unit/test_int8.py",),
    "ps_core.codecs.kernels": ("tests/unit/test_int8.py",),
    "ps_core.codecs.low_rank": ("tests/unit/test_low_rank.py", _VECTORS),
    "ps_core.codecs.low_rank_passes": ("tests/unit/test_low_rank.py",),
    "ps_core.codecs.payloads": (
        "tests/unit/test_residuals.py",
        "tests/unit/test_sign.py",
        "tests/unit/test_sparse.py",
        "tests/unit/test_low_rank.py",
        "tests/property/test_shard_store.py",
    ),
    "ps_core.codecs.sign": ("tests/unit/test_sign.py", _VECTORS),
    "ps_core.codecs.sign_passes": ("tests/unit/test_sign.py",),
    "ps_core.codecs.sparse": ("tests/unit/test_sparse.py", _VECTORS),
    "ps_core.codecs.sparse_passes": ("tests/unit/test_sparse.py",),
    "ps_core.collective_calls": ("tests/unit/test_collective_calls.py",),
    "ps_core.consistency": ("tests/unit/test_consistency_settings.py", _WORDS),
    "ps_core.envelope": ("tests/unit/test_envelope.py",),
    "ps_core.errors": ("tests/unit/test_errors.py", "tests/unit/test_runtime_errors.py"),
    "ps_core.failure_detector": ("tests/unit/test_failure_detector.py",),
    "ps_core.keys": (_VECTORS, "tests/property/test_keys_and_tables.py"),
    "ps_core.ledger": ("tests/property/test_ledger.py", _WORDS),
    "ps_core.limits": ("tests/unit/test_limits.py",),
    "ps_core.losses": ("tests/unit/test_losses.py",),
    "ps_core.manifest": (
        "tests/unit/test_manifest.py",
        "tests/unit/test_manifest_places.py",
        "tests/unit/test_imported.py",
    ),
    "ps_core.rights": ("tests/unit/test_joining.py", "tests/unit/test_protocol_vectors.py"),
    "ps_core.rows": ("tests/unit/test_rows.py",),
    "ps_core.runs": ("tests/unit/test_cluster_runs.py",),
    "ps_core.sequence_locks": ("tests/unit/test_sequence_locks.py",),
    "ps_core.sliced_work": ("tests/unit/test_works.py",),
    **dict.fromkeys(
        (
            "ps_core.tables.elements", "ps_core.tables.optimizers",
            "ps_core.tables.table", "ps_core.tables.table_spec",
        ),
        (
            "tests/unit/test_table_specs.py", _WORDS, _VECTORS,
            "tests/property/test_keys_and_tables.py", "tests/unit/test_table_requests.py",
            "tests/unit/test_rows.py", "tests/unit/test_row_storage.py",
        ),
    ),
    "ps_core.update_offer": ("tests/unit/test_update_offer_rules.py",),
}  # fmt: skip
"""Those that are run against a module's mutants; they fail fast, so the most telling come first."""


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A mutant that does what the module does, and why.

    Attributes:
        module: its dotted name.
        where: the class and function.
        change: as the report shows it.
        why: the reason why no test can tell the two apart, or none should.
    """

    module: str
    where: str
    change: str
    why: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What finds the mutant, wherever its line is."""
        return self.module, self.where, self.change


def source_of(module: str) -> str:
    """The text of a module."""
    return (ROOT / f"{module.replace('.', '/')}.py").read_text()


def equivalents() -> list[Equivalent]:
    """The mutants that are known to be no faults: equivalent.toml, beside this file."""
    text = Path(__file__).with_name("equivalent.toml").read_text()
    found: list[Mapping[str, str]] = tomllib.loads(text).get("mutant", [])
    return [Equivalent(**entry) for entry in found]
