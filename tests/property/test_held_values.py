"""Pulls into memory that holds values, beside a reader that pulls everything each time."""

from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_server.ranges.events import AnswerPull
from ps_worker.steps.held_values import HeldValue, HeldValues

BLOCKS = range(2)
GARBAGE = -1


class Server:
    """A range of one table. Each value is another number."""

    def __init__(self) -> None:
        self.epoch = AssignmentEpoch(2)
        self.edit_count = 0
        self.versions = dict.fromkeys(BLOCKS, 0)
        self.values = dict(zip(BLOCKS, (100, 101), strict=True))
        self._newest = 1000

    def update(self, block: int) -> None:
        self.versions[block] += 1
        self._write(block)

    def edit(self, block: int) -> None:
        """As `Aggregation.count`: the version stays."""
        self.edit_count += 1
        self._write(block)

    def move(self) -> None:
        """Another server is primary: it has the versions, and counts edits anew."""
        self.epoch = AssignmentEpoch(self.epoch + 1)
        self.edit_count = 0

    def _write(self, block: int) -> None:
        self._newest += 1
        self.values[block] = self._newest

    def answer(self) -> AnswerPull:
        versions, count = dict(self.versions), self.edit_count
        return AnswerPull(1, TableId(1), RangeId(0), 0, 0, versions, {}, edit_count=count)


class Reader:
    """What `Puller` does of it."""

    def __init__(self) -> None:
        self.memory = dict.fromkeys(BLOCKS, GARBAGE)
        self.held = HeldValues()

    def pull(self, server: Server, blocks: list[int], torn: set[int]) -> int:
        """Returns how many blocks did not come."""
        edit_count, versions = self.held.claims(blocks, server.epoch)
        answer, unchanged_count = server.answer(), 0
        for block, claimed in zip(blocks, versions, strict=True):
            if claimed is not None and answer.is_unchanged(block, claimed, edit_count):
                found = cast(HeldValue, self.held.find(block, server.epoch))
                assert not self.held.take(block, found)
                unchanged_count += 1
                continue
            self.held.drop(block)
            self.memory[block] = GARBAGE if block in torn else server.values[block]
            if block not in torn:
                value = HeldValue(server.epoch, server.edit_count, server.versions[block], 0)
                assert self.held.take(block, value)
        return unchanged_count


BLOCK = st.sampled_from(BLOCKS)
SOME = st.sampled_from([set(BLOCKS), {0}, {1}])
EVENT: st.SearchStrategy[tuple[object, ...]] = st.one_of(
    st.tuples(st.sampled_from(["update", "edit", "edit"]), BLOCK),
    st.tuples(st.just("pull"), SOME, st.just(set())),
    st.tuples(st.just("pull"), SOME, SOME),
    st.tuples(st.sampled_from(["move", "move", "write"])),
)


@given(st.lists(EVENT, min_size=10, max_size=40))
def test_what_does_not_come_is_what_would_have_come(events: list[tuple[object, ...]]) -> None:
    server, reader = Server(), Reader()
    before = [(reader.held.copy(), dict(reader.memory))]
    for kind, *more in events:
        match kind:
            case "pull":
                blocks, torn = (cast(set[int], each) for each in more)
                before.append((reader.held.copy(), dict(reader.memory)))
                reader.pull(server, sorted(blocks), torn)
                for block in blocks - torn:
                    assert reader.memory[block] == server.values[block]
                for block in BLOCKS:  # HV-1
                    if reader.held.find(block, server.epoch) is not None:
                        assert reader.memory[block] != GARBAGE
                    for held, memory in before:
                        if reader.held.is_same(held, block):
                            assert reader.memory[block] == memory[block]
            case "write":  # the caller's own values
                reader.held.forget()
                reader.memory = dict.fromkeys(BLOCKS, GARBAGE)
            case "move":
                server.move()
            case _:
                getattr(server, str(kind))(more[0])


def test_only_what_was_written_since_comes() -> None:
    server, reader = Server(), Reader()
    blocks = list(BLOCKS)
    assert reader.pull(server, blocks, set()) == 0
    before = reader.held.copy()
    assert reader.pull(server, blocks, set()) == 2
    server.update(1)
    assert reader.pull(server, blocks, set()) == 1
    assert [reader.held.is_same(before, block) for block in blocks] == [True, False]
    server.edit(1)
    assert reader.pull(server, blocks, set()) == 0, "which blocks were edited is not told"
    assert reader.pull(server, blocks, set()) == 2
    server.move()
    assert reader.pull(server, blocks, set()) == 0


def test_a_torn_value_is_not_held_and_the_same_version_comes_again() -> None:
    server, reader = Server(), Reader()
    blocks = list(BLOCKS)
    reader.pull(server, blocks, set())
    server.update(0)
    reader.pull(server, blocks, {0})
    assert reader.pull(server, blocks, set()) == 1
    assert reader.memory == server.values


def test_a_value_from_before_an_edit_is_not_named_with_one_from_after_it() -> None:
    server, reader = Server(), Reader()
    reader.pull(server, [0, 1], set())
    server.edit(1)
    reader.pull(server, [0], set())
    assert reader.held.claims([0, 1], server.epoch) == (1, [0, None])


def test_sums_are_never_unchanged() -> None:
    """A sum of another clock has the same version where no worker had a gradient."""
    sums = AnswerPull(1, TableId(1), RangeId(0), 0, 0, {0: 4}, {}, edit_count=None)
    assert not sums.is_unchanged(0, 4, 0)
    assert sums._replace(edit_count=0).is_unchanged(0, 4, 0)
