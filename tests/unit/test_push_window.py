"""The push window, one rule at a time; the simulator has it against a whole cluster."""

from __future__ import annotations

import pytest

from ps_core.errors import (
    Draining,
    Fenced,
    InvalidConfig,
    InvalidKeys,
    InvalidTensor,
    NotOwner,
    Overloaded,
)
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_worker.window.push_window import (
    BlockPlace,
    EntryKey,
    EntryState,
    PushWindow,
    Reply,
    SendPush,
    SendSeal,
    SendWithdrawal,
    StepEnded,
    StepRefused,
    StepTerms,
)

TABLE = TableId(1)
NEAR, FAR = NodeId(1), NodeId(2)
PLACES = [RangeId(0), RangeId(1)]


@pytest.fixture
def window() -> PushWindow:
    """Range 0 is on server 1, range 1 on server 2."""
    window = PushWindow(window_bytes=200, resend_after_s=5.0)
    window.assign({RangeId(0): NEAR, RangeId(1): FAR})
    window.connected(NEAR)
    window.connected(FAR)
    return window


def _push(window: PushWindow, range_id: int = 0, block: int = 0, clock: int = 1) -> EntryKey:
    place = BlockPlace(TABLE, RangeId(range_id), block)
    return window.submit(place, clock, b"body", byte_count=100)


def _say(
    window: PushWindow, kind: ReplyKind, key: EntryKey, at_s: float = 0.0, **more: object
) -> list[object]:
    server = NEAR if key.range_id == 0 else FAR
    reply = Reply(kind, key.table_id, key.range_id, key.sequence, **more)  # type: ignore[arg-type]
    return list(window.reply(server, reply, at_s))


def _commit(
    window: PushWindow, key: EntryKey, outcome: Outcome = Outcome.APPLIED, **more: object
) -> list[object]:
    ending = Ending(outcome, **more)  # type: ignore[arg-type]
    return _say(window, ReplyKind.COMMITTED, key, ending=ending)


def _seal_key(range_id: int, sequence: int) -> EntryKey:
    return EntryKey(TABLE, RangeId(range_id), sequence)


def test_payload_in_flight_stays_within_the_window(window: PushWindow) -> None:
    keys = [_push(window, block=block) for block in range(3)]
    assert len(window.poll(0.0)) == 2
    assert window.in_flight_bytes == 200
    _say(window, ReplyKind.RECEIVED, keys[0])
    assert [e.key for e in window.poll(0.0) if isinstance(e, SendPush)] == [keys[2]]


def test_a_server_that_does_not_answer_holds_up_no_push_to_another(window: PushWindow) -> None:
    slow = [_push(window, block=block) for block in range(3)]
    others = [_push(window, range_id=1, block=block) for block in range(3, 6)]
    assert {effect.key for effect in _pushes(window, 0.0)} == {*slow[:2], *others[:2]}
    _say(window, ReplyKind.RECEIVED, others[0])
    assert [effect.key for effect in _pushes(window, 0.0)] == [others[2]]
    window.assign({RangeId(0): FAR, RangeId(1): FAR})
    _say(window, ReplyKind.RECEIVED, others[1])
    assert [(e.server, e.key) for e in _pushes(window, 0.1)] == [(FAR, slow[0])]


def _pushes(window: PushWindow, at_s: float) -> list[SendPush]:
    return [effect for effect in window.poll(at_s) if isinstance(effect, SendPush)]


def test_what_an_old_owner_received_is_sent_to_the_new_one_all_the_same(
    window: PushWindow,
) -> None:
    key = _push(window)
    window.poll(0.0)
    window.assign({RangeId(0): FAR, RangeId(1): FAR})
    (again,) = window.poll(0.1)
    assert isinstance(again, SendPush)
    assert again.server == FAR
    window.reply(NEAR, Reply(ReplyKind.RECEIVED, *key), 0.2)
    assert window.in_flight_bytes == 100, "the new owner has not said so"
    window.tick(6.0)
    assert [e.server for e in window.poll(6.0) if isinstance(e, SendPush)] == [FAR]


