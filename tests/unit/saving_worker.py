"""A worker whose save points are tested: what it says, and what the cluster says to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ps_core import limits
from ps_core.change import Checkpoint, TableCut
from ps_core.cluster_view import ClusterView
from ps_core.consistency import parsed
from ps_core.keys import TableId
from ps_core.manifest import PartReport
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_worker.checkpoint.save_points import Question, SavePoints
from ps_worker.steps.steps import TableHandle

A, B = TableId(1), TableId(2)
WAIT_S = 10.0


@dataclass
class Steps:
    """What a handle asks for its clock."""

    clock: int = 0


class State:
    """Something attached: it is what its worker has counted."""

    def __init__(self, value: Callable[[], object]) -> None:
        self._value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self._value()}

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError(state_dict)


@dataclass
class Worker:
    """A worker's save points, what it has said, and the newest view."""

    setting: str = "bsp"
    patience_s: float = limits.CHECKPOINT_CUT_S
    joined: list[tuple[int, dict[TableId, int], bool]] = field(default_factory=list)
    stayed: list[tuple[int, dict[TableId, int], bool]] = field(default_factory=list)
    asked: list[tuple[int, dict[TableId, int], bool]] = field(default_factory=list)
    must_step: bool = False
    is_awaited: bool = False
    has_begun: bool = False
    reported: list[tuple[int, PartReport]] = field(default_factory=list)
    copied: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heard = threading.Condition()
        self.problem: Exception | None = None
        spec = TableSpec(
            "a", DType.FLOAT32, 64, OptimizerSpec(OptimizerKind.SGD),
            consistency=parsed(self.setting),
        )  # fmt: skip
        specs = {A: spec.validated(), B: replace(spec, name="b").validated()}
        self.steps = {A: Steps(), B: Steps()}
        self.handles = {
            table_id: TableHandle(Table(table_id, 0, specs[table_id]), steps)  # type: ignore[arg-type]
            for table_id, steps in self.steps.items()
        }
        self.view = ClusterView(1, "c", 1, 1, (), (), tuple(h.table for h in self.handles.values()))
        self.opened = dict(self.handles)
        handles = self.opened.values()
        self.points = SavePoints(self, lambda: handles, self._write, self.patience_s)

    def begin_at(self, clock: int) -> None:
        """Its tables are of a checkpoint of this clock."""
        for table_id, handle in self.handles.items():
            handle.table = replace(handle.table, restored_clock=clock)
            self.steps[table_id].clock = clock

    # --- as the scheduler hears it

    def join_checkpoint(
        self,
        number: int,
        clocks: Mapping[TableId, int],
        *,
        has_state: bool,
        has_begun: bool,
        question: Question | None = None,
        answered: Callable[[bool], None] | None = None,
    ) -> None:
        """The answer is given on another thread, as by the loop."""
        said = {None: self.joined, Question.MUST_STEP: self.stayed, Question.IS_AWAITED: self.asked}
        with self.heard:
            said[question].append((number, dict(clocks), has_state))
            self.has_begun = has_begun
            self.heard.notify_all()
        if answered is not None:
            is_so = self.must_step if question is Question.MUST_STEP else self.is_awaited
            threading.Thread(target=answered, args=(is_so,)).start()

    def report_part(self, number: int, part: PartReport) -> None:
        with self.heard:
            self.reported.append((number, part))
            self.heard.notify_all()

    def _write(
        self, checkpoint: Checkpoint, clock: int, states: Mapping[str, Mapping[str, Any]]
    ) -> Callable[[], PartReport]:
        self.copied.append((checkpoint.number, clock, {k: dict(v) for k, v in states.items()}))

        def write() -> PartReport:
            if self.problem is not None:
                raise self.problem
            return PartReport("worker-0", 9, "ab")

        return write

    def report(self, count: int = 1) -> list[tuple[int, PartReport]]:
        """What it has reported, as soon as that is so many."""
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.reported) >= count, WAIT_S)
            return self.reported

    # --- what the cluster says

    def see(self, checkpoint: Checkpoint | None, **cuts: int) -> None:
        """A newer view, with tables cut after these clocks."""
        number = 0 if checkpoint is None else checkpoint.number
        tables = tuple(
            replace(h.table, cut=TableCut(number, cuts[h.name])) if h.name in cuts else h.table
            for h in self.handles.values()
        )
        view_number = self.view.view_number + 1
        self.view = replace(
            self.view, view_number=view_number, tables=tables, checkpoint=checkpoint
        )
        self.points.take_view(self.view)

    def propose(self, number: int = 1) -> None:
        self.see(Checkpoint(number, "url"))

    def cut(self, a: int, b: int = 0, number: int = 1) -> None:
        self.see(Checkpoint(number, "url", is_cut=True), a=a, b=b)

    # --- what the script does

    def model(self, *tables: TableId, is_awake: bool = True) -> None:
        self.points.add_model(lambda: [(self.handles[t], is_awake) for t in tables])

    def drop(self, table: TableId) -> None:
        """It is another worker's."""
        del self.opened[table]

    def attach(self) -> None:
        self.points.attach("clocks", State(lambda: (self.steps[A].clock, self.steps[B].clock)))

    def step(self, *tables: TableId) -> None:
        for table_id in tables or (A,):
            self.steps[table_id].clock += 1


class Resting:
    """A script at a save point, on a thread of its own."""

    def __init__(self, reach: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=reach, daemon=True)
        self._thread.start()

    def is_over(self, within_s: float = WAIT_S) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    @property
    def waits(self) -> bool:
        """It does not go on; as far as a moment tells."""
        return not self.is_over(0.05)


def clocks_of(worker: Worker) -> dict[TableId, int]:
    return worker.joined[-1][1]
