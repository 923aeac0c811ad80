"""The places of training loops, and the one at which a late joiner begins (SEMANTICS S6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ps_core.keys import TableId
from ps_worker.spec.loop_places import (
    LoopPlace,
    LoopReport,
    PlaceSearch,
    TrainingLoop,
    first_place,
)
from ps_worker.transport.loop_reports import loop_from_proto, loop_to_proto

CRITIC, ACTOR, OTHER = map(TableId, (1, 2, 3))
FIRSTS = dict.fromkeys((CRITIC, ACTOR, OTHER), 0)


def both(critic: int, actor: int) -> dict[TableId, int]:
    return {CRITIC: critic, ACTOR: actor}


def looped(*models: TableId, is_only: bool = False) -> TrainingLoop:
    """A script that has stepped these models, one after the other, and begins with the first."""
    loop, clocks = TrainingLoop(), both(0, 0)
    for model in (*models, models[0]):
        loop.begin_step(model, dict(clocks), is_only=is_only)
        clocks[model] += 1
    return loop


def told(
    place: LoopPlace, sealed: Mapping[TableId, int] | None = None, *, is_alive: bool = True
) -> LoopReport:
    return LoopReport(is_alive, sealed or {}, place)


def searched(joined: Mapping[TableId, int]) -> PlaceSearch:
    return PlaceSearch(joined, FIRSTS)


# --- a worker's loop


def test_a_loop_of_one_model_begins_before_each_step() -> None:
    loop = looped(CRITIC, CRITIC, is_only=True)
    assert loop.place == LoopPlace(both(2, 0), both(1, 0), in_turn=False)


def test_a_loop_of_several_begins_before_the_first_when_another_was_stepped_since() -> None:
    loop = looped(*(CRITIC, CRITIC, ACTOR) * 2)
    assert loop.place == LoopPlace(both(4, 2), both(2, 1), in_turn=True)
    loop.begin_step(CRITIC, both(5, 2), is_only=False)
    loop.begin_step(ACTOR, both(6, 2), is_only=False)
    assert loop.place == LoopPlace(both(4, 2), both(2, 1), in_turn=True)


def test_how_far_it_goes_shows_when_it_has_been_around_once() -> None:
    assert looped(CRITIC, ACTOR).place == LoopPlace(both(1, 1), {}, in_turn=True)


@pytest.mark.parametrize(("count", "is_alone"), [(1, False), (7, False), (8, True), (30, True)])
def test_one_of_two_models_is_alone_when_it_was_stepped_often(count: int, is_alone: bool) -> None:
    """The script may be about to step the other for the first time."""
    place = looped(*(CRITIC,) * count).place
    assert place is not None
    assert (place.in_turn, bool(place.clocks)) == (not is_alone, is_alone)


def test_a_model_that_comes_late_ends_the_loop_of_one() -> None:
    loop = looped(*(CRITIC,) * 20)
    loop.begin_step(ACTOR, both(21, 0), is_only=False)
    assert loop.place == LoopPlace({}, {}, in_turn=True)


def test_save_points_are_the_places_of_a_script_that_has_them() -> None:
    loop = TrainingLoop()
    for time in range(3):
        loop.save_point(both(2 * time, time), is_only=False)
        loop.begin_step(ACTOR, both(2 * time, time), is_only=False)
        loop.begin_step(CRITIC, both(2 * time, time + 1), is_only=False)
        loop.begin_step(CRITIC, both(2 * time + 1, time + 1), is_only=False)
    assert loop.place == LoopPlace(both(4, 2), both(2, 1), in_turn=True)


def test_what_was_taken_for_a_place_is_none_once_a_script_has_save_points() -> None:
    loop = looped(CRITIC, ACTOR, CRITIC, ACTOR)
    loop.save_point(both(3, 3), is_only=False)
    assert loop.place == LoopPlace(both(3, 3), {}, in_turn=True)


def test_a_loop_of_one_model_begins_before_each_step_also_where_there_are_save_points() -> None:
    """A script may have one an epoch: who joins does not wait for that."""
    loop = looped(CRITIC, CRITIC, is_only=True)
    loop.save_point(both(3, 0))
    assert loop.place == LoopPlace(both(2, 0), both(1, 0), in_turn=False)


def test_save_points_of_a_script_that_steps_one_of_its_models_are_no_places_for_long() -> None:
    loop = TrainingLoop()
    for clock in range(30):
        if clock % 20 == 0:
            loop.save_point(both(clock, 0), is_only=False)
        loop.begin_step(CRITIC, both(clock, 0), is_only=False)
    assert loop.place == LoopPlace(both(29, 0), both(1, 0), in_turn=False)


def test_save_points_that_are_far_apart_are_no_places() -> None:
    loop, clock = TrainingLoop(), 0
    for _ in range(2):
        loop.save_point(both(clock, clock), is_only=False)
        for _ in range(20):
            loop.begin_step(CRITIC, both(clock, clock), is_only=False)
            loop.begin_step(ACTOR, both(clock + 1, clock), is_only=False)
            clock += 1
    assert loop.place == LoopPlace(both(39, 39), both(1, 1), in_turn=True)


def test_who_has_joined_tells_of_the_loop_before_it_has_been_around() -> None:
    place = LoopPlace(both(4, 2), both(2, 1), in_turn=True)
    loop = TrainingLoop()
    loop.begin_at(both(8, 4), place)
    for clocks, model in ((both(8, 4), CRITIC), (both(9, 4), CRITIC), (both(10, 4), ACTOR)):
        loop.begin_step(model, clocks, is_only=False)
        assert loop.place == LoopPlace(both(8, 4), both(2, 1), in_turn=True)
    loop.begin_step(CRITIC, both(10, 5), is_only=False)
    assert loop.place == LoopPlace(both(10, 5), both(2, 1), in_turn=True)


def test_who_has_joined_a_loop_of_one_model_need_not_show_it_again() -> None:
    loop = TrainingLoop()
    loop.begin_at(both(8, 0), LoopPlace(both(4, 0), both(1, 0), in_turn=False))
    loop.begin_step(CRITIC, both(8, 0), is_only=False)
    assert loop.place == LoopPlace(both(8, 0), both(1, 0), in_turn=False)


# --- the first place that is not before some clocks


@pytest.mark.parametrize(
    ("clocks", "found"),
    [
        (both(10, 5), both(10, 5)),
        (both(11, 5), both(12, 6)),
        (both(10, 6), both(12, 6)),
        (both(3, 1), both(4, 2)),  # long ago
        (both(10, 50), both(100, 50)),
    ],
)
def test_the_first_place(clocks: dict[TableId, int], found: dict[TableId, int]) -> None:
    assert first_place(LoopPlace(both(10, 5), both(2, 1), in_turn=True), clocks) == found


def test_tables_that_were_unfrozen_later_stay_so_far_apart() -> None:
    place = LoopPlace({CRITIC: 100, OTHER: 5}, {CRITIC: 1, OTHER: 1}, in_turn=False)
    assert first_place(place, {CRITIC: 101, OTHER: 5}) == {CRITIC: 101, OTHER: 6}


def test_tables_of_one_model_are_stepped_together_before_that_was_seen() -> None:
    place = LoopPlace({CRITIC: 0, OTHER: 0}, {}, in_turn=False)
    assert first_place(place, {CRITIC: 1, OTHER: 0}) == {CRITIC: 1, OTHER: 1}


def test_tables_that_the_loop_does_not_step_stay() -> None:
    place = LoopPlace(both(10, 4), both(1, 0), in_turn=True)
    assert first_place(place, both(11, 3) | {OTHER: 7}) == both(11, 4) | {OTHER: 7}


# --- the search


def test_before_anybodys_step_it_begins_at_once() -> None:
    search = searched(both(0, 0))
    assert search.hear(()) is True
    assert search.place is None


def test_it_asks_again_while_nobody_tells() -> None:
    search = searched(both(1, 0))
    assert search.hear(()) is False
    assert (search.place, search.clocks) == (None, both(1, 0))


def test_the_loop_of_one_model_is_as_it_was() -> None:
    search = searched({CRITIC: 70, OTHER: 3})
    place = LoopPlace({CRITIC: 60, OTHER: 60}, {CRITIC: 1, OTHER: 1}, in_turn=False)
    assert search.hear([told(place)]) is True
    assert search.clocks == {CRITIC: 70, OTHER: 70}


def test_a_loop_of_several_is_waited_for_at_its_place() -> None:
    search = searched(both(6, 5))
    place = LoopPlace(both(5, 5), both(1, 1), in_turn=True)
    assert search.hear([told(place, both(6, 5))]) is False
    assert search.clocks == both(6, 6)
    assert search.hear([told(place._replace(clocks=both(6, 6)), both(7, 6))]) is True
    assert search.clocks == both(6, 6)


def test_a_loop_that_was_not_around_is_followed_step_by_step() -> None:
    search, nowhere = searched(both(2, 0)), LoopPlace({}, {}, in_turn=True)
    steps: Sequence[dict[TableId, int]] = [both(2, 0), both(3, 0), both(3, 1)]
    for sealed in steps:
        assert search.hear([told(nowhere, sealed)]) is False
        assert search.clocks == sealed
    assert search.hear([told(LoopPlace(both(3, 1), {}, in_turn=True), both(4, 1))]) is True
    assert search.clocks == both(3, 1)


def test_a_loop_that_goes_on_otherwise_is_followed_to_its_next_place() -> None:
    search = searched(both(6, 5))
    place = LoopPlace(both(5, 5), both(1, 1), in_turn=True)
    assert search.hear([told(place, both(6, 5))]) is False
    for sealed in (both(8, 5), both(8, 5)):  # it steps the critic three times now
        assert search.hear([told(place, sealed)]) is False
        assert search.clocks == both(8, 6)
    assert search.hear([told(LoopPlace(both(8, 6), both(3, 1), in_turn=True))]) is True
    assert search.clocks == both(8, 6)


def test_a_place_that_it_has_gone_beyond_is_none() -> None:
    search = searched(both(6, 5))
    place = LoopPlace(both(5, 5), both(1, 2), in_turn=True)
    assert search.hear([told(place)]) is False
    assert search.clocks == both(6, 7)
    assert search.hear([told(LoopPlace(both(6, 6), {}, in_turn=True))]) is False
    assert search.hear([told(LoopPlace(both(7, 7), {}, in_turn=True))]) is True
    assert search.clocks == both(7, 7)


def test_the_nearest_place_counts_where_workers_are_at_several() -> None:
    """SSP: some are further."""
    search = searched(both(6, 6))
    ahead = LoopPlace(both(9, 9), both(1, 1), in_turn=True)
    assert search.hear([told(ahead), told(ahead._replace(clocks=both(4, 4)))]) is True
    assert search.clocks == both(6, 6)


def test_a_worker_that_steps_a_second_model_knows_more() -> None:
    alone = LoopPlace(both(9, 0), both(1, 0), in_turn=False)
    search = searched(both(9, 0))
    assert search.hear([told(alone), told(LoopPlace({}, {}, in_turn=True), both(10, 1))]) is False
    assert search.clocks == both(10, 1)


def test_where_all_are_gone_the_loop_goes_on_as_it_did() -> None:
    search = searched(both(6, 5))
    place = LoopPlace(both(5, 5), both(1, 1), in_turn=True)
    assert search.hear([told(place, both(9, 9), is_alive=False)]) is True
    assert search.clocks == both(6, 6)


def test_a_table_that_no_loop_steps_holds_nobody_up() -> None:
    search = searched(both(6, 5) | {OTHER: 4})
    place = LoopPlace(both(6, 6) | {OTHER: 0}, both(1, 1) | {OTHER: 0}, in_turn=True)
    assert search.hear([told(place)]) is True
    assert search.clocks == both(6, 6) | {OTHER: 4}


# --- on the wire


@pytest.mark.parametrize(
    "place",
    [
        LoopPlace(both(4, 2), both(2, 1), in_turn=True),
        LoopPlace(both(4, 0), both(1, 0), in_turn=False),
        LoopPlace(both(1, 1), {}, in_turn=True),
        LoopPlace({}, {}, in_turn=True),
    ],
)
def test_a_report_travels(place: LoopPlace) -> None:
    loop = TrainingLoop()
    loop.clocks, loop.place = both(4, 2), place
    message = loop_to_proto(loop, {CRITIC: 5, OTHER: 9})
    assert message is not None
    assert loop_from_proto(message, is_alive=True) == LoopReport(True, both(5, 2), place)


def test_who_has_taken_no_step_tells_of_no_loop() -> None:
    assert loop_to_proto(TrainingLoop(), {CRITIC: 5}) is None