@pytest.mark.parametrize("server", [NEAR, FAR])
@pytest.mark.parametrize("is_carried", [False, True])
@pytest.mark.parametrize("state", EntryState)
def test_what_a_range_without_a_primary_had_goes_to_its_next_one(
    window: PushWindow, state: EntryState, server: NodeId, *, is_carried: bool
) -> None:
    """Once, and to nobody before. In the scheduler's views only a range without blocks has none."""
    key, seal = _push(window), _seal_key(0, 2)
    if not is_carried:
        window.poll(0.0)
        window.disconnected(NEAR)
        window.connected(NEAR)
    window.seal(TABLE, 1, [RangeId(0)], StepTerms())
    if state is not EntryState.QUEUED:
        window.poll(0.0)
    if state is EntryState.RECEIVED:
        _say(window, ReplyKind.RECEIVED, key)
        window.poll(0.0)
    if state is EntryState.ENDED:
        _commit(window, key)
    window.assign({RangeId(1): FAR})
    assert window.poll(0.1) == []
    assert window.in_flight_bytes == 0
    window.assign({RangeId(0): server, RangeId(1): FAR})
    sent = window.poll(0.2)
    window.reply(server, Reply(ReplyKind.RECEIVED, *key), 0.3)
    sent += window.poll(0.3)
    assert {effect.server for effect in sent if isinstance(effect, SendPush | SendSeal)} == {server}
    pushes = [effect for effect in sent if isinstance(effect, SendPush)]
    seals = [r.sequence for e in sent if isinstance(e, SendSeal) for r in e.ranges]
    seals += [e.inline_seal[0] for e in pushes if e.inline_seal is not None]
    assert [effect.key for effect in pushes] == [key] * (state is not EntryState.ENDED)
    assert seals == [seal.sequence]


def test_what_was_received_says_so_when_it_goes_again(window: PushWindow) -> None:
    key, other = _push(window), _push(window, block=1)
    first = window.poll(0.0)
    assert [e.was_received for e in first if isinstance(e, SendPush)] == [False, False]
    _say(window, ReplyKind.RECEIVED, key)
    window.assign({RangeId(0): FAR, RangeId(1): FAR})
    again = {e.key: e.was_received for e in window.poll(0.1) if isinstance(e, SendPush)}
    assert again == {key: True, other: False}


def test_what_an_old_owner_committed_has_ended(window: PushWindow) -> None:
    key = _push(window)
    window.poll(0.0)
    window.assign({RangeId(0): FAR, RangeId(1): FAR})
    ending = Ending(Outcome.APPLIED)
    window.reply(NEAR, Reply(ReplyKind.COMMITTED, *key, ending=ending), 0.2)
    assert window.open_entries() == ()


def test_being_given_back_again_does_not_put_off_when_it_goes(window: PushWindow) -> None:
    key = _push(window)
    window.poll(0.0)
    full = Overloaded("given back", retry_after_ms=500)
    for at_s in (0.1, 0.4):  # the second is for a seal that asked again
        _say(window, ReplyKind.GIVEN_BACK, key, at_s, error=full)
    window.tick(0.7)
    assert [e.key for e in window.poll(0.7) if isinstance(e, SendPush)] == [key]


def test_entries_that_were_sent_one_after_the_other_are_resent_a_few_times_a_wait() -> None:
    """Each look is at all entries, of which there may be a hundred thousand."""
    window = PushWindow(10_000, resend_after_s=5.0)
    window.assign({RangeId(0): NEAR})
    window.connected(NEAR)
    for number in range(100):
        _push(window, block=number)
        window.poll(number / 100)
    sent_s = [tenth / 10 for tenth in range(49, 75) for _ in _resent(window, tenth / 10)]
    assert len(sent_s) == 100
    assert sorted(set(sent_s)) == [5.4, 5.9, 6.4]


