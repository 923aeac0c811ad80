"""What workers see of an epoch, against torch's own sampler, and against a twin that crosses out
what was seen.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from ps_worker.training.epoch_plan import Epoch, Position, epoch_of, share_count, share_of, stage_of
from tests.examples import examples

DATA: Any = range(60)
LENGTHS = st.integers(1, 60)
PLACES = st.integers(1, 7)


@given(LENGTHS, PLACES, st.integers(0, 5), st.integers(0, 9), st.booleans(), st.booleans())
@settings(max_examples=examples(200))
def test_a_first_stage_is_what_torchs_sampler_gives(
    length: int, places: int, number: int, seed: int, is_shuffled: bool, drop_last: bool
) -> None:
    left = Epoch(length, number, seed, is_shuffled).left()
    for place in range(places):
        if drop_last and length < places:
            continue  # torch's raises
        theirs: DistributedSampler[int] = DistributedSampler(
            DATA[:length], places, place, shuffle=is_shuffled, seed=seed, drop_last=drop_last
        )
        theirs.set_epoch(number)
        ours = share_of(left, place, places, drop_last=drop_last)
        assert ours.tolist() == list(theirs)
        assert len(ours) == share_count(length, places, drop_last=drop_last)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """How many places each stage has, and how far each of these comes."""
    return [
        (places, draw(st.lists(st.integers(0, 30), min_size=places, max_size=places)))
        for places in draw(st.lists(PLACES, max_size=4))
    ]


@given(LENGTHS, histories(), PLACES, st.booleans())
@settings(max_examples=examples(300))
def test_what_was_seen_does_not_come_again_and_nothing_else_is_left_out(
    length: int, history: list[tuple[int, list[int]]], last_places: int, drop_last: bool
) -> None:
    """The twin has a list of samples, and crosses out one after the other (PLAN-1)."""
    epoch = Epoch(length, 3, 5)
    unseen = epoch.left().tolist()
    seen: Counter[int] = Counter()
    for places, counts in history:
        left = epoch.left()
        assert left.tolist() == unseen
        assert epoch.left_count == len(unseen)
        stage = []
        for place, count in enumerate(counts):
            share = share_of(left, place, places, drop_last=drop_last).tolist()
            stage.append(min(count, len(share)))
            first_round = [n for n, sample in enumerate(share) if place + n * places < len(left)]
            for n in range(stage[-1]):
                seen[share[n]] += 1
                if n in first_round:
                    unseen.remove(share[n])
        epoch = Epoch(length, 3, 5, stages=(*epoch.stages, tuple(stage)))
    last = [
        sample
        for place in range(last_places)
        for sample in share_of(epoch.left(), place, last_places, drop_last=drop_last).tolist()
    ]
    if drop_last:
        assert all(count == 1 for count in (seen + Counter(last)).values())
        assert len(unseen) - len(last) < last_places
    else:
        assert set(seen) | set(last) == set(range(length))
        assert Counter(unseen) <= Counter(last)


def test_a_place_that_is_not_known_counts_as_the_least_of_the_others() -> None:
    assert stage_of([5, None, 3]) == (5, 3, 3)
    assert stage_of([None]) == (0,)


def test_the_epoch_of_a_checkpoint_is_that_of_the_workers_with_a_share() -> None:
    """Those beyond the first see what others see, and may be epochs behind."""
    behind = Position(number=0, place=None, places=2, stages=())
    own = [Position(7, 0, 2, ()), Position(8, 1, 2, ())]
    assert epoch_of([behind, *own]) == own[0]
    assert epoch_of([behind]) == behind, "nobody knows more"


def test_its_stages_are_those_of_who_was_there_when_it_began() -> None:
    """However many have joined since: they do not know them."""
    joined = [Position(7, place, 3, ()) for place in (0, 1)]
    knows = Position(7, 2, 3, ((5, 5),))
    assert epoch_of([*joined, knows]) == knows
