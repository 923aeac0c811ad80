"""What workers do that all are new and load something before their first step (S16).

    comes --joins every table--> brings nothing ----------------------------------> steps
                            +--> may not, as others train: it drops what it brings --> steps
                            +--> waits for all, passes clocks, loads --taken--------> steps
                                                              +------refused: drops it --> steps

`ps_worker.spec.late_joiners` decides; what is here is the thin edge of `joining` and
`trained_model`. Every step is sealed on all tables before it is waited for.

Oracles:
    EDIT   Of each clock members say one thing, which is in the blocks, or several, and nothing is:
           each is told so.
    LOAD   Where all bring the same and all waited for all, all load at one clock. Who brings
           something knows nobody that has taken more than a step before it joined.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ps_core.cluster_view import ClusterView
from ps_core.collective_calls import workers_here
from ps_core.errors import EditRefused
from ps_core.keys import Incarnation, TableId
from ps_core.tables.table import Table
from ps_worker.spec.late_joiners import (
    LateJoiner,
    all_have_joined,
    clocks_behind,
    joined_tables,
    may_load,
)
from ps_worker.training.planned_edits import PASSED
from ps_worker.window.push_window import BlockPlace, StepTerms
from tests.sim.actors import SimWorker, Waits
from tests.sim.edits import Edit, arrays_of
from tests.sim.grads import FIRST, LAID_VALUES, SECOND, STEP, VALUES, Grad
from tests.sim.replicated import LEASE_S
from tests.sim.training import begin_where_the_others_are, fragment_of, read_and_check, terms_of
from tests.sim.truth import Body, Truth

Ended = Generator[Callable[[], bool], None, bool]
"""Waits, and then whether what was sealed was taken."""
_PASSED = -1
"""An edit that changes nothing, among arrays."""
_ORDER = (VALUES, LAID_VALUES, FIRST, SECOND, STEP)
_STEPS = (1, 2, 4)
_MANY_STEPS = (2, 10, 40)
"""Of who brings nothing: others come when it has trained for a while."""


class Brings(Enum):
    """What a worker's script loads before its first step."""

    NOTHING = "nothing"
    THE_SAME = "the same"
    ANOTHER = "another"


