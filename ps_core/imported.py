"""A checkpoint that was imported from a plain state dict: the values that tables begin with.

Rules:
    - A state dict has tensors by name, and nothing of tables. So a table finds each of its tensors
      by its name, wherever it lies here, and all of them or the table is refused. Shape and dtype
      have to be the table's; block size, order and optimizer are whatever the table has.
    - The tables of such a checkpoint are called PREFIX/DTYPE and are for the tables PREFIX and
      PREFIX/...; without a prefix they are called DTYPE and are for all tables.
    - A tensor without elements has no values to find.

What it deliberately does not do: read values (`ps_runtime.checkpoint.restored_blocks`), or judge
names that no table asks for (`ps_worker.training.imported_model` does, who knows the whole model).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ps_core.errors import InvalidCheckpoint
from ps_core.tables import DType, TableSpec, TensorSpec


def imported_name(prefix: str, dtype: DType) -> str:
    """What the table of a dtype is called."""
    return f"{prefix}/{dtype.value}" if prefix else dtype.value


@dataclass(frozen=True, slots=True)
class Imported:
    """What was imported: by a tensor's name, the table that has it, and where.

    Attributes:
        url: the checkpoint's directory.
        prefix: of the names of the tables that it is for; empty: for all.
        tensors: as the file had them.
    """

    url: str
    prefix: str
    tensors: Mapping[str, tuple[TableSpec, TensorSpec]]

    @classmethod
    def of(cls, url: str, tables: Iterable[TableSpec]) -> Imported:
        """What these tables have together."""
        found: dict[str, tuple[TableSpec, TensorSpec]] = {}
        prefix = ""
        for spec in tables:
            prefix = spec.name.rpartition("/")[0]
            for tensor in spec.tensors:
                found[tensor.name] = spec, tensor
        return cls(url, prefix, found)

    def is_for(self, table: str) -> bool:
        """Whether it has the values of the table of that name, or none has."""
        return not self.prefix or table == self.prefix or table.startswith(f"{self.prefix}/")

    def places(self, spec: TableSpec) -> dict[str, tuple[str, int]]:
        """By a tensor's name, the table here that has its values, and its first element there.

        Raises:
            InvalidCheckpoint: a tensor of `spec` is not here, or is another one.
        """
        return {
            tensor.name: self._place(spec, tensor)
            for tensor in spec.tensors
            if tensor.element_count
        }

    def _place(self, spec: TableSpec, tensor: TensorSpec) -> tuple[str, int]:
        what = f"tensor '{tensor.name}' of table '{spec.name}'"
        if tensor.name not in self.tensors:
            raise InvalidCheckpoint(
                f"{what} is not in {self.url}, which was imported for {self._covers}; expected all "
                "of the table's tensors, or an import with --prefix, the name of one model"
            )
        source, found = self.tensors[tensor.name]
        came = f"{found.shape} of {source.dtype.value}"
        expected = f"{tensor.shape} of {spec.dtype.value}"
        if came != expected:
            raise InvalidCheckpoint(f"{what} is {came} in {self.url}; expected {expected}")
        return source.name, found.offset

    @property
    def _covers(self) -> str:
        return f"the tables of '{self.prefix}'" if self.prefix else "all tables"

    def unknown(self, names: Iterable[str]) -> Iterator[str]:
        """The tensors here that are none of these."""
        known = set(names)
        return (name for name in self.tensors if name not in known)
