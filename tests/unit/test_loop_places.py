"""The places of training loops, and the one at which a late joiner begins (SEMANTICS S6)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from ps_core.cluster_view import Role, Session
from ps_core.keys import Incarnation, NodeId, TableId
from ps_worker.spec.loop_places import (
    MOST_FOLLOWED_CLOCKS,
    Found,
    LoopPlace,
    LoopReport,
    LoopReports,
    PlaceSearch,
    TrainingLoop,
)
from ps_worker.transport.loop_reports import loop_from_proto, loop_to_proto, reports_in
from pushpull.v1 import scheduler_pb2, types_pb2

CRITIC, ACTOR, OTHER = map(TableId, (1, 2, 3))
NOWHERE = LoopPlace({}, in_turn=True)


def both(critic: int, actor: int) -> dict[TableId, int]:
    return {CRITIC: critic, ACTOR: actor}


class Script:
    """A script that has made two models, or one, and steps them."""

    def __init__(self, *, is_only: bool = False) -> None:
        self.loop, self.clocks = TrainingLoop(), both(0, 0)
        self._is_only = is_only

    def step(self, *models: TableId) -> LoopPlace | None:
        for model in models:
            self.loop.begin_step(model, dict(self.clocks), is_only=self._is_only)
            self.clocks[model] += 1
        return self.loop.place

    def save_point(self) -> None:
        self.loop.save_point(dict(self.clocks), is_only=self._is_only)


def in_turn(critic: int, actor: int) -> LoopPlace:
    return LoopPlace(both(critic, actor), in_turn=True)


def alone(critic: int, actor: int) -> LoopPlace:
    return LoopPlace(both(critic, actor), in_turn=False)


def told(
    place: LoopPlace, sealed: Mapping[TableId, int] | None = None, *, is_alive: bool = True
) -> LoopReport:
    return LoopReport(is_alive, place.clocks if sealed is None else sealed, place)


def hear(
    search: PlaceSearch,
    joined: Mapping[TableId, int],
    told: Collection[LoopReport],
    *,
    all_have_told: bool = True,
    **others: Any,
) -> Found:
    return search.hear(joined, LoopReports(told, all_have_told), **others)


# --- a worker's loop


def test_a_loop_of_one_model_begins_before_each_step() -> None:
    assert Script(is_only=True).step(*[CRITIC] * 3) == alone(2, 0)


def test_a_loop_of_several_begins_before_the_first_when_another_was_stepped_since() -> None:
    script = Script()
    assert script.step(CRITIC, CRITIC, ACTOR) == NOWHERE
    assert script.step(CRITIC) == in_turn(2, 1)
    assert script.step(CRITIC, ACTOR) == in_turn(2, 1)
    assert script.step(CRITIC) == in_turn(4, 2)


@pytest.mark.parametrize(("count", "is_alone"), [(1, False), (8, False), (9, True), (30, True)])
def test_one_of_two_models_is_alone_when_it_was_stepped_often(count: int, is_alone: bool) -> None:
    """The script may be about to step the other for the first time."""
    assert Script().step(*[CRITIC] * count) == (alone(count - 1, 0) if is_alone else NOWHERE)


def test_a_model_that_comes_late_ends_the_loop_of_one() -> None:
    script = Script()
    script.step(*[CRITIC] * 20)
    assert script.step(ACTOR) == NOWHERE
    assert script.step(CRITIC) == in_turn(20, 1)


@pytest.mark.parametrize("last", [CRITIC, ACTOR])
def test_a_script_that_goes_on_with_one_of_its_models_trains_it_alone(last: TableId) -> None:
    script = Script()
    script.step(*[CRITIC, ACTOR] * 10)
    place = script.step(*[last] * 10)
    assert place is not None
    assert (place.in_turn, place.clocks[last]) == (False, 19)


def test_a_warm_up_of_one_model_before_another_alone_is_forgotten() -> None:
    script = Script()
    script.step(*[CRITIC] * 10)
    assert script.step(*[ACTOR] * 12) == alone(10, 11)


def test_save_points_are_the_places_of_a_script_that_has_them() -> None:
    script = Script()
    for _ in range(3):
        script.save_point()
        script.step(ACTOR, CRITIC, CRITIC)
    assert script.loop.place == in_turn(4, 2)


def test_a_loop_of_one_model_begins_before_each_step_also_where_there_are_save_points() -> None:
    """A script may have one an epoch: who joins does not wait for that."""
    script = Script(is_only=True)
    script.step(CRITIC, CRITIC)
    script.save_point()
    assert script.loop.place == alone(1, 0)


def test_save_points_of_a_script_that_steps_one_of_its_models_are_no_places_for_long() -> None:
    script = Script()
    for _ in range(2):
        script.save_point()
        script.step(*[CRITIC] * 20)
    script.save_point()
    assert script.loop.place == alone(39, 0)


def test_save_points_that_are_far_apart_are_no_places() -> None:
    script = Script()
    for _ in range(2):
        script.save_point()
        script.step(*[CRITIC, ACTOR] * 20)
    assert script.loop.place == in_turn(39, 39)


def test_who_has_joined_a_loop_of_one_model_need_not_show_it_again() -> None:
    script = Script()
    script.loop.begin_alone()
    assert script.step(CRITIC) == alone(0, 0)


# --- the search


def test_it_asks_again_while_nobody_tells() -> None:
    search = PlaceSearch()
    assert hear(search, both(1, 0), ()) is Found.NOTHING
    assert search.clocks == both(1, 0)


def test_the_loop_of_one_model_is_as_it_was() -> None:
    search = PlaceSearch()
    assert hear(search, both(70, 3), [told(alone(60, 60), both(90, 90))]) is Found.ALONE
    assert search.clocks == both(70, 3)


def test_a_dead_worker_that_stepped_two_models_says_nothing_of_those_who_step_one() -> None:
    gone = told(in_turn(20, 20), is_alive=False)
    assert hear(PlaceSearch(), both(70, 20), [told(alone(69, 20)), gone]) is Found.ALONE


def test_a_loop_of_several_is_waited_for_at_its_place() -> None:
    search, place = PlaceSearch(), in_turn(5, 5)
    assert hear(search, both(6, 5), [told(place, both(6, 5))]) is Found.FOLLOWS
    assert search.clocks == both(6, 5)
    assert hear(search, both(6, 5), [told(in_turn(6, 6), both(7, 6))]) is Found.PLACE
    assert (search.clocks, search.placed) == (both(6, 6), frozenset(both(6, 6)))


def test_others_are_followed_step_by_step_and_never_passed() -> None:
    search = PlaceSearch()
    steps: Sequence[dict[TableId, int]] = [both(2, 0), both(3, 0), both(3, 1)]
    for sealed in steps:
        assert hear(search, both(2, 0), [told(NOWHERE, sealed)]) is Found.FOLLOWS
        assert search.clocks == sealed
    assert hear(search, both(2, 0), [told(in_turn(3, 1), both(4, 1))]) is Found.PLACE
    assert search.clocks == both(3, 1)


def test_a_place_that_it_has_gone_beyond_is_none() -> None:
    search = PlaceSearch()
    assert hear(search, both(6, 5), [told(in_turn(5, 5), both(6, 7))]) is Found.FOLLOWS
    assert hear(search, both(6, 5), [told(in_turn(6, 6))]) is Found.FOLLOWS
    assert hear(search, both(6, 5), [told(in_turn(7, 7))]) is Found.PLACE
    assert search.clocks == both(7, 7)


def test_the_nearest_place_counts_where_workers_are_at_several() -> None:
    """SSP: some are further."""
    search, places = PlaceSearch(), [in_turn(9, 9), in_turn(4, 4), in_turn(7, 7)]
    assert hear(search, both(6, 6), [told(place) for place in places]) is Found.PLACE
    assert search.clocks == both(7, 7)


def test_a_worker_that_steps_a_second_model_knows_more() -> None:
    search = PlaceSearch()
    reports = [told(alone(9, 0)), told(NOWHERE, both(10, 1))]
    assert hear(search, both(9, 0), reports) is Found.FOLLOWS
    assert search.clocks == both(10, 1)


def test_a_loop_whose_next_place_is_far_is_not_followed_to_it() -> None:
    """One model is stepped many times for each step of the other."""
    search, end = PlaceSearch(), 6 + MOST_FOLLOWED_CLOCKS
    assert hear(search, both(6, 1), [told(in_turn(5, 1), both(end, 1))]) is Found.FOLLOWS
    assert hear(search, both(6, 1), [told(in_turn(5, 1), both(end + 1, 1))]) is Found.NO_FURTHER
    assert hear(search, both(6, 1), [told(in_turn(end + 1, 1))]) is Found.NO_FURTHER
    assert (search.clocks, search.placed) == (both(end, 1), frozenset())


def test_where_all_are_gone_it_begins_where_they_were_last() -> None:
    search = PlaceSearch()
    gone = told(in_turn(5, 5), both(6, 7), is_alive=False)
    assert hear(search, both(6, 5), [gone]) is Found.DEAD
    assert (search.clocks, search.placed) == (both(6, 7), frozenset())


def test_where_all_are_gone_that_stepped_one_model_it_begins_where_it_has_joined() -> None:
    """The last clocks that they told may never have left them."""
    search = PlaceSearch()
    assert hear(search, both(6, 0), [told(alone(8, 0), both(9, 0), is_alive=False)]) is Found.DEAD
    assert search.clocks == both(6, 0)


def test_the_last_words_of_the_dead_do_not_count_before_a_living_worker_has_told() -> None:
    """Both begin with the loop, at other clocks, unless one follows the other."""
    search, gone = PlaceSearch(), told(in_turn(0, 0), both(1, 0), is_alive=False)
    assert hear(search, both(1, 0), [gone], all_have_told=False) is Found.NOTHING
    steps = [gone, told(NOWHERE, both(3, 0))]
    assert hear(search, both(1, 0), steps) is Found.FOLLOWS
    assert hear(search, both(1, 0), [gone, told(in_turn(3, 1))]) is Found.PLACE
    assert search.clocks == both(3, 1)


def test_where_the_dead_stepped_one_model_it_waits_for_nobody_to_tell() -> None:
    gone = told(alone(8, 0), is_alive=False)
    assert hear(PlaceSearch(), both(6, 0), [gone], all_have_told=False) is Found.DEAD


def test_a_table_that_no_loop_steps_holds_nobody_up() -> None:
    search = PlaceSearch()
    assert hear(search, both(6, 5) | {OTHER: 4}, [told(in_turn(6, 6))]) is Found.PLACE
    assert search.clocks == both(6, 6) | {OTHER: 4}
    assert search.placed == {CRITIC, ACTOR}


def test_tables_that_it_does_not_join_are_not_followed() -> None:
    """They were made after it came, or their workers wait for nobody."""
    search = PlaceSearch()
    assert hear(search, {CRITIC: 6}, [told(NOWHERE, both(7, 3))]) is Found.FOLLOWS
    assert search.clocks == {CRITIC: 7}
    assert hear(search, {CRITIC: 6}, [told(in_turn(7, 3))]) is Found.PLACE
    assert search.clocks == {CRITIC: 7}


def test_others_that_wait_for_it_where_it_ends_no_steps_are_not_followed() -> None:
    """It is a worker of a table that was made after it came from the first step on."""
    reports = [told(NOWHERE, both(10, 1))]
    assert hear(PlaceSearch(), {CRITIC: 9}, reports, own={ACTOR: 0}) is Found.NO_FURTHER
    assert hear(PlaceSearch(), {CRITIC: 9}, reports, own={ACTOR: 1}) is Found.FOLLOWS


def test_a_table_that_it_joins_late_is_awaited_and_one_that_is_removed_is_left_out() -> None:
    search, at_place = PlaceSearch(), [told(in_turn(7, 4))]
    assert hear(search, {CRITIC: 6, OTHER: 2}, at_place, awaited=[ACTOR]) is Found.FOLLOWS
    assert search.clocks == {CRITIC: 7, OTHER: 2}
    assert hear(search, both(6, 4), at_place) is Found.PLACE
    assert search.clocks == both(7, 4)


def test_a_search_that_is_made_again_goes_on_where_the_first_has_ended_steps() -> None:
    search = PlaceSearch({CRITIC: 8})
    assert hear(search, both(6, 6), [told(in_turn(7, 7))]) is Found.FOLLOWS
    assert search.clocks == both(8, 7)


# --- on the wire


@pytest.mark.parametrize("place", [in_turn(4, 2), alone(4, 0), NOWHERE])
def test_a_report_travels(place: LoopPlace) -> None:
    loop = TrainingLoop()
    loop.clocks, loop.place = both(4, 2), place
    message = loop_to_proto(loop, {CRITIC: 5, OTHER: 9})
    assert message is not None
    assert loop_from_proto(message, is_alive=True) == LoopReport(True, both(5, 2), place)


def test_who_has_taken_no_step_tells_of_no_loop() -> None:
    assert loop_to_proto(TrainingLoop(), {CRITIC: 5}) is None


def test_of_a_loop_of_many_tables_none_is_told() -> None:
    """It tells only that it steps one model, so nobody waits for more."""
    loop = TrainingLoop()
    loop.begin_step("model", dict.fromkeys(map(TableId, range(1, 258)), 0))
    message = loop_to_proto(loop, {})
    assert message is not None
    report = loop_from_proto(message, is_alive=True)
    assert report == LoopReport(True, {}, LoopPlace({}, in_turn=False))
    assert hear(PlaceSearch(), both(6, 5), [report]) is Found.ALONE


@pytest.mark.parametrize(
    ("state", "is_alive"), [("ALIVE", True), ("SILENT", True), ("LEFT", False), ("GONE", False)]
)
def test_a_worker_that_is_silent_may_go_on_with_its_loop(state: str, is_alive: bool) -> None:
    own = Session("c", b"", NodeId(9), Incarnation(9), Role.WORKER)
    status = scheduler_pb2.GetClusterStatusResponse()
    for number in (1, 2, 9):
        status.nodes.add(
            node=types_pb2.Node(
                node_id=number,
                incarnation=number,
                role=types_pb2.NODE_ROLE_WORKER,
                state=f"NODE_STATE_{state}",
            )
        )
    status.nodes[0].progress.loop.in_turn = True
    reports = reports_in(status, own, ())
    assert [report.is_alive for report in reports.told] == [is_alive]
    assert reports.all_have_told is not is_alive
    assert reports_in(status, own, {Incarnation(2)}).all_have_told
