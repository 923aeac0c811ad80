"""A run's tables, made again from logs that were made by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidUpdateLog, InvariantViolation
from ps_core.keys import Incarnation, RangeId, TableId
from ps_core.ledger import Ending, Outcome
from ps_core.tables.table import Table
from ps_server.lane.lane_socket import SharedLanes
from ps_server.replay.replayer import Replay, Version, read_run
from ps_server.replay.versions import Origin, arranged_by_clock
from ps_server.stores import Shards
from ps_server.update_log.directory import LogDirectory, boot_id
from ps_server.update_log.recovery import read_log
from ps_server.values.mutations import Put
from tests.property.shard_twin import table
from tests.unit.written_logs import ASP, LEFT, MODEL, RIGHT, Owner, WrittenLog


def replayed(path: Path, *, by_clock: bool = False) -> Replay:
    run = read_run(path)
    return Replay(run, list(run.tables.values()), by_clock=by_clock)


def values(again: Replay, blocks: dict[int, bytes], of: Table = MODEL) -> dict[int, bytes]:
    """Of these blocks, what was made."""
    return {block: bytes(again.block(of, block).tensors[0][1]) for block in blocks}


def numbers(again: Replay) -> list[int]:
    return [version.number for version in again.history.versions]


def newest(again: Replay) -> Version:
    return again.history.versions[-1]


def check_all(again: Replay, *owners: Owner) -> None:
    """What was made is what they have: values, and what the optimizer keeps."""
    again.go_to(newest(again).position)
    for owner in owners:
        store = owner.shards.stores[owner.of.table_id, owner.range_id]
        for block in owner.values():
            assert again.block(owner.of, block) == store.saved(block)


# --- under BSP


def test_a_version_is_a_clock_on_all_servers(tmp_path: Path) -> None:
    """Whatever their clocks say, and however far one is ahead of the other."""
    left, right = Owner(LEFT), Owner(RIGHT)
    one, other = WrittenLog(tmp_path / "server-0"), WrittenLog(tmp_path / "server-1")
    one.begin(left)
    other.begin(right)
    expected = [{**left.values(), **right.values()}]
    for clock in (1, 2, 3):
        one.record(left.update(clock, (0, 1), clock))
        expected.append(left.values())
    for clock in (1, 2):
        other.record(right.update(clock, (0, 1), clock), 2000.0 + clock)
        expected[clock] |= right.values()
    again = replayed(tmp_path)
    assert again.history.is_by_clock
    assert numbers(again) == [0, 1, 2]
    assert again.history.unfinished == [(3, None)]
    for version, blocks in zip(again.history.versions, expected, strict=False):
        again.go_to(version.position)
        assert values(again, blocks) == blocks
    assert [v.ranks for v in again.history.versions] == [(), (0, 1), (0, 1)]
    assert [v.time_s for v in again.history.versions[1:]] == [2001.0, 2002.0]


def test_who_skipped_and_who_was_in_part_of_it(tmp_path: Path) -> None:
    left, right = Owner(LEFT), Owner(RIGHT)
    log = WrittenLog(tmp_path)
    for owner in (left, right):
        log.begin(owner)
    log.record(left.update(1, (0, 1), skipped=(2,)))
    log.record(right.update(1, (0,), skipped=(2,)))
    version = newest(replayed(tmp_path))
    assert (version.ranks, version.partial_ranks, version.skipped_ranks) == ((0,), (1,), (2,))


def test_the_gradient_is_what_the_optimizer_got(tmp_path: Path) -> None:
    """A mean of two, and one that was clipped to a quarter."""
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    records = [
        owner.assigned(3.0), owner.update(1, (0, 1), 2.0),
        owner.kept(2, (0, 1), 5.0), owner.scaled(2, (0, 1), 0.25),
    ]  # fmt: skip
    for record in records:
        log.record(record)
    again = replayed(tmp_path)
    again.watch(again.history.versions)
    found = []
    for version in again.history.versions:
        again.go_to(version.position)
        found.append(again.gradient_norm(version))
    _, mean, kept, _ = (norm(record.changes[0]) for record in records)
    assert found == [None, pytest.approx(mean / 2), pytest.approx(kept / 4)]
    flat = np.concatenate([np.frombuffer(v, "<f4") for v in owner.values().values()])
    assert again.parameter_norm() == pytest.approx(float(np.linalg.norm(flat.astype("f8"))))
    assert newest(again).ranks == (0, 1), "those who were summed, not who said the scale"


@pytest.mark.parametrize(
    ("ranks", "fields", "is_reduced", "factor"),
    [
        ((0, 1), {}, False, 0.5),
        ((0, 1), {"update_scale": 0.25}, False, 0.125),
        ((0, 1), {}, True, 1.0),
        ((), {}, False, 1.0),
    ],
    ids=["the mean of two", "and scaled", "reduced before", "of nobody"],
)
def test_a_gradient_is_averaged_once_and_scaled(
    tmp_path: Path, ranks: tuple[int, ...], fields: Any, is_reduced: bool, factor: float
) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    record = owner._record(1, ranks)._replace(**fields)
    total = owner._total(2.0)._replace(is_reduced=is_reduced)
    if not ranks:
        total = total._replace(blocks=())
    log.record(owner._decide(Put(record, total), record))
    again = replayed(tmp_path)
    again.watch(again.history.versions)
    again.go_to(1)
    expected = norm(Put(record, total)) * factor
    assert again.gradient_norm(newest(again)) == pytest.approx(expected)


def norm(change: object) -> float:
    accumulator = getattr(change, "accumulator", None)
    blocks = accumulator.blocks if accumulator is not None else ()
    return math.sqrt(sum(float(np.square(np.frombuffer(b.payload, "<f4")).sum()) for b in blocks))


# --- under ASP


def asp_log(path: Path) -> tuple[Owner, Owner, list[dict[int, bytes]]]:
    """Rank 1 overtakes rank 0 between two ranges; values after each record."""
    left, right = Owner(LEFT, ASP), Owner(RIGHT, ASP)
    log = WrittenLog(path, ASP)
    for owner in (left, right):
        log.begin(owner)
    after = []
    for owner, clock, rank, staleness in (
        (left, 1, 0, 0), (left, 1, 1, 1), (right, 1, 1, 0), (right, 1, 0, 1), (left, 2, 1, 0),
    ):  # fmt: skip
        log.record(owner.update(clock, (rank,), clock + rank, staleness=staleness))
        after.append({**left.values(), **right.values()})
    return left, right, after


def test_versions_are_steps_in_the_order_in_which_they_were_done(tmp_path: Path) -> None:
    _, _, after = asp_log(tmp_path)
    again = replayed(tmp_path)
    assert not again.history.is_by_clock
    found = [(v.number, v.clock, v.ranks, v.staleness) for v in again.history.versions]
    assert found == [(0, 0, (), 0), (1, 1, (1,), 1), (2, 1, (0,), 1)]
    assert [clock for clock, _ in again.history.unfinished] == [2]
    for version, blocks in zip(again.history.versions[1:], (after[2], after[3]), strict=True):
        again.go_to(version.position)
        assert values(again, blocks, ASP) == blocks


def test_what_is_arranged_otherwise_keeps_the_order_of_each_range(tmp_path: Path) -> None:
    """VER-1: by clock, and by the order of steps."""
    asp_log(tmp_path)
    run = read_run(tmp_path)
    for arranged in (arranged_by_clock(run.changes), replayed(tmp_path).history.changes):
        for place in {change.place for change in run.changes}:
            made = [change for _, change in arranged if change.place == place]
            decided = [change for change in run.changes if change.place == place]
            assert made == decided
            assert len(made) >= 2


def test_a_clock_is_a_version_where_all_were_at_it(tmp_path: Path) -> None:
    """In each range both ranks end clock 1 before either begins clock 2; clock 2 is not so."""
    left, right = Owner(LEFT, ASP), Owner(RIGHT, ASP)
    log = WrittenLog(tmp_path, ASP)
    for owner in (left, right):
        log.begin(owner)
        for clock, rank in ((1, 0), (1, 1)):
            log.record(owner.update(clock, (rank,), clock + rank))
    expected = {**left.values(), **right.values()}
    for owner in (left, right):
        for clock, rank in ((2, 0), (3, 0), (2, 1), (3, 1)):
            log.record(owner.update(clock, (rank,), clock + rank))
    again = replayed(tmp_path, by_clock=True)
    assert not again.torn_at(1)
    assert "range 0 got clock 3" in again.torn_at(2)
    assert "at clock 3 at the end of its log" in again.torn_at(4)
    again.go_to(1)
    assert values(again, expected, ASP) == expected


def test_a_setting_that_ends_counts_for_its_last_clock(tmp_path: Path) -> None:
    """ASP up to clock 1, then BSP: with the last step of clock 1 a range forgets that it was; whose
    that is, is another in each.
    """
    log = WrittenLog(tmp_path, ASP)
    bsp = Consistency(Mode.BSP)
    for range_id, first, second in ((LEFT, 0, 1), (RIGHT, 1, 0)):
        owner = Owner(range_id, ASP)
        log.begin(owner)
        log.record(owner.update(1, (first,)))
        for ranks, clock in (((second,), 1), ((0, 1), 2)):
            record = owner.update(clock, ranks)
            facts = record.delta.facts._replace(settings=((1, bsp),), clock=clock)
            log.record(record._replace(delta=record.delta._replace(facts=facts)))
    again = replayed(tmp_path)
    found = [(v.number, v.clock, v.ranks) for v in again.history.versions]
    assert found == [(0, 0, ()), (1, 1, (1,)), (2, 1, (0,)), (3, 2, (0, 1))]


def test_what_was_made_is_not_made_again(tmp_path: Path) -> None:
    """RP-1: neither one by one, nor towards the versions of a checkpoint."""
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    for clock in (1, 2):
        log.record(owner.update(clock, (0,), clock))
    again = replayed(tmp_path)
    check_all(again, owner)
    for version in again.history.versions:
        again.go_to(version.position)
    check_all(again, owner)
    wanted = dict.fromkeys(((MODEL.table_id, block) for block in owner.values()), 2)
    with pytest.raises(InvariantViolation, match="RP-1"):
        again.go_to_versions(wanted)
    other = replayed(tmp_path)
    assert other.go_to_versions(wanted) == []
    check_all(other, owner)
    with pytest.raises(InvariantViolation, match="RP-1"):
        other.go_to_versions(wanted)


# --- what is left of a log


def rotated(path: Path) -> Owner:
    """Two segments; the second begins with a snapshot."""
    owner = Owner(LEFT)
    log = WrittenLog(path)
    log.begin(owner)
    for clock in (1, 2):
        log.record(owner.update(clock, (0,), clock))
    log.segment()
    log.snapshot(owner)
    log.record(owner.update(3, (0,), 3.0))
    return owner


def test_bases_are_compared_with_what_was_made(tmp_path: Path) -> None:
    owner = rotated(tmp_path)
    again = replayed(tmp_path)
    check_all(again, owner)
    assert numbers(again) == [0, 1, 2, 3]
    assert again.checked_count == 1


def test_a_base_of_other_values_is_an_error(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    other = owner.twin()
    other.update(2)
    other.number = owner.number
    log.segment()
    log.snapshot(other)
    again = replayed(tmp_path)
    with pytest.raises(InvalidUpdateLog, match=r"00000002.log: at byte .* other than what its"):
        again.go_to(newest(again).position + 1)


def test_a_base_with_another_sum_that_waits_is_an_error(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    other = owner.twin()
    log.record(owner.kept(2, (0, 1), 5.0))
    other.kept(2, (0, 1), 6.0)
    log.segment()
    log.snapshot(other)
    again = replayed(tmp_path)
    with pytest.raises(InvalidUpdateLog, match="other than what its"):
        again.go_to(again.history.changes[-1][0])


def test_what_is_left_begins_with_a_base(tmp_path: Path) -> None:
    owner = rotated(tmp_path)
    (tmp_path / "00000001.log").unlink()
    again = replayed(tmp_path)
    assert numbers(again) == [2, 3]
    check_all(again, owner)
    assert "goes on" in again.torn_at(1)
    assert not again.torn_at(2)


def test_a_log_goes_on_with_a_server_that_was_started_again(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    log.segment()
    owner.term = 4
    log.taken_over(owner)
    log.record(owner.update(2))
    again = replayed(tmp_path)
    check_all(again, owner)
    assert numbers(again) == [0, 1, 2]


def test_a_range_goes_on_in_the_log_of_its_next_primary(tmp_path: Path) -> None:
    """What only the first had decided was seen by nobody."""
    owner = Owner(LEFT)
    one, other = WrittenLog(tmp_path / "server-0"), WrittenLog(tmp_path / "server-1")
    one.begin(owner)
    one.record(owner.update(1, (0,), 1.0))
    next_owner = owner.twin()
    next_owner.term = 5
    one.record(owner.update(2, (0,), 9.0), 3000.0)  # its clock is ahead, too
    other.snapshot(next_owner)
    other.record(next_owner.update(2, (1,), 2.0))
    run = read_run(tmp_path)
    assert run.unseen_count == 1
    assert "1 records were decided by servers that were replaced" in run.notes[0]
    again = replayed(tmp_path)
    check_all(again, next_owner)
    assert newest(again).ranks == (1,)
    assert again.checked_count == 1


def test_what_lies_between_two_logs_is_no_version(tmp_path: Path) -> None:
    """Not even where another range has it."""
    owner, right = Owner(LEFT), Owner(RIGHT)
    one, other = WrittenLog(tmp_path / "server-0"), WrittenLog(tmp_path / "server-1")
    one.begin(owner)
    one.record(owner.update(1))
    for clock in (2, 3, 4):
        owner.update(clock)
    owner.term = 5
    other.begin(right)
    for clock in (1, 2, 3, 4, 5):
        other.record(right.update(clock))
    other.snapshot(owner)
    other.record(owner.update(5))
    run = read_run(tmp_path)
    assert run.lost_count == 3
    again = replayed(tmp_path)
    assert numbers(again) == [0, 1, 4, 5]
    assert again.history.lost_count == 2
    assert "goes on" in again.torn_at(3)
    check_all(again, owner, right)


def test_a_record_that_is_missing_is_an_error(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    owner.update(2)
    log.record(owner.update(3))
    with pytest.raises(InvalidUpdateLog, match=r"at byte .*range 0: log record 3 follows .* 1"):
        read_run(tmp_path)


def test_a_torn_end_is_the_end(tmp_path: Path) -> None:
    owner = rotated(tmp_path)
    before = owner.twin()
    log = tmp_path / "00000002.log"
    whole = log.read_bytes()
    size = len(whole)
    for cut in (1, 40, 700):
        log.write_bytes(whole[: size - cut])
        again = replayed(tmp_path)
        assert numbers(again) == [0, 1, 2]
        again.go_to(newest(again).position)
    log.write_bytes(whole)
    check_all(replayed(tmp_path), before)


def test_a_damaged_frame_is_an_error_that_says_where(tmp_path: Path) -> None:
    rotated(tmp_path)
    log = tmp_path / "00000001.log"
    content = bytearray(log.read_bytes())
    content[-100] ^= 1
    log.write_bytes(content)
    with pytest.raises(InvalidUpdateLog, match=r"00000001.log: at byte [0-9]+: a frame is damaged"):
        read_run(tmp_path)


def test_a_record_that_was_torn_between_its_frames_is_dropped_by_the_next_segment(
    tmp_path: Path,
) -> None:
    """By who goes on from the log, and by who reads it afterwards: the next has its number."""
    owner, log = Owner(LEFT), WrittenLog(tmp_path, boot=boot_id())
    log.begin(owner)
    log.record(owner.update(1))
    log.torn_record(owner.twin().update(2, (1,), 9.0))
    log.segment()
    owner.term = 4
    log.taken_over(owner)
    log.record(owner.update(2, (0,), 2.0))
    shards = Shards(SharedLanes(), {})
    with LogDirectory(tmp_path) as directory:
        assert read_log(directory, shards, "").replicas[LEFT].number == 2
    store = shards.stores[MODEL.table_id, LEFT]
    assert {b: bytes(store.read(b, None, None)[0]) for b in owner.values()} == owner.values()
    again = replayed(tmp_path)
    check_all(again, owner)
    assert numbers(again) == [0, 1, 2]


def test_a_half_base_at_the_end_is_none(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    log.segment()
    log.snapshot(owner)
    content = log.newest.read_bytes()
    log.newest.write_bytes(content[:-200])
    again = replayed(tmp_path)
    check_all(again, owner)
    assert again.checked_count == 0


# --- one term after the other


def test_records_that_nobody_saw_are_counted_and_their_steps_are_in_no_range(
    tmp_path: Path,
) -> None:
    """Rank 0's first step: the range goes on without it, though another range has it."""
    left, right = Owner(LEFT, ASP), Owner(RIGHT, ASP)
    one = WrittenLog(tmp_path / "server-0", ASP)
    other = WrittenLog(tmp_path / "server-1", ASP)
    one.begin(left)
    one.record(left.update(1, (1,), 1.0))
    after = left.twin()
    after.term = 5
    for clock in (1, 2):
        one.record(left.update(clock, (0,), 9.0))
    other.begin(right)
    for rank in (0, 1):
        other.record(right.update(1, (rank,), 1.0))
    other.snapshot(after)
    assert read_run(tmp_path).unseen_count == 2
    again = replayed(tmp_path)
    assert [v.ranks for v in again.history.versions] == [(), (1,)]
    assert again.history.unfinished == [(1, Incarnation(10))]
    check_all(again, after)


