"""What a node says of its part of a checkpoint, as a value: whoever writes it and the scheduler's
machine have the same.

What it deliberately does not do: judge it (`scheduler.machine.checkpoints` does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_core.keys import TableId


@dataclass(frozen=True, slots=True)
class ReportedTable:
    """What a node wrote of one table: so many blocks, the highest clock of its ranges, and whether
    each is as it was at a moment of its own.
    """

    block_count: int
    clock: int
    is_torn: bool = False


@dataclass(frozen=True, slots=True)
class PartReport:
    """A node's file, or why there is none; no file and no problem: it has nothing to write.

    Of its blocks some may be referred to in other checkpoints: how many, their bytes, and the
    directories that have them.
    """

    file: str = ""
    byte_count: int = 0
    header_sha256: str = ""
    tables: Mapping[TableId, ReportedTable] = field(default_factory=dict)
    problem: str = ""
    referred_block_count: int = 0
    referred_byte_count: int = 0
    bases: tuple[str, ...] = ()
