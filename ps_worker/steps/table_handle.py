"""A table that this process has created or opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ps_core.errors import InvalidConfig
from ps_core.tables import DType, Table, TableSpec
from ps_worker.spec.cutting import region_of, tensor_named
from ps_worker.spec.values import Array

if TYPE_CHECKING:
    from ps_worker.steps.steps import TableSteps


def check_handle(table: object) -> None:
    """Refuse what is no handle; a table's name is what is mostly given instead.

    Raises:
        InvalidConfig: it is none.
    """
    if isinstance(table, TableHandle):
        return
    if isinstance(table, str):
        raise InvalidConfig(
            f"table is the name '{table}'; expected the handle that create_table returned, or "
            f"client.table('{table}')"
        )
    raise InvalidConfig(
        f"table is {type(table).__name__}; expected the handle that create_table or table returned"
    )


class TableHandle:
    """What `create_table` and `table` hand back; pass it to the client's verbs.

    A handle belongs to its client. Two calls for the same table give the same handle.
    """

    def __init__(self, table: Table, steps: TableSteps) -> None:
        self.table = table
        self.steps = steps

    @property
    def name(self) -> str:
        """The table's name."""
        return self.table.spec.name

    @property
    def spec(self) -> TableSpec:
        """What the table is, every default filled in."""
        return self.table.spec

    @property
    def dtype(self) -> DType:
        """The element type of pushes and pulls."""
        return self.table.spec.dtype

    @property
    def element_count(self) -> int:
        """Elements of the table."""
        return self.table.spec.element_count

    @property
    def clock(self) -> int:
        """Steps that this worker has sealed on the table; 0 for readers."""
        return self.steps.clock

    def tensor(self, flat: Array, name: str) -> Array:
        """The tensor `name` within `flat`, as a view.

        Shapes:
            flat: 1-D, all elements of the table, as `client.pull(table)` gives it for a layout.

        Raises:
            InvalidKeys: the table has no such tensor.
        """
        tensor = tensor_named(self.table, name)
        part: Array = flat[tensor.offset : tensor.offset + tensor.element_count]
        return part.reshape(tensor.shape)

    def tensors(self, flat: Array) -> dict[str, Array]:
        """All tensors within `flat`, by name, as views."""
        return {tensor.name: self.tensor(flat, tensor.name) for tensor in self.spec.tensors}

    def shape_of(self, part: slice | str | None = None) -> tuple[int, ...]:
        """The shape in which a pull gives that part of the table.

        Raises:
            InvalidKeys: the table has no such part.
        """
        return region_of(self.table, part).shape

    def __repr__(self) -> str:
        return (
            f"TableHandle({self.name!r}, {self.element_count} elements of {self.dtype.value}, "
            f"{self.table.block_count} blocks, clock {self.clock})"
        )
