"""A training loop as users write it, and what every read of it must hold."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Mapping
from dataclasses import dataclass

from ps_core.consistency import Mode
from ps_core.errors import EditRefused, Fenced, InvalidConfig, InvalidTensor, UpdateFailed
from ps_core.keys import TableId
from ps_core.tables.table import Table
from ps_worker.spec.loop_places import Found, PlaceSearch
from ps_worker.steps.steps import passed, skipped_clocks
from ps_worker.window.push_window import BlockPlace, StepEnded, StepTerms
from tests.sim.actors import EVERY_BLOCK, ReadTerms, SimWorker, Waits
from tests.sim.arithmetic import may_be_read_last, numbers_of
from tests.sim.edits import Edit
from tests.sim.grads import VALUES, Grad
from tests.sim.truth import CLIP_SCALE, Body, TableFailed, TrainingEnded, Truth

FROM_THE_LEADER = 0.9
"""Of a follower's values; it reads the others itself."""

WEIGHTS = (1.0, 0.5, 1.0, 1.75, 1.0, 3.0, 0.25)
"""Of steps, one worker's after the other's: for AMP, and by batches of other sizes."""

WHOLE_EVERY = 5
"""Each so many-th clock of a model in fragments is a `synchronize`."""

TOGETHER = 0.7
"""Of the steps that may be sealed together on all tables."""

FOLLOWS_S = 600.0
"""So long a late joiner follows the others to a place, which may be slow here ..."""
UNHEARD_S = 3.0
"""... or waits for anyone to tell of one; as long where tables of several paces need it ..."""
ASKS_S = 0.25
"""... and asks again so often."""

MANY = 1 << 32

_ALONE = 4
"""So much likelier is a block bad that is its step's only one, and brings the seal with it."""


def training(worker: SimWorker, truth: Truth, steps: int) -> Waits:
    """For each table in turn push blocks, seal, wait, read, check."""
    clocks: dict[TableId, int] = {}
    if worker.is_late_joiner:
        yield from begin_where_the_others_are(worker, truth, clocks)
    else:
        yield from begin_anew(worker, truth, clocks)
    for table_id in worker.dropped:
        clocks.pop(table_id, None)
    firsts = _firsts(worker, truth) if worker.layout.settings.paces else dict(clocks)
    may_leave_by_it = not worker.layout.settings.groups.leaders
    leaves_by_its_step = worker.world.draw.random() < 0.3 and may_leave_by_it  # else by another
    stays = list(worker.layout.tables)
    number, worker.is_at_its_last = 0, False
    while not worker.is_at_its_last:
        number += 1
        _begin_loop(worker, firsts, clocks)
        worker.is_at_its_last = is_last = number >= steps + worker.extra_steps
        newest: dict[TableId, int] = {}
        if is_last and leaves_by_its_step:
            stays = [table for table in stays if table not in awake_tables(worker)]
        if not is_last and _may_seal_together(worker, clocks):
            yield from _steps_together(worker, truth, clocks, newest)
            _leave_out(worker, firsts, clocks, newest)
            yield from worker.between(worker, True)
            continue
        for table, is_its_last in steps_of_loop(worker):
            clock = clocks[table.table_id] + 1
            _begin_step(worker, table, clocks)
            edit = worker.layout.settings.edits.at(table, clock)
            leaves = is_last and is_its_last and leaves_by_its_step
            if leaves and edit is None:
                yield from _step(worker, truth, table, clock, last=True)
                continue
            blocks: Container[int] = EVERY_BLOCK
            if edit is None or not edit.is_of(worker.rank):
                blocks = fragment_of(worker, table, clock)
                yield from _step(worker, truth, table, clock)
            else:
                yield from _edit(worker, truth, edit)
            if leaves:
                stays.append(table)
            newest[table.table_id] = yield from _pull(worker, truth, table, clock, blocks)
            clocks[table.table_id] = clock
        if not is_last or not leaves_by_its_step:
            _leave_out(worker, firsts, clocks, newest)
        yield from worker.between(worker, not is_last)
    for table in stays:
        clock = clocks[table.table_id] + 1
        ranges = list(table.blocks_by_range(worker.layout.range_count))
        worker.window.seal(table.table_id, clock, ranges, StepTerms(skip=True, last=True))
        truth.left.add((table.table_id, worker.incarnation))
        worker.says_goodbye()
        yield lambda key=(table.table_id, clock): key in worker.ended  # type: ignore[misc]


