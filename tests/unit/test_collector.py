"""The garbage collector of a server looks at what is new, and now and then at all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from ps_runtime.system.collector import Collector, object_count
from tests.unit.tuple_threads import errors_beside

pytestmark = pytest.mark.slow

STRAY_COUNT = 1000


class Part:
    """Of a cycle."""

    def __init__(self) -> None:
        self.other: Part | None = None


def cycles(count: int) -> list[Part]:
    """One part of each."""
    found = []
    for _ in range(count):
        one, other = Part(), Part()
        one.other, other.other = other, one
        found.append(one)
    return found


def is_looked_at(thing: object) -> bool:
    return any(each is thing for each in gc.get_objects())


@pytest.fixture
def collector() -> Iterator[Collector]:
    before = gc.get_threshold()
    collector = Collector(STRAY_COUNT)
    collector.start()
    yield collector
    collector.stop()
    gc.unfreeze()
    assert gc.get_threshold() == before


@pytest.mark.usefixtures("collector")
def test_what_has_survived_a_full_collection_is_not_looked_at_again() -> None:
    part = Part()
    assert is_looked_at(part)
    gc.collect()
    assert not is_looked_at(part)
    there = weakref.ref(part)
    del part
    assert there() is None


def test_other_threads_complete_their_tuples_while_objects_are_counted() -> None:
    assert errors_beside(lambda: object_count(0)) == []


@pytest.mark.thorough
@pytest.mark.usefixtures("collector")
def test_cycles_that_were_never_frozen_go_at_once() -> None:
    gone = [weakref.ref(part) for part in cycles(10)]
    gc.collect()
    assert not any(part() for part in gone)


@pytest.mark.thorough
@pytest.mark.usefixtures("collector")
def test_all_is_looked_at_when_many_are_frozen() -> None:
    parts = cycles(STRAY_COUNT)
    gone = [weakref.ref(part) for part in parts]
    gc.collect()
    del parts
    assert any(part() for part in gone)
    gc.collect()
    assert not any(part() for part in gone)


@pytest.mark.thorough
def test_what_is_known_to_be_of_use_lets_nobody_look(collector: Collector) -> None:
    """A table of many blocks was made: nothing of it is in the way."""
    parts = cycles(STRAY_COUNT)
    collector.expect()
    gc.collect()
    gone = [weakref.ref(part) for part in parts]
    del parts
    gc.collect()
    assert all(part() for part in gone)


@pytest.mark.thorough
def test_few_that_are_frozen_stay(collector: Collector) -> None:
    parts = cycles(10)
    stays = [weakref.ref(part) for part in parts]
    gc.collect()
    del parts
    gc.collect()
    assert all(part() for part in stays)
    collector.stop()
    gc.unfreeze()
    gc.collect()
    assert not any(part() for part in stays)
