"""A run's tables, made again from logs that were made by hand."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidUpdateLog, InvariantViolation
from ps_core.keys import RangeId
from ps_core.tables import Table
from ps_server.lane.lane_socket import SharedLanes
from ps_server.lane.shards import Shards
from ps_server.replay.replayer import Replay, Version, read_run
from ps_server.replay.versions import arranged_by_clock
from ps_server.update_log.directory import LogDirectory, boot_id
from ps_server.update_log.recovery import read_log
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


# --- which logs


def test_the_newest_of_several_runs_is_read(tmp_path: Path) -> None:
    old = Owner(LEFT)
    log = WrittenLog(tmp_path / "server-0", timeline=b"o" * 16)
    log.begin(old)
    log.record(old.update(1, (0,), 7.0))
    gone = WrittenLog(tmp_path / "server-1", timeline=b"o" * 16)
    gone.begin(Owner(RIGHT))
    owner = Owner(LEFT)
    log._timeline, log.now_s = b"n" * 16, 5000.0
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
    assert "no log has all of ranges 1" in run.notes[0]
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