def _begin_step(worker: SimWorker, table: Table, clocks: Mapping[TableId, int]) -> None:
    """As `TrainedModel.step`: each table is a model of its own."""
    is_only = len(worker.layout.tables) == 1
    worker.loop.begin_step(table.table_id, _awake_clocks(worker, clocks), is_only=is_only)


def _firsts(worker: SimWorker, truth: Truth) -> dict[TableId, int]:
    """The clocks at which the tables began."""
    return {t.table_id: truth.restored.get(t.table_id, 0) for t in worker.layout.tables}


def awake_tables(worker: SimWorker) -> list[Table]:
    """Those that are stepped, in this time of its loop."""
    settings = worker.layout.settings
    return [
        table
        for table in worker.layout.tables
        if table.table_id not in settings.asleep
        and settings.wakes_in.get(table.table_id, 0) <= worker.loop_number
    ]


def steps_of_loop(worker: SimWorker) -> list[tuple[Table, bool]]:
    """The tables that are stepped, as often as they are, and whether it is a table's last step in
    this time of the loop.
    """
    paces = worker.layout.settings.paces
    counts = [(table, paces.get(table.table_id, 1)) for table in awake_tables(worker)]
    return [(table, step == count - 1) for table, count in counts for step in range(count)]


def _begin_loop(
    worker: SimWorker, firsts: Mapping[TableId, int], clocks: Mapping[TableId, int]
) -> None:
    """How often its loop was gone through by all who train is in the clocks of the first table."""
    settings = worker.layout.settings
    if settings.paces:
        base = worker.layout.tables[0].table_id
        worker.loop_number = (clocks[base] - firsts[base]) // settings.paces[base]
    if settings.has_save_points:
        is_only = len(worker.layout.tables) == 1
        worker.loop.save_point(_awake_clocks(worker, clocks), is_only=is_only)


def _awake_clocks(worker: SimWorker, clocks: Mapping[TableId, int]) -> dict[TableId, int]:
    awake = [table.table_id for table in awake_tables(worker)]
    return {table_id: clocks[table_id] for table_id in awake if table_id in clocks}


def begin_anew(
    worker: SimWorker, truth: Truth, clocks: dict[TableId, int], *, reads: bool = True
) -> Waits:
    """Rank 0 gives initial values where a checkpoint has none, and each worker reads them, unless
    it dies before that. It trains without tables that fail.
    """
    for table in list(worker.layout.tables):
        first = truth.restored.get(table.table_id)
        if worker.rank == 0 and first is None and table.spec.rows is None:
            yield from _step(worker, truth, table, 0)
        clocks[table.table_id] = first or 0
        if reads and (not first or may_be_read_last(table)):  # a checkpoint has no sums
            with worker.without_failed(table):
                yield from read_and_check(worker, truth, table, first or 0)


def _pull(
    worker: SimWorker, truth: Truth, table: Table, clock: int, blocks: Container[int]
) -> Generator[Callable[[], bool], None, int]:
    """It has the values of its step, or its leader has: the clock of what was read."""
    groups, rank, table_id = worker.layout.settings.groups, worker.rank, table.table_id
    if groups.is_followed(rank) and worker.world.draw.random() < FROM_THE_LEADER:
        yield lambda: groups.pulled[table_id, groups.leaders[rank]] >= clock
        return clock
    yield from read_and_check(worker, truth, table, clock, blocks)
    groups.pulled[table_id, rank] = clock
    if not all(block in blocks for block in range(table.block_count)):
        return clock
    answers = worker.reads.answers.values()  # with backup workers, others go on without it
    return max(clock, min(answer.clock for answer in answers))


def _leave_out(
    worker: SimWorker,
    firsts: Mapping[TableId, int],
    clocks: dict[TableId, int],
    newest: Mapping[TableId, int],
) -> None:
    """As `ps_worker.Client.catch_up`: a clock is left out on all tables, or on none (S7). They stay
    as far apart as they were when the worker began.
    """
    counts = skipped_clocks([clock - clocks[table_id] for table_id, clock in newest.items()])
    for table_id, count in zip(newest, counts, strict=True):
        clocks[table_id] += count
        worker.world.counts["clocks left out"] += count
    asleep = worker.layout.settings.asleep
    if worker.layout.settings.paces:
        return
    awake = {table_id: clock for table_id, clock in clocks.items() if table_id not in asleep}
    taken = {clock - firsts[table_id] for table_id, clock in awake.items()}
    assert len(taken) == 1, f"S7: worker {worker.rank} is at {clocks}, from {firsts}"


