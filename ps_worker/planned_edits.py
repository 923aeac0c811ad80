"""The edits of one step, in their order.

    parameters                  one, which replaces them
    optimizer state, and        one for each array, and for the parameters that were changed: laid
    perhaps parameters          beside what there is; the last, of `step`, puts all in place
    before these                one for each clock after which another new worker has joined, and
                                this one has not taken: it changes nothing
    frozen parameters           one more, on the tables that sleep, once the others have agreed

Rules:
    - Each is a clock of its own: a clock stages no more than a step does (S16).
    - All have one name, of all that is changed. So workers that disagree about any of it disagree
      at the first.
    - A wait that expired leaves what is left to the next call. A refusal begins all of it anew.

Invariants:
    PLAN-1  What is next is asked for only while there is something.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING

import torch

from ps_core.errors import check
from ps_core.tables import VALUES_ARRAY
from ps_worker.edits import Edited, digest_of
from ps_worker.served_state import LoadedState

if TYPE_CHECKING:
    from ps_worker.trained_table import TrainedTable

_DIGEST_BYTES = 16

PASSED = "passed"
"""What is next when a clock is passed with an edit that changes nothing: no array has that name."""

ASLEEP = "asleep"
"""What is next when the parameters of tables that sleep are: no array has that name."""


class PlannedEdits:
    """What a step has to give the servers before its gradients.

    Attributes:
        edited: the parameters that were changed.
        problem: why their values are none; empty if they are.
        digest: names all that is changed.
        edit_digest: names the parameters that were changed.
    """

    def __init__(self) -> None:
        self.edited: Edited = {}
        self.problem = ""
        self.digest = b""
        self.edit_digest = b""
        self._loaded: LoadedState | None = None
        self._left: deque[str] = deque()

    def __bool__(self) -> bool:
        return bool(self._left)

    def plan(
        self, edited: Edited, loaded: LoadedState | None, problem: str, passed_count: int = 0
    ) -> None:
        """These are to be given to the servers: at least one of them; so many clocks are passed
        before.

        Blocking: as `edits.digest_of`.
        """
        self.edited, self._loaded, self.problem = edited, loaded, problem
        self._left.clear()
        self._left.extend([PASSED] * passed_count)
        if problem or loaded is None:
            self._left.append("")
        else:
            self._left.extend([VALUES_ARRAY] if edited else [])
            self._left.extend(loaded.names)
        if not problem and any(table.is_asleep for table in edited):
            self._left.append(ASLEEP)  # a table that sleeps is stepped only where all mean it
        self.digest = self.edit_digest = b"" if problem else digest_of(edited)
        if loaded is not None:
            whole = self.digest + loaded.digest
            self.digest = hashlib.blake2b(whole, digest_size=_DIGEST_BYTES).digest()

    @property
    def next(self) -> str:
        """The array that is to be laid beside or put in place; empty: parameters, at once; ASLEEP:
        those of tables that sleep, at once; PASSED: nothing.
        """
        check(bool(self._left), "PLAN-1", "nothing is planned")
        return self._left[0]

    def values(self, table: TrainedTable) -> torch.Tensor | None:
        """Of the array that is next, a table's; None if it has none. Parameters have their own."""
        check(self._loaded is not None, "PLAN-1", "no state was loaded")
        if self._loaded is None:
            return None
        return self._loaded.arrays.get(table, {}).get(self.next)

    @property
    def is_in_place_with_next(self) -> bool:
        """Whether all that is planned is in place when the servers have what is next."""
        return len(self._left) - (ASLEEP in self._left) <= 1

    def taken(self) -> None:
        """The servers have what was next."""
        self._left.popleft()

    def forget(self) -> None:
        """Nothing is planned any more."""
        self._left.clear()


def load_refused(name: str, why: str) -> str:
    """The message of loaded state that no step can take."""
    return (
        f"optimizer state was loaded into '{name}', {why}. Nothing was sent. Load it under BSP: "
        "set_consistency('bsp') at every worker, load_state_dict(), step(), and "
        "set_consistency() back; or start the cluster from a checkpoint, which has it in every "
        "setting"
    )