def _resent(window: PushWindow, at_s: float) -> list[SendPush]:
    window.tick(at_s)
    return _pushes(window, at_s)


def test_one_entry_may_always_go(window: PushWindow) -> None:
    window.submit(BlockPlace(TABLE, RangeId(0), 0), 1, b"", byte_count=10_000)
    assert len(window.poll(0.0)) == 1


def test_seals_wait_for_every_push_on_every_server(window: PushWindow) -> None:
    near, far = _push(window, 0), _push(window, 1, block=1)
    window.poll(0.0)
    window.seal(TABLE, 1, PLACES, StepTerms())
    _say(window, ReplyKind.RECEIVED, near)
    assert window.poll(0.0) == []
    _say(window, ReplyKind.RECEIVED, far)
    assert {e.server for e in window.poll(0.0) if isinstance(e, SendSeal)} == {NEAR, FAR}


def test_all_seals_skip_if_one_push_is_invalid(window: PushWindow) -> None:
    near, far = _push(window, 0), _push(window, 1, block=1)
    window.poll(0.0)
    window.seal(TABLE, 1, PLACES, StepTerms())
    _commit(window, near, Outcome.INVALID, error=InvalidTensor("non-finite"))
    _say(window, ReplyKind.RECEIVED, far)
    seals = [e for e in window.poll(0.0) if isinstance(e, SendSeal)]
    assert [seal.terms.skip for seal in seals] == [True, True]
    _commit(window, far, Outcome.SKIPPED)
    _commit(window, _seal_key(0, 2))
    (ended,) = _commit(window, _seal_key(1, 2))
    assert isinstance(ended, StepEnded)
    assert not ended.applied
    assert [block for block, _ in ended.problems] == [0]


def test_a_step_of_one_message_carries_its_seal(window: PushWindow) -> None:
    key = _push(window)
    window.seal(TABLE, 1, PLACES[:1], StepTerms())
    (push,) = window.poll(0.0)
    assert isinstance(push, SendPush)
    assert push.inline_seal == (2, StepTerms())
    _commit(window, key)
    assert window.poll(0.0) == []
    (ended,) = _commit(window, _seal_key(0, 2))
    assert isinstance(ended, StepEnded)


def test_a_carried_seal_whose_answer_is_lost_is_asked_for_alone(window: PushWindow) -> None:
    key = _push(window)
    window.seal(TABLE, 1, PLACES[:1], StepTerms())
    window.poll(0.0)
    _commit(window, key)
    window.tick(6.0)
    (seal,) = window.poll(6.0)
    assert isinstance(seal, SendSeal)
    assert [part.sequence for part in seal.ranges] == [2]


def test_a_carried_seal_is_asked_for_alone_when_its_push_was_received(window: PushWindow) -> None:
    """Both outcomes are lost on a stream that stays."""
    key = _push(window)
    window.seal(TABLE, 1, PLACES[:1], StepTerms())
    window.poll(0.0)
    _say(window, ReplyKind.RECEIVED, key)
    window.tick(6.0)
    (seal,) = window.poll(6.0)
    assert isinstance(seal, SendSeal)
    assert [part.sequence for part in seal.ranges] == [2]
    _commit(window, _seal_key(0, 2))
    window.tick(12.0)
    (push,) = window.poll(12.0)
    assert isinstance(push, SendPush)
    (ended,) = _commit(window, key)
    assert isinstance(ended, StepEnded)


def test_a_carried_seal_whose_push_was_invalid_skips_when_it_goes_alone(window: PushWindow) -> None:
    """The next owner may know nothing of the push that it came with."""
    key = _push(window)
    window.seal(TABLE, 1, [RangeId(0)], StepTerms())
    window.poll(0.0)
    _say(window, ReplyKind.RECEIVED, _seal_key(0, 2))
    _commit(window, key, Outcome.INVALID, error=InvalidTensor("non-finite"))
    window.assign({RangeId(0): FAR, RangeId(1): FAR})
    (seal,) = window.poll(1.0)
    assert isinstance(seal, SendSeal)
    assert seal.terms.skip