def begin_where_the_others_are(
    worker: SimWorker, truth: Truth, clocks: dict[TableId, int]
) -> Waits:
    """As `ps_worker.training.joining`: it joins each table, and puts them at one place, as they are
    for the others, before it waits for anything. Else it could wait on one table for who waits for
    it on another.
    """
    tables = worker.layout.tables
    yield lambda: len(worker.joined_after()) == len(tables)
    joined = worker.joined_after()
    clocks.update(joined)
    worker.loop_number = MANY  # whichever of the tables are stepped
    stepped, firsts = awake_tables(worker), _firsts(worker, truth)
    placed = yield from _find_place(worker, truth, clocks)
    if not worker.layout.settings.paces:  # else each table is a model of its own
        ids = [table.table_id for table in stepped]
        counts = passed([clocks[each] for each in ids], [firsts[each] for each in ids])
        behind = {each: clocks[each] + n for each, n in zip(ids, counts, strict=True)}
        _pass_to(worker, truth, clocks, {t: end for t, end in behind.items() if t not in placed})
    taken = {clocks[t.table_id] - firsts[t.table_id] for t in stepped}
    worker.world.counts["joined tables that were far apart"] += len(taken) > 1
    for table in tables:
        truth.sealed[table.table_id, worker.incarnation] = clocks[table.table_id]
    for table in tables:
        sleeps = table.table_id in worker.layout.settings.asleep
        worker.world.counts["joined what sleeps"] += sleeps
        with worker.without_failed(table):
            yield from _join(worker, truth, table, joined[table.table_id], clocks[table.table_id])


def _find_place(
    worker: SimWorker, truth: Truth, clocks: dict[TableId, int]
) -> Generator[Callable[[], bool], None, frozenset[TableId]]:
    """As `ps_worker.client.joined_place`: the tables on which it is at a place of the others."""
    world, search = worker.world, PlaceSearch()
    settings = worker.layout.settings
    awake = awake_tables(worker)
    modes = {settings.at(each, clocks[each.table_id] + 1).mode for each in awake}
    joined = {t.table_id: clocks[t.table_id] for t in awake}
    may_hear = modes != {Mode.ASP}
    firsts, began_s = _firsts(worker, truth), world.now_s
    unheard_s = FOLLOWS_S if settings.paces else UNHEARD_S
    while any(clock > firsts[each] for each, clock in joined.items()):
        found = search.hear(joined, worker.reports())
        _pass_to(worker, truth, clocks, search.clocks)
        world.counts["places followed"] += found is Found.FOLLOWS
        if found is Found.ALONE:
            worker.loop.begin_alone()
        limit_s = unheard_s if found is Found.NOTHING else FOLLOWS_S
        goes_on = found is Found.FOLLOWS or (found is Found.NOTHING and may_hear)
        if not goes_on or world.now_s >= began_s + limit_s:
            world.counts["places found"] += found is Found.PLACE
            break
        at_s = world.now_s + ASKS_S
        world.after(ASKS_S, worker.go_on)
        yield lambda at_s=at_s: world.now_s >= at_s  # type: ignore[misc]
    return search.placed


def _pass_to(
    worker: SimWorker, truth: Truth, clocks: dict[TableId, int], ends: Mapping[TableId, int]
) -> None:
    """It ends steps with nothing up to these clocks, and waits for none of them."""
    for table in awake_tables(worker):
        ranges = list(table.blocks_by_range(worker.layout.range_count))
        end = ends.get(table.table_id, 0)
        for clock in range(clocks[table.table_id] + 1, end + 1):
            worker.world.counts["steps that are passed"] += 1
            worker.window.seal(table.table_id, clock, ranges, StepTerms(skip=True))
            truth.sealed[table.table_id, worker.incarnation] = clock
        clocks[table.table_id] = max(clocks[table.table_id], end)
        worker.layout.settings.steps(table, clocks[table.table_id])


