"""The edits of one step, in their order.

    parameters                  one, which replaces them
    optimizer state, and        one for each array, and for the changed parameters: staged beside
    perhaps parameters          the present ones; the last, of `step`, puts all in place
    before these                one for each clock after which another new worker has joined, and
                                this one has not taken: it changes nothing
    frozen parameters           one more, on the tables that sleep, once the others are committed

Rules:
    - Each edit is a clock of its own, because a clock stages no more than a step does (S16).
    - All edits have one name, which covers all changes, so workers that disagree about any change
      disagree at the first edit.
    - A wait that expires leaves the other edits to the next call. A refusal begins all of them
      anew, but for that of a clock that is passed: it is over, and nothing was wanted of it.

Invariants:
    EDIT-1  The next edit is asked for only while there is one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ps_core.errors import EditRefused, check
from ps_core.tables.optimizers import VALUES_ARRAY
from ps_worker.training.served_state import DIGEST_BYTES, LoadedState, digest_of_arrays
from ps_worker.training.tables.inspection import is_finite

if TYPE_CHECKING:
    from ps_worker.training.tables.trained_table import TrainedTable

_NAMED_COUNT = 3

LOOK_EVERY = 16
"""Clocks in whose first step every bit of a table that sleeps is compared."""

REMEDIES = (
    "Do the same at every rank before the same step (with Outer: right after the same outer step): "
    "the same seed, the same checkpoint. To clamp in every step, give the optimizer clamp=(least, "
    "greatest)"
)
"""The advice if the workers of a step disagree."""

PASSED = "passed"
"""The edit of a clock that changes nothing; no array has that name."""

ASLEEP = "asleep"
"""The edit of the parameters of tables that sleep; no array has that name."""


Edited = Mapping["TrainedTable", Sequence[int]]
"""Changed parameters by table, as places in its layout."""


class PlannedEdits:
    """The edits that a step has to give the servers before its gradients.

    Attributes:
        edited: the changed parameters.
        problem: the reason why their values are invalid; empty if they are valid.
        digest, edit_digest: names of all changes, and of the changed parameters.
    """

    def __init__(self) -> None:
        self.edited: Edited = {}
        self.problem = ""
        self.digest = b""
        self.edit_digest = b""
        self._loaded: LoadedState | None = None
        self._left: deque[str] = deque()
        self._period = -1  # of the last look at tables that sleep
        self._look_clock = -1  # the clock of that look, which a repeated call has, too
        self._is_look_next = False

    def __bool__(self) -> bool:
        return bool(self._left)

    def found(self, tables: Iterable[TrainedTable], clock: int) -> Edited:
        """The parameters that the script has changed, before the step after the model's `clock`:
        workers look at tables that sleep at the same clock, and again at those of planned edits.
        """
        planned = self.edited if self._left else ()
        is_due = not self._left and self._looks(clock)
        each = [(table, table.edited(looks=is_due or table in planned)) for table in tables]
        return {table: edited for table, edited in each if edited}

    def look_next(self) -> None:
        """Look at all tables in the next step, also at those that sleep."""
        self._is_look_next = True

    def _looks(self, clock: int) -> bool:
        """True in the first step of a period of clocks (edits before it may have taken several),
        and after `look_next`.
        """
        if self._period < 0:
            self._period = clock // LOOK_EVERY  # as that of workers which took the step before
        period = (clock + 1) // LOOK_EVERY
        if period > self._period or self._is_look_next:
            self._period, self._look_clock, self._is_look_next = period, clock, False
        return clock == self._look_clock

    def plan(
        self, edited: Edited, loaded: LoadedState | None, problem: str, passed_count: int = 0
    ) -> None:
        """Plan changed parameters, loaded state or both, after `passed_count` empty edits."""
        self.edited, self._loaded, self.problem = edited, loaded, problem
        self._left = deque([PASSED] * passed_count)
        if problem or loaded is None:
            self._left.append("")
        else:
            self._left.extend([VALUES_ARRAY, *loaded.names] if edited else loaded.names)
        if not problem and any(table.is_asleep for table in edited):
            self._left.append(ASLEEP)  # they take a step only if all workers edit them
        self.digest = self.edit_digest = b"" if problem else digest_of(edited)
        if loaded is not None:
            whole = self.digest + loaded.digest
            self.digest = hashlib.blake2b(whole, digest_size=DIGEST_BYTES).digest()

    @property
    def next(self) -> str:
        """The array of the next edit; empty: parameters, at once; ASLEEP: those of tables that
        sleep, at once; PASSED: none.
        """
        check(bool(self._left), "EDIT-1", "nothing is planned")
        return self._left[0]

    def name_at(self, rank: int) -> bytes:
        """The name of the next edit, as a worker seals it. One with a problem has a name of its
        own: it is refused and ends the clock for all workers, which need not wait for this one.
        """
        if self.next == PASSED:
            return PASSED.encode()
        return f"refused by worker {rank}".encode() if self.problem else self.digest

    def values(self, table: TrainedTable) -> torch.Tensor | None:
        """A table's values of the next edit's array; None if it has none."""
        check(self._loaded is not None, "EDIT-1", "no state was loaded")
        return None if self._loaded is None else self._loaded.arrays.get(table, {}).get(self.next)

    @property
    def is_in_place_with_next(self) -> bool:
        """True if all planned edits are in place once the servers have the next."""
        return len(self._left) - (ASLEEP in self._left) <= 1

    def ended(self, refused: EditRefused | None = None) -> EditRefused | None:
        """The clock of the next edit is over: go on to the one after it, or, after a refusal or
        with a problem, forget all. Returns the refusal that counts. A refused clock is passed, too:
        a worker that has died may have sealed it as a step.
        """
        counts = None if self.next == PASSED else refused
        if counts is not None or self.problem:
            self.forget()
        else:
            self._left.popleft()
        return counts

    def forget(self) -> None:
        self._left.clear()


FROZEN = (
    "It is frozen: where the script itself changes it (a momentum teacher), give the optimizer "
    "only the parameters that it trains: [p for p in m.parameters() if p.requires_grad], module=m"
)
"""The advice if all changed parameters are frozen."""


def is_of_frozen(edited: Edited) -> bool:
    """True if all changed parameters are in tables that sleep."""
    return all(table.is_asleep for table in edited)


def edit_refused(edited: Edited, name: str, why: str) -> str:
    """The message about changed parameters that no step can take."""
    words = (
        f"parameter {names_of(edited)} of '{name}' was changed since the last step, {why}. "
        "Nothing was sent of this step, and the change stays until it is undone or taken. "
    )
    if is_of_frozen(edited):
        return words + FROZEN
    return words + (
        "Change it under BSP: set_consistency('bsp') at every worker, the change, step(), and "
        "set_consistency() back; or before the optimizer is made. To clamp in every step, give the "
        "optimizer clamp=(least, greatest)"
    )


def load_refused(name: str, why: str) -> str:
    """The message about loaded state that no step can take."""
    return (
        f"optimizer state was loaded into '{name}', {why}. Nothing was sent. Load it under BSP: "
        "set_consistency('bsp') at every worker, load_state_dict(), step(), and "
        "set_consistency() back; or start the cluster from a checkpoint, which has it in every "
        "setting"
    )


def own_words(edited: Edited, *, is_loaded: bool) -> str:
    """Words for the part of this worker in an edit that was refused."""
    own = "no parameter was changed here"
    if is_loaded:
        own = "optimizer state was loaded here, which waits for a step that takes all of it"
    elif edited:
        own = f"{names_of(edited)} was changed here, and stays so until undone or taken"
    return f"{own}. No worker took the step"


def names_of(edited: Edited) -> str:
    """The names of the first few parameters, and the number of the others."""
    names = [f"'{table.layout.placed[index].name}'" for table, index in _each(edited)]
    more_count = len(names) - _NAMED_COUNT
    words = ", ".join(names[:_NAMED_COUNT])
    return words + (f" and {more_count} more" if more_count > 0 else "")


def _each(edited: Edited) -> Iterator[tuple[TrainedTable, int]]:
    return ((table, index) for table, indexes in edited.items() for index in indexes)


def digest_of(edited: Edited) -> bytes:
    """The name of an edit: the same at all workers that made the same changes. Copies the changed
    parameters into host memory.
    """
    entries = ((table, table.layout.placed[index]) for table, index in _each(edited))
    return digest_of_arrays(
        (table.name, entry.name, entry.tensor.detach().to(device="cpu", dtype=table.dtype))
        for table, entry in entries
    )


def problem_of(edited: Edited, *, may_be_infinite: bool) -> str:
    """The reason why the table cannot have these values; empty if it can."""
    for table, index in _each(edited):
        entry, expected = table.layout.placed[index], table.handle.spec.tensors[index].shape
        now = entry.tensor.detach()
        if tuple(now.shape) != tuple(expected):
            return f"'{entry.name}' has shape {tuple(now.shape)}; expected {tuple(expected)}"
        if not may_be_infinite and not is_finite(now):
            return (
                f"'{entry.name}' was given an infinity or a NaN; expected finite values "
                "(allow_non_finite=True would take it)"
            )
    return ""