def test_a_changed_block_takes_a_new_number_that_names_the_old(window: PushWindow) -> None:
    _push(window)
    window.poll(0.0)
    again = _push(window)
    (push,) = window.poll(0.0)
    assert isinstance(push, SendPush)
    assert (push.key, push.replaces) == (again, 1)


def test_a_block_changed_before_it_left_keeps_its_number(window: PushWindow) -> None:
    assert _push(window) == _push(window)
    assert len(window.poll(0.0)) == 1


def test_a_replaced_number_that_may_be_lost_is_withdrawn(window: PushWindow) -> None:
    first = _push(window)
    window.poll(0.0)
    second = _push(window)
    window.disconnected(NEAR)
    window.connected(NEAR)
    effects = window.poll(1.0)
    assert {(type(e), e.key) for e in effects if not isinstance(e, SendSeal | StepEnded)} == {  # type: ignore[union-attr]
        (SendWithdrawal, first),
        (SendPush, second),
    }


def test_after_a_refusal_nothing_of_that_table_goes_there_before_credit(
    window: PushWindow,
) -> None:
    near, far = _push(window, 0), _push(window, 1, block=1)
    window.poll(0.0)
    full = Overloaded("full", retry_after_ms=500)
    _say(window, ReplyKind.REFUSED, near, error=full)
    _say(window, ReplyKind.RECEIVED, far)
    other = _push(window, 0, block=2)
    assert window.poll(0.1) == []
    _say(window, ReplyKind.CREDIT, _seal_key(0, 0))
    assert {e.key for e in window.poll(0.2) if isinstance(e, SendPush)} == {near, other}


def test_lost_credit_is_made_up_for_by_the_retry_time(window: PushWindow) -> None:
    key = _push(window)
    window.poll(0.0)
    _say(window, ReplyKind.RECEIVED, key)
    full = Overloaded("full", retry_after_ms=500)
    _say(window, ReplyKind.GIVEN_BACK, key, error=full)
    window.tick(0.4)
    assert window.poll(0.4) == []
    window.tick(0.6)
    assert [e.key for e in window.poll(0.6) if isinstance(e, SendPush)] == [key]


def test_what_broke_off_goes_again_with_the_same_number(window: PushWindow) -> None:
    key = _push(window)
    window.poll(0.0)
    _say(window, ReplyKind.RECEIVED, key)
    window.disconnected(NEAR)
    assert window.poll(0.0) == []
    window.connected(NEAR)
    assert [e.key for e in window.poll(0.0) if isinstance(e, SendPush)] == [key]


def test_a_server_that_is_not_the_owner_is_asked_again_under_a_newer_view(
    window: PushWindow,
) -> None:
    key = _push(window)
    window.poll(0.0)
    assert _say(window, ReplyKind.ERROR, key, error=NotOwner("moved")) == []
    assert window.poll(0.0) == []
    window.assign({RangeId(0): FAR, RangeId(1): FAR})
    window.tick(1.0)
    assert [e.server for e in window.poll(1.0) if isinstance(e, SendPush)] == [FAR]


def test_a_refusal_that_consumed_no_number_gives_it_up(window: PushWindow) -> None:
    key = _push(window)
    window.poll(0.0)
    _say(window, ReplyKind.ERROR, key, error=InvalidKeys("no such block"))
    (withdrawal,) = window.poll(0.0)
    assert withdrawal == SendWithdrawal(NEAR, key)
    window.seal(TABLE, 1, PLACES[:1], StepTerms())
    (seal,) = window.poll(0.0)
    assert isinstance(seal, SendSeal)
    assert seal.terms.skip