def _join(worker: SimWorker, truth: Truth, table: Table, joined: int, newest: int) -> Waits:
    yield from _read(worker, table, 0)  # it is given what is there when it has joined
    _check_first(worker, truth, table, joined)
    for clock in range(joined + 1, newest + 1):
        yield lambda key=(table.table_id, clock): key in worker.ended  # type: ignore[misc]
    yield from read_and_check(worker, truth, table, newest)


def _edit(worker: SimWorker, truth: Truth, edit: Edit) -> Waits:
    """As `TrainedTable.edit`: some gradients have left already."""
    draw, layout, table = worker.world.draw, worker.layout, edit.table
    table_id, clock = table.table_id, edit.clock
    places = {
        b: BlockPlace(table_id, table.range_of_block(b, layout.range_count), b)
        for b in range(table.block_count)
    }
    for block in [b for b in places if draw.random() < 0.3]:
        pulled = worker.peer_versions.get((table_id, block))
        grad = Grad(clock, worker.rank, block, 0, pulled, worker.incarnation)
        problem = InvalidTensor("non-finite") if draw.random() < 0.1 else None
        body = Body(grad, problem, is_assign=False, is_eager=False)
        worker.window.submit(places[block], clock, body, byte_count=256)
        if draw.random() < 0.5:
            yield worker.pause()
    worker.window.withdraw(table_id, clock, but=edit.blocks)
    for block in edit.blocks:
        grad = edit.grad(worker.rank, block, worker.incarnation)
        body = Body(grad, None, is_assign=True, is_eager=False)
        worker.window.submit(places[block], clock, body, byte_count=256)
    is_known = layout.settings.takes_edit(edit)
    if is_known:
        truth.change(edit, worker.incarnation)
    ranges = list(table.blocks_by_range(layout.range_count))
    worker.window.seal(
        table_id,
        clock,
        ranges,
        StepTerms(edit=edit.name(worker.rank), array=edit.array_name(worker.rank)),
    )
    layout.settings.stepped[table_id] = max(layout.settings.stepped[table_id], clock)
    truth.sealed[table_id, worker.incarnation] = clock
    yield lambda: (table_id, clock) in worker.ended
    ended = worker.ended[table_id, clock]
    is_taken = layout.settings.takes_edit(edit)
    if is_taken and not is_known:  # a change of the setting was decided meanwhile
        truth.change(edit, worker.incarnation)
    _check_refused(worker, edit, ended)
    assert ended.applied == is_taken or ended.discarded, (edit, ended)
    worker.world.counts["edits" if is_taken else "edits refused"] += 1
    worker.world.counts["edits of state"] += is_taken and edit.array != VALUES
    for block in () if is_taken else edit.blocks:
        truth.contributions[table_id, block].discard(edit.item(block))


def _check_refused(worker: SimWorker, edit: Edit, ended: StepEnded) -> None:
    """EDIT: what is refused is so for that reason, and everywhere."""
    is_taken = worker.layout.settings.takes_edit(edit)
    codes = {error.code for _, error in ended.problems}
    expected = set() if is_taken else {EditRefused.code}
    assert codes == expected or (ended.discarded and codes < expected), f"EDIT: {edit}: {ended}"
    is_shared = worker.layout.settings.is_shared(edit.table, edit.clock)
    worker.world.counts["edits disputed"] += is_shared and edit.other is not None


def _may_seal_together(worker: SimWorker, clocks: Mapping[TableId, int]) -> bool:
    """As `TrainedModel` with rows: not in groups, and edits are steps of their own."""
    settings, tables = worker.layout.settings, worker.layout.tables
    edits = (settings.edits.at(table, clocks[table.table_id] + 1) for table in tables)
    return (
        settings.seals_together
        and len(tables) > 1
        and not settings.groups.leaders
        and not any(edits)
        and worker.world.draw.random() < TOGETHER
    )


def _steps_together(
    worker: SimWorker, truth: Truth, clocks: dict[TableId, int], newest: dict[TableId, int]
) -> Waits:
    """A step of all tables, in which each takes part or none: then a read of each."""
    tables = worker.layout.tables
    opened = []
    for table in tables:
        clock = clocks[table.table_id] + 1
        _begin_step(worker, table, clocks)
        opened.append((yield from _begun(worker, truth, table, clock, may_be_eager=False)))
    skip = worker.world.draw.random() < 0.1
    is_out = skip or any(each.is_bad for each in opened)
    beside = any(each.final for each in opened if not each.is_bad)
    worker.world.counts["refused beside others"] += beside and is_out and not skip
    worker.world.counts["steps sealed together"] += 1
    worker.window.together([(each.table.table_id, each.clock) for each in opened])
    for each in opened:
        _seal(worker, truth, each, skip=skip, is_out=is_out)
    for each in opened:
        clocks[each.table.table_id] = each.clock
        yield from _ended(worker, truth, each, is_out=is_out)
    for each in opened:
        blocks = fragment_of(worker, each.table, each.clock)
        found = yield from _pull(worker, truth, each.table, each.clock, blocks)
        newest[each.table.table_id] = found


