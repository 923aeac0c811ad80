"""The hyperparameters of a table's steps, merged once for all that have the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ps_core.tables import Hyperparameters, OptimizerSpec


class StepNumbers:
    """`OptimizerSpec.merged` of one table, for one step after the other.

    The ranges of a seal have the same numbers, and so have most often its workers: they are merged
    once for all of them. What is merged already is given back as it is.
    """

    __slots__ = ("_last", "_spec")

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec = spec
        self._last: tuple[Hyperparameters, Hyperparameters] = (), spec.merged(())

    def merged(self, given: Hyperparameters) -> Hyperparameters:
        """See `OptimizerSpec.merged`.

        Raises:
            InvalidConfig: as there.
        """
        last, merged = self._last
        if given != last and given != merged:
            merged = self._spec.merged(given)
            self._last = given, merged
        return merged