@dataclass
class Said:
    """What workers say of each clock: of one table, at one clock, by whom."""

    truth: Truth
    _names: dict[tuple[TableId, int], dict[Incarnation, tuple[bytes, str]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _items: dict[tuple[TableId, int], set[Grad]] = field(default_factory=lambda: defaultdict(set))

    def says(
        self,
        table: Table,
        clock: int,
        incarnation: Incarnation,
        name: tuple[bytes, str],
        found: Sequence[Grad],
    ) -> None:
        """A worker has sealed the clock: as an edit of that name, and of that array; or, without a
        name, as a step.
        """
        key, truth = (table.table_id, clock), self.truth
        self._names[key][incarnation] = name
        self._items[key].update(found)
        if name[0]:
            for item in found:
                truth.editors[item].add(incarnation)
        else:
            truth.took_part[key].add(incarnation)
        is_one = self.is_one(table, clock)
        for item in self._items[key]:
            blocks = truth.contributions[table.table_id, item.block]
            blocks.add(item) if is_one else blocks.discard(item)
        if not is_one:
            truth.took_part.pop(key, None)

    def is_one(self, table: Table, clock: int) -> bool:
        """Whether all said the same."""
        return len(set(self._names[table.table_id, clock].values())) == 1

    def is_of_the_dead(self, table: Table, clock: int) -> bool:
        """Whether a worker that says nothing here had sealed the clock, or a later one."""
        saying, table_id = self._names[table.table_id, clock], table.table_id
        return any(
            at == table_id and sealed >= clock and incarnation not in saying
            for (at, incarnation), sealed in self.truth.sealed.items()
        )


@dataclass
class Load:
    """What came of what one worker brings.

    Attributes:
        brings: what.
        knew: whether it waited for all, and knew of all when it decided.
        may: whether it might load.
        is_at_start: whether nobody had taken a step when it joined.
        joined_s: when that was.
        stepped_s: when it had taken each of its steps.
        clocks: at which it was in place, by table; empty: it never was.
    """

    brings: Brings
    knew: bool = False
    may: bool = False
    is_at_start: bool = False
    joined_s: float = 0.0
    stepped_s: list[float] = field(default_factory=list)
    clocks: dict[TableId, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Terms:
    """What a seed's workers have in common.

    Attributes:
        said: what workers say.
        arrays: the tables' blocks with tensors that are loaded, by table, and arrays of state.
        view_of: the newest view that a worker has.
        loads: what came of what each brings.
        draw: of what each does.
    """

    said: Said
    blocks: dict[TableId, tuple[int, ...]]
    has_state: bool
    view_of: Callable[[SimWorker], ClusterView]
    loads: Mapping[SimWorker, Load]
    draw: random.Random


def loading(worker: SimWorker, load: Load, terms: Terms) -> Waits:
    """Joins, loads, takes some steps, and leaves."""
    truth, tables = terms.said.truth, worker.layout.tables
    clocks: dict[TableId, int] = {}
    yield from begin_where_the_others_are(worker, truth, clocks)
    firsts = [truth.restored.get(table.table_id, 0) for table in tables]
    is_new = any(clocks[t.table_id] > first for t, first in zip(tables, firsts, strict=True))
    edits: list[int] = []
    if load.brings is not Brings.NOTHING:
        yield from _decide(worker, load, terms, is_at_start=not is_new)
        edits = _plan(worker, load, terms, clocks)
    for array in edits:
        is_taken = yield from _edit(worker, load, terms, clocks, array)
        if not is_taken:
            worker.world.counts["loads refused by servers"] += 1
            break
    else:
        if load.may:
            load.clocks.update(clocks)
            worker.world.counts["loads in place"] += 1
    trains = load.brings is Brings.NOTHING
    for _ in range(terms.draw.choice(_MANY_STEPS if trains else _STEPS)):
        if (yield from _step(worker, terms, clocks)):
            load.stepped_s.append(worker.world.now_s)
    for table in tables:
        clock = clocks[table.table_id] + 1
        ranges = list(table.blocks_by_range(worker.layout.range_count))
        worker.window.seal(table.table_id, clock, ranges, StepTerms(skip=True, last=True))
        truth.left.add((table.table_id, worker.incarnation))
    for table in tables:
        key = table.table_id, clocks[table.table_id] + 1
        yield lambda key=key: key in worker.ended  # type: ignore[misc]


def _decide(worker: SimWorker, load: Load, terms: Terms, *, is_at_start: bool) -> Waits:
    """As `joining.joins_nobody`."""
    world, since_s = worker.world, worker.world.now_s
    table_ids = frozenset(table.table_id for table in worker.layout.tables)
    own, load.joined_s = worker.incarnation, since_s
    late_joiner = LateJoiner(own, table_ids, is_at_start, LEASE_S)
    yield lambda: joined_tables(terms.view_of(worker), own, table_ids) == table_ids
    found: list[bool | None] = []

    def is_known() -> bool:
        found.append(may_load(terms.view_of(worker), late_joiner, world.now_s - since_s))
        return found[-1] is not None

    yield is_known
    load.may, load.is_at_start = bool(found[-1]), is_at_start
    load.knew = all_have_joined(terms.view_of(worker), table_ids)
    here = {node.incarnation for node in workers_here(terms.view_of(worker)).values()}
    for other in [other for other in terms.loads if load.may and other.incarnation in here]:
        taken = [at_s for at_s in terms.loads[other].stepped_s if at_s < since_s]
        assert len(taken) <= 1, f"LOAD: worker {worker.rank} loads, and {other.rank} has trained"
    world.counts["loads at the start"] += is_at_start
    world.counts["loads that waited in vain"] += load.may and not load.knew
    world.counts["loads that may not be"] += not load.may


def _plan(worker: SimWorker, load: Load, terms: Terms, clocks: dict[TableId, int]) -> list[int]:
    """As `PlannedEdits.plan`: the arrays of each edit; _PASSED for one that changes nothing."""
    if not load.may:
        return []
    count = clocks_behind(terms.view_of(worker), clocks)
    worker.world.counts["clocks passed with an edit"] += count
    arrays = [VALUES]
    if terms.has_state:
        kinds = [set(arrays_of(table)) for table in worker.layout.tables]
        arrays = [a for a in _ORDER if a != VALUES and all(a in kind for kind in kinds)]
    return [_PASSED] * count + arrays


def _edit(
    worker: SimWorker, load: Load, terms: Terms, clocks: dict[TableId, int], array: int
) -> Ended:
    """As `TrainedModel._seal_edit`: whether it was taken."""
    layout = worker.layout
    for table in layout.tables:
        table_id, clock = table.table_id, clocks[table.table_id] + 1
        other = worker.rank if load.brings is Brings.ANOTHER else None
        blocks = () if array == _PASSED else terms.blocks[table_id]
        edit = Edit(table, clock, blocks, other, changes=True, array=max(array, VALUES))
        name = PASSED.encode() if array == _PASSED else edit.name(worker.rank)
        for block in blocks:
            place = BlockPlace(table_id, table.range_of_block(block, layout.range_count), block)
            grad = edit.grad(worker.rank, block, worker.incarnation)
            body = Body(grad, None, is_assign=True, is_eager=False)
            worker.window.submit(place, clock, body, byte_count=256)
        items = [edit.item(block, worker.rank) for block in blocks]
        shown = "" if array == _PASSED else edit.array_name(worker.rank)
        terms.said.says(table, clock, worker.incarnation, (name, shown), items)
        _seal(worker, terms, table, clock, StepTerms(edit=name, array=shown))
    return (yield from _ended(worker, terms, clocks, is_passed=array == _PASSED))


def _step(worker: SimWorker, terms: Terms, clocks: dict[TableId, int]) -> Ended:
    """A step of gradients on all tables: whether it was taken."""
    draw, layout = worker.world.draw, worker.layout
    for table in layout.tables:
        table_id, clock = table.table_id, clocks[table.table_id] + 1
        found = []
        for block in [b for b in fragment_of(worker, table, clock) if draw.random() < 0.8]:
            pulled = worker.peer_versions.get((table_id, block))
            grad = Grad(clock, worker.rank, block, 0, pulled, worker.incarnation)
            place = BlockPlace(table_id, table.range_of_block(block, layout.range_count), block)
            body = Body(grad, None, is_assign=False, is_eager=False)
            worker.window.submit(place, clock, body, byte_count=256)
            found.append(grad)
        terms.said.says(table, clock, worker.incarnation, (b"", ""), found)
        sealed = terms_of(worker, table, clock, skip=False, last=False, eager=False)
        _seal(worker, terms, table, clock, sealed)
        worker.world.counts["steps"] += 1
    return (yield from _ended(worker, terms, clocks))


def _seal(worker: SimWorker, terms: Terms, table: Table, clock: int, sealed: StepTerms) -> None:
    settings, truth = worker.layout.settings, terms.said.truth
    settings.stepped[table.table_id] = max(settings.stepped[table.table_id], clock)
    truth.sealed[table.table_id, worker.incarnation] = clock
    ranges = list(table.blocks_by_range(worker.layout.range_count))
    worker.window.seal(table.table_id, clock, ranges, sealed)


def _ended(
    worker: SimWorker, terms: Terms, clocks: dict[TableId, int], *, is_passed: bool = False
) -> Ended:
    """The clock is over on every table, and each is read: whether what was sealed is in place. A
    clock that is passed may have been sealed as a step by who died, in some ranges.
    """
    taken = set()
    for table in worker.layout.tables:
        key = table.table_id, clocks[table.table_id] + 1
        yield lambda key=key: key in worker.ended  # type: ignore[misc]
        ended, is_one = worker.ended[key], terms.said.is_one(table, key[1])
        codes = {error.code for _, error in ended.problems}
        if is_passed and terms.said.is_of_the_dead(table, key[1]):
            worker.world.counts["clocks passed with the dead"] += not ended.applied
            assert codes <= {EditRefused.code}, f"EDIT: {key}: {ended}"
        else:
            assert ended.applied == is_one, f"EDIT: {key}: {ended}"
            assert codes == (set() if is_one else {EditRefused.code}), f"EDIT: {key}: {ended}"
        worker.world.counts["clocks that were disputed"] += not is_one
        clocks[table.table_id] = key[1]
        taken.add(is_one or is_passed)
    for table in worker.layout.tables:
        yield from read_and_check(worker, terms.said.truth, table, clocks[table.table_id])
    assert len(taken) == 1, f"EDIT: worker {worker.rank} is half a step ahead: {clocks}"
    return taken.pop()