@dataclass(frozen=True, slots=True)
class _Open:
    """A step that was begun; `final`: what it pushed of each block at last."""

    table: Table
    clock: int
    eager: bool
    final: dict[int, Body]

    @property
    def is_bad(self) -> bool:
        """Whether a server refuses some of it."""
        return any(body.problem for body in self.final.values())


def _begun(
    worker: SimWorker, truth: Truth, table: Table, clock: int, *, may_be_eager: bool = True
) -> Generator[Callable[[], bool], None, _Open]:
    """Push a step of a table."""
    draw, layout = worker.world.draw, worker.layout
    disputed = _is_disputed(worker, table, clock)
    blocks = _blocks_of(worker, table, clock)
    may_be_eager &= table.spec.mode is not Mode.BSP or layout.settings.may_change
    clips = table.table_id in layout.settings.clipped and clock > 0
    likely = 1.0 if (table.table_id, clock) in worker.rates else 0.3
    eager = bool(clock) and may_be_eager and not clips and draw.random() < likely
    again = [b for b in blocks if clock and not eager and draw.random() < 0.25]
    final: dict[int, Body] = {}
    for revision, block in [(0, b) for b in blocks] + [(1, b) for b in again]:
        # Whether a bad block of an eager step spoils the others depends on its clock's setting.
        share = worker.bad_share * (_ALONE if table.block_count == 1 else 1)
        is_bad = bool(clock) and not disputed and draw.random() < share
        bad = is_bad and not (eager and layout.settings.may_change)
        problem = InvalidTensor("non-finite") if bad else None
        pulled = worker.peer_versions.get((table.table_id, block)) if clock else None
        grad = Grad(clock, worker.rank, block, revision, pulled, worker.incarnation)
        body = Body(grad, problem, clock == 0, eager)
        final[block] = body
        if eager and problem is None:  # may be applied, and read by others, from now on
            truth.contributions[table.table_id, block].add(body.grad)
            layout.settings.steps(table, clock)
        range_id = table.range_of_block(block, layout.range_count)
        worker.window.submit(
            BlockPlace(table.table_id, range_id, block),
            clock,
            body,
            byte_count=256,
        )
        if draw.random() < 0.2:
            yield worker.pause()
    return _Open(table, clock, eager, final)


def _is_disputed(worker: SimWorker, table: Table, clock: int) -> bool:
    """Whether others mean an edit by this clock, and refuse steps."""
    settings = worker.layout.settings
    return settings.edits.at(table, clock) is not None and settings.is_shared(table, clock)


def _step(
    worker: SimWorker, truth: Truth, table: Table, clock: int, *, last: bool = False
) -> Waits:
    draw, layout = worker.world.draw, worker.layout
    opened = yield from _begun(worker, truth, table, clock)
    disputed = _is_disputed(worker, table, clock)
    skip = bool(clock) and not opened.eager and _skips(worker, table, clock) and not disputed
    is_out = skip or disputed or opened.is_bad
    _seal(worker, truth, opened, skip=skip, is_out=is_out, last=last)
    may_read = clock and not last and not layout.settings.groups.is_followed(worker.rank)
    if may_read and draw.random() < 0.3:  # before its step has ended: it waits for that
        worker.world.counts["early reads"] += 1
        worker.read_early = True
        yield from _read(worker, table, clock, fragment_of(worker, table, clock))
    yield from _ended(worker, truth, opened, is_out=is_out)