def test_a_push_beside_a_refused_one_carries_no_seal(window: PushWindow) -> None:
    refused = _push(window)
    window.poll(0.0)
    _say(window, ReplyKind.ERROR, refused, error=InvalidKeys("no such block"))
    kept = _push(window, block=1)
    window.seal(TABLE, 1, PLACES[:1], StepTerms())
    withdrawal, push = window.poll(0.0)
    assert withdrawal == SendWithdrawal(NEAR, refused)
    assert isinstance(push, SendPush)
    assert push.inline_seal is None
    _say(window, ReplyKind.RECEIVED, kept)
    (seal,) = window.poll(0.0)
    assert isinstance(seal, SendSeal)
    assert seal.terms.skip


def test_entries_are_overdue_by_their_own_time_not_by_the_last_tick(window: PushWindow) -> None:
    early = _push(window)
    window.poll(0.0)
    window.tick(0.0)
    late = _push(window, block=1)
    window.poll(3.0)
    sent = []
    for now_s in (4.9, 5.0, 7.9, 8.0):
        window.tick(now_s)
        sent += [(now_s, e.key) for e in window.poll(now_s) if isinstance(e, SendPush)]
    assert sent == [(5.0, early), (8.0, late)]


def test_a_retry_comes_in_its_time_between_two_looks_for_overdue_entries(
    window: PushWindow,
) -> None:
    window.tick(0.0)
    key = _push(window)
    window.poll(0.0)
    away = Draining("back soon", retry_after_ms=200)
    _say(window, ReplyKind.ERROR, key, at_s=0.1, error=away)
    for now_s, expected in ((0.1, []), (0.2, []), (0.4, [key])):
        window.tick(now_s)
        assert [e.key for e in window.poll(now_s) if isinstance(e, SendPush)] == expected


def test_what_is_confirmed_has_no_gap(window: PushWindow) -> None:
    first, second = _push(window, block=0), _push(window, block=1)
    window.poll(0.0)
    _commit(window, second)
    third = _push(window, block=2)
    _commit(window, first)
    fourth = _push(window, block=3)
    sent = {e.key: e.confirmed_sequence for e in window.poll(0.0) if isinstance(e, SendPush)}
    assert sent == {third: 2, fourth: 2}
    _commit(window, fourth)
    window.seal(TABLE, 1, PLACES[:1], StepTerms())
    _say(window, ReplyKind.RECEIVED, third)
    (seal,) = window.poll(0.0)
    assert isinstance(seal, SendSeal)
    assert [(part.sequence, part.confirmed_sequence) for part in seal.ranges] == [(5, 2)]


def test_a_refused_seal_is_told_at_once(window: PushWindow) -> None:
    window.seal(TABLE, 1, PLACES, StepTerms())
    window.poll(0.0)
    problem = InvalidConfig("workers 0 and 1 disagree")
    (refused,) = _commit(window, _seal_key(0, 1), Outcome.INVALID, error=problem)
    assert refused == StepRefused(TABLE, 1, problem)


def test_a_seal_that_is_withdrawn_says_that_the_membership_has_ended(window: PushWindow) -> None:
    window.seal(TABLE, 1, PLACES, StepTerms())
    window.poll(0.0)
    assert _commit(window, _seal_key(0, 1)) == []
    refused, ended = _commit(window, _seal_key(1, 1), Outcome.WITHDRAWN)
    assert isinstance(refused, StepRefused)
    assert isinstance(refused.error, Fenced)
    assert "clock 1 of table 1 did not take effect in range 1" in str(refused.error)
    assert isinstance(ended, StepEnded)
    assert (ended.applied, ended.problems) == (False, ((None, refused.error),))


def test_a_sealed_step_takes_no_more(window: PushWindow) -> None:
    window.seal(TABLE, 1, PLACES, StepTerms())
    with pytest.raises(InvalidConfig, match="has been sealed"):
        _push(window)
    with pytest.raises(InvalidConfig, match="has been sealed"):
        window.seal(TABLE, 1, PLACES, StepTerms())


def test_a_window_needs_room() -> None:
    with pytest.raises(InvalidConfig, match="window_bytes is 0"):
        PushWindow(0)