def test_a_range_that_was_taken_over_before_the_log_is_none_of_it(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    owner.update(1)
    log = WrittenLog(tmp_path)
    log.taken_over(owner)
    log.record(owner.update(2))
    run = read_run(tmp_path)
    assert run.changes == []
    assert "no log has all of ranges 0, 1" in run.notes_on([MODEL])[0]


def test_a_term_that_goes_on_from_another_record_is_an_error(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    owner.term, owner.number = 4, 3
    log.taken_over(owner)
    with pytest.raises(InvalidUpdateLog, match="goes on from log record 3, after 1"):
        read_run(tmp_path)


def test_a_range_that_was_placed_anew_is_replayed_from_there(tmp_path: Path) -> None:
    """Its run was removed, and a table of the next one has blocks there."""
    following = replace(MODEL, table_id=TableId(2), spec=replace(MODEL.spec, name="next"))
    before, after = Owner(LEFT), Owner(LEFT, following, term=6)
    one, other = WrittenLog(tmp_path / "server-0"), WrittenLog(tmp_path / "server-1", following)
    one.begin(before)
    for clock in (1, 2):
        one.record(before.update(clock))
    other.begin(after)
    other.record(after.update(1))
    run = read_run(tmp_path)
    assert set(run.reached) == {(TableId(2), LEFT)}
    assert "range 0 was placed anew under epoch 6: the 2 records before" in run.notes[0]
    again = Replay(run, [following])
    assert numbers(again) == [0, 1]
    check_all(again, after)


def test_records_of_a_term_whose_begin_is_in_no_log_are_left_out(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    before = owner.twin()
    owner.term = 3
    for clock in (2, 3):
        log.record(owner.update(clock, (0,), 9.0))
    again = replayed(tmp_path)
    assert numbers(again) == [0, 1]
    check_all(again, before)


def test_a_record_that_comes_twice_is_an_error(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    record = owner.update(1)
    log.record(record)
    log.record(record)
    with pytest.raises(InvalidUpdateLog, match="log record 1 follows log record 1"):
        read_run(tmp_path)


def test_a_snapshot_of_what_the_same_term_has_passed_is_an_error(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    before = owner.twin()
    log.record(owner.update(2))
    log.snapshot(before)
    with pytest.raises(InvalidUpdateLog, match="as of log record 1 follows log record 2"):
        read_run(tmp_path)


@pytest.mark.parametrize("has_initial", [False, True])
def test_a_gap_before_the_first_update_loses_none_that_anybody_saw(
    tmp_path: Path, has_initial: bool
) -> None:
    """The values begin with the snapshot."""
    first, owner = Owner(LEFT), Owner(LEFT, term=5, number=1)
    one, other = WrittenLog(tmp_path / "server-0"), WrittenLog(tmp_path / "server-1")
    one.begin(first)
    if has_initial:
        one.record(first.assigned(3.0))
    for clock in (1, 2):
        owner.update(clock)
    other.snapshot(owner)
    run = read_run(tmp_path)
    assert run.lost_count == 0
    assert [change.origin for change in run.changes] == [Origin.BEGIN]
    again = replayed(tmp_path)
    assert numbers(again) == [2]
    assert again.torn_at(2) == ""
    check_all(again, owner)


def test_a_snapshot_is_of_the_newest_clock_in_its_values(tmp_path: Path) -> None:
    owner = Owner(LEFT, ASP)
    for clock in (1, 2):
        owner.update(clock, (0,))
    assert (owner.copy.facts.clock, owner.copy.facts.changed_clock) == (0, 2)
    log = WrittenLog(tmp_path, ASP)
    log.snapshot(owner)
    (change,) = read_run(tmp_path).changes
    assert change.clock == 2


def test_a_snapshot_is_of_a_clock_that_changed_nothing(tmp_path: Path) -> None:
    """Every worker had skipped it."""
    owner = Owner(LEFT)
    owner.update(1)
    owner.copy.facts = owner.copy.facts._replace(clock=2, formed_clock=2)
    log = WrittenLog(tmp_path)
    log.snapshot(owner)
    (change,) = read_run(tmp_path).changes
    assert change.clock == 2


def test_the_times_of_one_log_never_go_back(tmp_path: Path) -> None:
    """The machine's clock was put back."""
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1), 2000.0)
    log.record(owner.update(2), 1500.0)
    assert [v.time_s for v in replayed(tmp_path).history.versions[1:]] == [2000.0, 2000.0]


def test_a_record_without_a_change_makes_none(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    empty = owner.update(2)
    log.record(empty._replace(changes=(), delta=empty.delta._replace(counted=())))
    assert len(read_run(tmp_path).changes) == 1


def test_the_staleness_of_a_step_is_that_of_its_own_entries(tmp_path: Path) -> None:
    """A record may end entries of others, too."""
    owner = Owner(LEFT, ASP)
    log = WrittenLog(tmp_path, ASP)
    log.begin(owner)
    record = owner.update(1, (0,), staleness=2)
    other = (Incarnation(11), 10, Ending(Outcome.APPLIED, staleness=9))
    log.record(record._replace(delta=record.delta._replace(endings=(*record.delta.endings, other))))
    (change,) = read_run(tmp_path).changes
    assert [decision.staleness for decision in change.decisions] == [2]


def test_terms_are_in_their_order_whatever_their_servers_are_called(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    later, first = WrittenLog(tmp_path / "server-0"), WrittenLog(tmp_path / "server-1")
    first.begin(owner)
    first.record(owner.update(1))
    owner.term = 5
    later.snapshot(owner)
    later.record(owner.update(2))
    again = replayed(tmp_path)
    assert numbers(again) == [0, 1, 2]
    check_all(again, owner)


def test_a_setting_before_the_snapshot_counts_for_its_last_clock(tmp_path: Path) -> None:
    """The record of that clock has the next one alone."""
    owner = Owner(LEFT, ASP)
    owner.copy.facts = owner.copy.facts._replace(settings=((0, Consistency(Mode.ASP)),))
    log = WrittenLog(tmp_path, ASP)
    log.snapshot(owner)
    record = owner.update(1, (0,))
    facts = record.delta.facts._replace(settings=((1, Consistency(Mode.BSP)),))
    log.record(record._replace(delta=record.delta._replace(facts=facts)))
    _, change = read_run(tmp_path).changes
    assert [decision.is_bsp for decision in change.decisions] == [False]


def test_a_restored_table_begins_at_its_clock(tmp_path: Path) -> None:
    restored = replace(MODEL, restored_clock=5)
    owner = Owner(LEFT, restored)
    log = WrittenLog(tmp_path, restored)
    log.begin(owner)
    log.record(owner.update(6))
    assert numbers(replayed(tmp_path)) == [5, 6]


def test_a_range_without_a_block_of_a_table_is_no_shard_of_it(tmp_path: Path) -> None:
    small = replace(table([64]), table_id=TableId(2))
    (only,) = small.blocks_by_range(2)
    log = WrittenLog(tmp_path)
    log.table(replace(small, spec=replace(small.spec, name="small")))
    for range_id in (LEFT, RIGHT):
        log.begin(Owner(range_id))
    run = read_run(tmp_path)
    assert set(run.reached) == {(MODEL.table_id, LEFT), (MODEL.table_id, RIGHT), (2, only)}


# --- how far


def test_a_range_is_at_the_clock_at_which_its_log_ends(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    for clock in (1, 2):
        log.record(owner.update(clock))
    again = replayed(tmp_path)
    assert again.torn_at(2) == ""
    assert again.torn_at(3) == "range 0 is at clock 2 at the end of its log"


def test_changes_can_be_made_a_few_at_a_time(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    for clock in (1, 2, 3):
        log.record(owner.update(clock))
    again = replayed(tmp_path)
    assert not again.go_to(2, most=1)
    assert not again.go_to(2, most=1)
    assert again.made_count == 2
    assert again.go_to(2, most=1), "no more is to be made up to there"
    assert again.go_to(3, most=1), "that was the last"
    assert again.made_count == again.change_count == 3


def test_blocks_go_to_the_versions_that_they_had_and_no_further(tmp_path: Path) -> None:
    """As a checkpoint of an asynchronous run has them: other updates in each range."""
    left, right = Owner(LEFT), Owner(RIGHT)
    log = WrittenLog(tmp_path)
    for owner in (left, right):
        log.begin(owner)
    log.record(left.update(1))
    expected = left.values()
    log.record(left.update(2))
    for clock in (1, 2):
        log.record(right.update(clock))
    expected |= right.values()
    again = replayed(tmp_path)
    wanted = {(MODEL.table_id, block): 1 for block in left.values()}
    wanted |= {(MODEL.table_id, block): 2 for block in right.values()}
    assert again.go_to_versions(wanted) == []
    assert values(again, expected) == expected


# --- which logs


def test_a_run_is_as_new_as_the_newest_of_its_logs(tmp_path: Path) -> None:
    """One of its servers has a clock that is behind."""
    one = WrittenLog(tmp_path / "server-0", timeline=b"n" * 16)
    one.now_s = 5000.0
    one.segment()
    other = WrittenLog(tmp_path / "server-1", timeline=b"o" * 16)
    other.now_s = 2000.0
    other.segment()
    other._timeline, other.now_s = b"n" * 16, 900.0
    other.segment()
    logs = read_run(tmp_path).logs
    timelines = {s.header.timeline for log in logs for s in log.contents.segments.values()}
    assert timelines == {b"n" * 16}


@pytest.mark.parametrize("newest_s", [5000.0, 5.0])
def test_the_newest_of_several_runs_is_read(tmp_path: Path, newest_s: float) -> None:
    """Also where the machine's clock was put back meanwhile."""
    old = Owner(LEFT)
    log = WrittenLog(tmp_path / "server-0", timeline=b"o" * 16)
    log.begin(old)
    log.record(old.update(1, (0,), 7.0))
    gone = WrittenLog(tmp_path / "server-1", timeline=b"o" * 16)
    gone.begin(Owner(RIGHT))
    owner = Owner(LEFT)
    log._timeline, log.now_s = b"n" * 16, newest_s
    log.segment()
    log.begin(owner)
    log.record(owner.update(1, (0,), 2.0))
    run = read_run(tmp_path)
    assert len(run.logs) == 1
    assert "1 earlier runs" in run.notes[0]
    check_all(replayed(tmp_path), owner)


def test_one_servers_own_log_has_its_ranges_only(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path / "server-0")
    log.begin(owner)
    log.record(owner.update(1))
    run = read_run(tmp_path / "server-0")
    assert "no log has all of ranges 1" in run.notes_on([MODEL])[0]
    again = replayed(tmp_path)
    check_all(again, owner)
    with pytest.raises(InvalidUpdateLog, match="not all of range 1, which block 1 of"):
        again.tensors()


def test_where_there_is_no_log_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidUpdateLog, match="has no update log"):
            read_run(path)
    (tmp_path / "00000001.log").write_bytes(b"")
    with pytest.raises(InvalidUpdateLog, match="its segments are still empty"):
        read_run(tmp_path)


def test_tensors_are_the_tables(tmp_path: Path) -> None:
    left, right = Owner(LEFT), Owner(RangeId(1))
    log = WrittenLog(tmp_path)
    for owner, clock in itertools.product((left, right), (0, 1)):
        if clock == 0:
            log.begin(owner)
        else:
            log.record(owner.update(1))
    again = replayed(tmp_path)
    again.go_to(1)
    found = again.tensors()["t0"].numpy().reshape(-1, 64)
    assert {b: found[b].tobytes() for b in range(6)} == {**left.values(), **right.values()}