def _seal(
    worker: SimWorker,
    truth: Truth,
    opened: _Open,
    *,
    skip: bool,
    is_out: bool,
    last: bool = False,
) -> None:
    """Seal a step; `is_out`: it has no part in its updates."""
    layout, table, clock = worker.layout, opened.table, opened.clock
    for block, body in opened.final.items():
        if not is_out:
            truth.contributions[table.table_id, block].add(body.grad)
    if not is_out:
        truth.took_part[table.table_id, clock].add(worker.incarnation)
    layout.settings.steps(table, clock)
    if is_out and not opened.eager:
        layout.settings.skipped.add((table.table_id, clock, worker.incarnation))
    worker.world.counts["skipped steps" if is_out else "steps"] += 1
    worker.world.counts["eager steps"] += opened.eager
    ranges = list(table.blocks_by_range(layout.range_count))
    is_eager = opened.eager and any(body.problem is None for body in opened.final.values())
    terms = terms_of(worker, table, clock, skip=skip, last=last, eager=is_eager)
    worker.window.seal(table.table_id, clock, ranges, terms)
    truth.sealed[table.table_id, worker.incarnation] = clock
    if last:
        truth.left.add((table.table_id, worker.incarnation))
        worker.world.counts["left by a step"] += 1


def _ended(worker: SimWorker, truth: Truth, opened: _Open, *, is_out: bool) -> Waits:
    """Its step has ended, as it should."""
    layout, table, clock = worker.layout, opened.table, opened.clock
    yield lambda: (table.table_id, clock) in worker.ended
    ended = worker.ended[table.table_id, clock]
    assert ended.applied == (not is_out), (ended, is_out)
    edit = layout.settings.edits.at(table, clock)
    if edit is not None and _is_disputed(worker, table, clock):
        _check_refused(worker, edit, ended)
    if worker.is_late_joiner:
        mode = layout.settings.at(table, clock).mode.value
        clips = table.table_id in layout.settings.clipped and clock > 0
        worker.world.counts[f"newcomers' {'clipped ' * clips}steps under {mode}"] += not is_out
    _note_lost(worker, truth, ended)


def _blocks_of(worker: SimWorker, table: Table, clock: int) -> list[int]:
    """The blocks that a worker has gradients of, as it pushes them: a follower has none."""
    draw, groups = worker.world.draw, worker.layout.settings.groups
    if clock and groups.is_followed(worker.rank):
        return []
    blocks = fragment_of(worker, table, clock)
    found = [block for block in blocks if clock == 0 or draw.random() < 0.8]
    draw.shuffle(found)
    return found


def _skips(worker: SimWorker, table: Table, clock: int) -> bool:
    """Whether a worker skips a step: a group does as one."""
    groups = worker.layout.settings.groups
    if groups.leaders:
        worker.world.counts["steps of groups"] += groups.size(worker.rank) > 1
        return groups.skip(table, clock, worker.rank)
    return worker.world.draw.random() < 0.1


def _note_lost(worker: SimWorker, truth: Truth, ended: StepEnded) -> None:
    for table_id, grad in worker.lost:
        truth.contributions[table_id, grad.block].discard(grad)
    if ended.rejected:
        step = ended.table_id, ended.clock
        assert set(ended.rejected) == {g.block for t, g in worker.lost if (t, g.clock) == step}


def terms_of(
    worker: SimWorker, table: Table, clock: int, *, skip: bool, last: bool, eager: bool
) -> StepTerms:
    """What a worker says of its step; what it said is written down."""
    settings, key = worker.layout.settings, (table.table_id, worker.incarnation, clock)
    scale = WEIGHTS[(clock + 3 * worker.rank) % len(WEIGHTS)] if clock and not eager else 1.0
    if settings.groups.leaders:
        scale = float(settings.groups.size(worker.rank))
    clips = table.table_id in settings.clipped and clock > 0
    numbers = worker.rates.get((table.table_id, clock), numbers_of(table, clock))
    settings.amp[key] = scale
    if eager:
        settings.was_eager(table, worker.incarnation, clock)
    else:  # eager pushes have been applied with theirs
        settings.rates[key] = numbers
    return StepTerms(numbers, scale, skip, last, CLIP_SCALE if clips else None)


def fragment_of(worker: SimWorker, table: Table, clock: int) -> range:
    """As `OuterSteps.choose`: the blocks that the step of that clock exchanges."""
    count = table.spec.optimizer.fragment_count
    if not count or clock % WHOLE_EVERY == 0:
        return range(table.block_count)
    tables = worker.layout.tables
    first = sum(each.block_count for each in tables[: tables.index(table)])
    return range((clock - 1 - first) % count, table.block_count, count)


