"""Collective calls while everything goes wrong (S17): the machines of hosts and workers, from a
seed; and deliberate bugs of theirs, each of which some seed has to find.
"""

from __future__ import annotations

from typing import Any

import pytest

from ps_core.cluster_view import ClusterView, Node
from ps_core.collective_calls import Host, Round, Share, joined_after
from ps_core.keys import Incarnation
from ps_server.ranges.collective_rounds import CollectiveRounds
from ps_worker.collectives.rounds import Entering, Rounds
from tests.sim.collective_world import Violation, World

MUTANT_SEEDS = 120


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_lockstep", [True, False], ids=["in lockstep", "apart"])
def test_every_round_is_the_same_for_all_and_has_each_share_once(
    sim_seeds: tuple[int, ...], is_lockstep: bool
) -> None:
    for seed in sim_seeds:
        try:
            World(seed, is_lockstep=is_lockstep).run()
        except Violation as violation:
            pytest.fail(f"SEED={seed}: {violation}")


class ForgetfulRounds(Rounds):
    """Does not say which round it had last."""

    def entering(self, host: Host, share: Share | None) -> Entering:
        del host
        return Entering(0, None, share)


class SilentRounds(Rounds):
    """Says it only when its script makes its next call."""

    def must_announce(self, host: Host) -> bool:
        del host
        return False


class KeepingHost(CollectiveRounds):
    """Goes on, when it is the host again, with what it had before others were."""

    def observe(self, view: ClusterView) -> None:
        kept = self._shares, self._heard, self._last
        super().observe(view)
        self._shares, self._heard, self._last = kept


class CountingHost(CollectiveRounds):
    """Counts a share again that is sent again when its round has ended."""

    def answer(self, who: Incarnation, ended_round: int) -> Round | None:
        del ended_round
        found = super().answer(who, 0)
        return None if who in self._shares else found

    def enter(
        self, who: Incarnation, ended_round: int, last: Round | None, share: Share | None
    ) -> None:
        if share is not None:
            self._shares.setdefault(who, share)
        super().enter(who, ended_round, last, None)


class DeafHost(CollectiveRounds):
    """Does not take over what another host has ended."""

    def enter(
        self, who: Incarnation, ended_round: int, last: Round | None, share: Share | None
    ) -> None:
        heard = None if last is None else Round(last.number, ())
        super().enter(who, ended_round, heard, share)


class ImpatientHost(CollectiveRounds):
    """Waits for no newcomer."""

    def _is_missing(self, view: ClusterView, rank: int, clock: int) -> bool:
        node = self._workers.get(rank)
        if node is not None and joined_after(view, node.incarnation) is not None:
            return False
        return super()._is_missing(view, rank, clock)


class HastyHost(CollectiveRounds):
    """Does not wait for a newcomer that was in the last round, and may not have been given it."""

    def _is_missing(self, view: ClusterView, rank: int, clock: int) -> bool:
        last, self._last = self._last, None
        missing = super()._is_missing(view, rank, clock)
        self._last = last
        return missing


class AwaitingHost(CollectiveRounds):
    """Waits for a newcomer from the moment it has registered."""

    def _is_missing(self, view: ClusterView, rank: int, clock: int) -> bool:
        del view, clock
        node: Node | None = self._workers.get(rank)
        return node is None or node.incarnation not in self._shares


class LoyalHost(CollectiveRounds):
    """Waits for workers that are gone."""

    def observe(self, view: ClusterView) -> None:
        workers = dict(self._workers)
        super().observe(view)
        self._workers = workers | self._workers

    def _missing(self) -> list[int]:
        return [
            rank for rank, node in self._workers.items() if node.incarnation not in self._shares
        ]


@pytest.mark.parametrize(
    "mutant",
    [
        ForgetfulRounds, SilentRounds, KeepingHost, CountingHost, DeafHost, ImpatientHost,
        AwaitingHost, LoyalHost,
    ],
)  # fmt: skip
def test_a_seed_finds_a_deliberate_bug(mutant: type[CollectiveRounds | Rounds]) -> None:
    options: dict[str, Any] = {"rounds" if issubclass(mutant, Rounds) else "machine": mutant}
    for seed in range(MUTANT_SEEDS):
        for is_lockstep in (True, False):
            try:
                World(seed, is_lockstep=is_lockstep, **options).run()
            except Violation:
                return
    pytest.fail(f"none of {MUTANT_SEEDS} seeds finds it")


def test_what_a_seed_has_found() -> None:
    """Hosts were so: a newcomer that nobody had to wait for was not given the round that it was in
    before the next one ended, and its share counted again.
    """
    World(1967, is_lockstep=False).run()
    with pytest.raises(Violation, match="COL-2"):
        World(1967, HastyHost, is_lockstep=False).run()