def read_and_check(
    worker: SimWorker,
    truth: Truth,
    table: Table,
    clock: int,
    blocks: Container[int] = EVERY_BLOCK,
) -> Waits:
    if worker.read_early:
        worker.read_early = False
    else:
        yield from _read(worker, table, clock, blocks)
    _check(worker, truth, table, clock)


def _check_first(worker: SimWorker, truth: Truth, table: Table, joined: int) -> None:
    """Ranges answer as they have joined it; of BSP some may be as far as it has passed steps."""
    for answer in worker.reads.answers.values():
        assert answer.clock >= joined
        is_bsp = worker.layout.settings.at(table, joined + 1).mode is Mode.BSP
        for block, found in answer.blocks.items():
            clock = answer.clock if is_bsp else joined
            _check_block(worker, truth, table, clock, (block, found))


def _check(worker: SimWorker, truth: Truth, table: Table, clock: int) -> None:
    for answer in worker.reads.answers.values():
        for block, found in answer.blocks.items():
            _check_block(worker, truth, table, clock, (block, found))
            truth.twin.check(table, block, found, answer.readings[block])
            if block in worker.reads.taken:
                worker.peer_versions[table.table_id, block] = answer.peer_versions[block]


def _read(
    worker: SimWorker, table: Table, clock: int, blocks: Container[int] = EVERY_BLOCK
) -> Waits:
    while True:
        terms = ReadTerms(clock, worker.incarnation, worker.rank, blocks=blocks)
        worker.reads.begin(table, terms)
        yield worker.reads.is_done
        if not worker.reads.refusals:
            break
        if any(isinstance(error, UpdateFailed) for error in worker.reads.refusals):
            assert table.table_id in worker.layout.settings.unreadable, worker.reads.refusals
            raise TableFailed
        if any(isinstance(error, InvalidConfig) for error in worker.reads.refusals):
            raise TrainingEnded("no initial values")
        if any(isinstance(error, Fenced) for error in worker.reads.refusals):
            worker.told_fenced(worker.reads.refusals[0])
            raise TrainingEnded("reads fenced")
        worker.world.counts["expired reads"] += 1


def _check_block(
    worker: SimWorker, truth: Truth, table: Table, clock: int, read: tuple[int, list[Grad]]
) -> None:
    block, found = read
    settings = worker.layout.settings
    consistency = settings.at(table, clock + 1)  # the read is for the next step
    assert len(found) == len(set(found)), f"applied twice: {found}"  # G1
    allowed = truth.contributions[table.table_id, block]
    assert set(found) <= allowed, f"never sealed: {set(found) - allowed}"
    own = {
        g for g in truth.upto(table.table_id, block, clock) if g.incarnation == worker.incarnation
    }
    assert own <= set(found), f"does not read its own writes: {own - set(found)}"
    is_known = not settings.loses(table, clock) and not consistency.backup_workers
    began = settings.last_change(table, clock + 1)
    if consistency.mode is Mode.BSP:
        same = [g for g in found if settings.last_change(table, g.clock) == began]
        _check_order(same, in_rank_order=is_known)
    if consistency.mode is Mode.BSP and is_known:  # G3, G4: exactly the first `clock`
        assert set(truth.living(found)) == truth.upto(table.table_id, block, clock)
    if consistency.mode is Mode.SSP and is_known:  # G3: nothing older than the bound is missing
        _check_bound(truth, table, clock - consistency.staleness, (block, found))
    mode = consistency.mode.value
    worker.world.counts[f"reads of {mode} after a change"] += began >= 0 and is_known


def _check_order(found: list[Grad], *, in_rank_order: bool) -> None:
    """Clock by clock; and in rank order, where there are no backup workers."""
    assert [grad.clock for grad in found] == sorted(grad.clock for grad in found)
    if in_rank_order:
        assert found == sorted(found, key=lambda grad: (grad.clock, grad.rank))


def _check_bound(truth: Truth, table: Table, clock: int, read: tuple[int, list[Grad]]) -> None:
    block, found = read
    for (table_id, incarnation), sealed in truth.sealed.items():
        if table_id == table.table_id and (table_id, incarnation) not in truth.left:
            assert sealed >= clock, f"worker {incarnation} is at {sealed}; the read needs {clock}"
    missing = truth.upto(table.table_id, block, clock) - set(found)
    assert not missing, f"misses {missing}, all up to clock {clock}"
