"""Ranges without values whose holders keep update logs: they are placed anew, too (S8, S13).

Named runs are removed when they are over, and then all holders of a range without values end. Each
leaves, or is replaced at its address, or its machine is started again, or it comes back at once.
Where none of them is a member any more, another run places the range anew: before they come back
with their logs, or as they come, also at one of these that has seen no view yet. New holders die
before their logs have that they began, often since their disks stall.

Oracles, beside those of `tests.sim.test_runs_emptied`, `tests.sim.logged` and of what they name:
    S13    Who comes with a log goes on with nothing from before a range was placed anew.
    LOG-2  That is ended in the log, and so is what was withheld of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from ps_core.cluster_view import ClusterView, NodeState, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, NodeId, RangeId
from ps_core.sliced_work import Work
from scheduler.machine.cluster import Decision
from scheduler.machine.state import Registration, RunRemoved, Transition, UpdateLogClaim
from tests.sim.logged import LoggedServer, SimLog
from tests.sim.replicated import ReplicatedServer
from tests.sim.scheduled import LOOK_S, SCHEDULER, VIEW_DELAY_S
from tests.sim.test_logs import WHILE_DEAD_S
from tests.sim.test_runs_beside import RunLogSimulation
from tests.sim.test_runs_emptied import Emptied, PlacedAnewServer
from tests.sim.test_simulation import run_seeds

pytestmark = pytest.mark.slow

_ENDS = ("left", "left", "replaced", "replaced", "rebooted", "came at once")
"""What becomes of a holder of a range without values."""
_FOLLOWED = 0.7
"""Of those that left: a server with another log comes to their address, too."""
_AFTER_PLACEMENT = 0.6
"""Of the holders: they come with their logs when their ranges are placed anew, if that is soon."""
_SOON_S = 12.0
_UNSEEN = 0.6
"""Of those who come when a range of their log has no primary: they get no view for a while."""
_UNSEEN_S, _UNHEARD_S = 9.0, 3.0
"""For so long at most; and others, in half of the cases in which a range loses its holders."""
_ALL_LEAVE = 0.5
"""Of the removals of runs, without replicas: all servers are told to stop, and started again."""
_STRUCK = 0.7
"""Of the servers at which a range is placed anew: they die soon after ..."""
_STALLED = 0.7
"""... and so many of these have disks that stall before."""


class EmptiedLoggedServer(PlacedAnewServer, LoggedServer):
    """A server that may come with a log from before ranges were placed anew."""

    _stale: dict[RangeId, int]
    """Ranges of which that is so, and the newest record of each; in the first view."""

    def _observing(self, view: ClusterView) -> Work[None]:
        replicas = self.replication.replicas.values() if self._view is None else ()
        self._stale = {
            replica.range_id: replica.number
            for replica in replicas
            if replica.assignment_epoch < view.ranges[replica.range_id].placed_epoch
        }
        self.world.counts["came back with a stale claim"] += bool(self._stale)
        yield from super()._observing(view)
        for range_id in self._stale:
            is_mine = view.ranges[range_id].primary == self.node_id
            is_begun = is_mine and self.watch.has(self, range_id)
            self.world.counts["begun anew from a log"] += is_begun

    def _lost(self, range_ids: Sequence[RangeId]) -> None:
        for range_id, number in self._stale.items():
            replica = self.replication.replicas.get(range_id)
            goes_on = replica is not None and replica.number == number > 0
            assert not goes_on, (
                f"S13: server {self.node_id} goes on from record {number} of range {range_id}, "
                "which was placed anew since"
            )
        super()._lost(range_ids)


class EmptiedLogSimulation(Emptied, RunLogSimulation):
    """One seed in which servers keep logs of ranges whose holders end."""

    often: ClassVar[frozenset[str]] = frozenset({
        "fault: killed with ranges without values", "gone", "runs begun late", "runs removed",
        "trained in a run", "ranges unplaced", "ranges placed anew", "placed anew in one view",
        "came back with a stale claim", "ended as placed anew", "begun anew from a log",
        "killed before BEGIN was written", "disks stalled", "failovers",
        "came back with its ranges", "came back without its ranges", "ranges read from a log",
        "tables that waited", "withheld ranges ended", *(f"holders that {how}" for how in _ENDS),
        "came when it was placed anew", "got no view at first", "all left at once",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({
        "fault: lost track of a range without values", "frames lost", "logs given up",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges placed anew": 1}
    replica_counts = (1, 2, 2, 3)
    strikes_at_removals = 3
    server_kind = EmptiedLoggedServer
    may_cut = False  # machines are started again here, and logs are not synced

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._rebooting: set[SimLog] = set()
        super().__init__(seed, narrate=narrate)

    # --- holders that end, and come back

    def _may_lose_all(self, victims: set[NodeId]) -> bool:
        """Without replicas all come back, with what their logs have. Else one holder must live:
        what a backup has taken over is in no log at first.
        """
        if self.plan.replica_count > 1:
            return super()._may_lose_all(victims)
        view = self.scheduler.view
        return len(self.living) > len(victims) + 1 and not self.lost() & view.living_servers

    def _kill_holder(self, server: ReplicatedServer) -> None:
        draw = self._holders
        how = draw.choice(_ENDS)
        self.world.counts[f"holders that {how}"] += 1
        self.world.say(f"server {server.node_id}: {how}")
        dead = self.crash(server)
        if how == "came at once":
            self.world.after(WHILE_DEAD_S[0] * draw.random(), lambda: self._come_with_log(dead))
            return
        if how == "left":
            self._reach(lambda: self._say_goodbye_of(dead))
        if how == "rebooted":
            self._rebooting.add(dead.log)
        elif how == "replaced" or draw.random() < _FOLLOWED:
            self._come_instead(dead, self.world.now_s + _SOON_S)
        if draw.random() < _AFTER_PLACEMENT:
            view = self.scheduler.view
            epochs = {r.range_id: r.placed_epoch for r in view.ranges if dead.node_id in r.in_sync}
            until_s = self.world.now_s + _SOON_S * (0.5 + draw.random())
            self._come_after_placement(dead, epochs, until_s)
        else:
            after_s = draw.choice(WHILE_DEAD_S) * (0.5 + draw.random())
            self.world.after(after_s, lambda: self._come_with_log(dead))

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, RunRemoved) and self._holders.random() < _ALL_LEAVE:
            until_s = self.world.now_s + _SOON_S
            self.world.after(2.0 * self._holders.random(), lambda: self._all_leave(until_s))

    def _all_leave(self, until_s: float) -> None:
        """All come back within a second: what has no values is at nobody then."""
        is_late = self.calamities.is_calm or self.world.now_s > until_s
        if is_late or self.plan.replica_count > 1:
            return
        if self.lost() & self.scheduler.view.living_servers or len(self.living) < 2:
            self.world.after(LOOK_S, lambda: self._all_leave(until_s))
            return
        self.world.say("ALL LEAVE")
        self.world.counts["all left at once"] += 1
        for dead in [self.crash(server) for server in self.living]:
            self._say_goodbye_of(dead)
            come_s = self._holders.random()
            self.world.after(come_s, lambda dead=dead: self._come_with_log(dead))  # type: ignore[misc]

    def _say_goodbye_of(self, server: LoggedServer) -> None:
        """SIGTERM told it to stop, and it has no values, or its log has them."""
        session = self._identities_of[server.node_id]
        with self._no_answer_for(session):
            left = self.scheduler.deregister(session, "told to stop", self.world.now_s)
            self._publish(left.transitions)

    def _come_after_placement(
        self, dead: LoggedServer, epochs: dict[RangeId, AssignmentEpoch], until_s: float
    ) -> None:
        """It comes when one of the ranges that it had was placed anew, or at a time."""
        ranges = self.scheduler.view.ranges
        is_placed = any(ranges[r].placed_epoch > epoch for r, epoch in epochs.items())
        if not (is_placed or self.calamities.is_calm or self.world.now_s > until_s):
            again = LOOK_S * self._holders.random()
            self.world.after(again, lambda: self._come_after_placement(dead, epochs, until_s))
            return
        self.world.counts["came when it was placed anew"] += is_placed
        self._come_with_log(dead)

    def _come_instead(self, dead: LoggedServer, until_s: float) -> None:
        """A server with a log of its own comes to the address, when the other is missed."""
        member = self.scheduler._state.members[dead.node_id]
        address = member.registration.address
        if self.calamities.is_calm or self.world.now_s > until_s or self._is_taken(address, dead):
            return
        if member.node.state is NodeState.ALIVE:
            self.world.after(LOOK_S, lambda: self._come_instead(dead, until_s))
            return
        log = SimLog(self.world, len(self.logs))
        self.logs.append(log)
        asking = Registration(
            bytes([100 + len(self.servers)]) * 16,
            Role.SERVER,
            address,
            kernel_fingerprint="sim",
            update_log=UpdateLogClaim(log.log_id),
        )
        self.come_with(log, self.scheduler.register(asking, self.world.now_s))

    def _is_taken(self, address: str, dead: LoggedServer) -> bool:
        """Whether another server is at the address of one that is dead."""
        return any(
            node.address == address
            and node.role is Role.SERVER
            and node.node_id != dead.node_id
            and node.state is not NodeState.LEFT
            for node in self.scheduler.view.nodes
        )

    def address_again(self, dead: LoggedServer) -> str:
        """Where it comes: another may be where it was."""
        address = super().address_again(dead)
        return f"sim:{3000 + len(self.servers)}" if self._is_taken(address, dead) else address

    def _reboots(self, log: SimLog) -> bool:
        """Whether its machine was started again: others that live have what it has of values."""
        if log not in self._rebooting and self._boots.random() >= 0.1:
            return False
        self._rebooting.discard(log)
        had = {
            server.node_id
            for server in self.servers.values()
            if isinstance(server, LoggedServer) and server.log is log
        }
        begins, lost = log.begins(), self.lost()
        return all(
            any(n not in lost and self.watch.has(self.servers[n], r.range_id) for n in r.in_sync)
            for r in self.ranges_to_keep()
            if r.range_id in begins or had.intersection(r.in_sync)
        )

    def come_with(self, log: SimLog, decision: Decision[Session]) -> None:
        super().come_with(log, decision)
        mine = decision.reply.node_id
        given = {r.range_id for r in self.scheduler.view.ranges if r.primary == mine}
        self._awaited -= given

    def see_first(self, server: ReplicatedServer, view: ClusterView) -> None:
        """Often nothing, until ranges of its log that have no primary are placed anew."""
        replicas = server.replication.replicas
        is_unplaced = any(r.primary is None and r.range_id in replicas for r in view.ranges)
        if not is_unplaced or self.calamities.is_calm or self._holders.random() >= _UNSEEN:
            super().see_first(server, view)
            return
        self.world.counts["got no view at first"] += 1
        self._hear_nothing(server, _UNSEEN_S)
        self._begin_run()

    def _hear_nothing(self, server: ReplicatedServer, most_s: float) -> None:
        """Of the scheduler, for a while."""
        for_s = most_s * (0.3 + 0.7 * self._holders.random())
        self.calamities._cut([(SCHEDULER, server.node_id)], for_s)

    # --- ranges that are placed anew

    def _begin_another(self, primary: ReplicatedServer) -> None:
        super()._begin_another(primary)
        living = [server for server in self.living if server is not primary]
        if living and not self.calamities.is_calm and self._holders.random() < 0.5:
            self._hear_nothing(self._holders.choice(living), _UNHEARD_S)

    def _are_too_many_dead(self) -> bool:
        """Without replicas who is dead brings its log, which has nothing of what is placed."""
        return self.plan.replica_count > 1 and super()._are_too_many_dead()

    def _has_it(self, assignment: RangeAssignment) -> bool:
        is_brought = self.plan.replica_count == 1 and assignment.primary in self.lost()
        return is_brought or super()._has_it(assignment)

    def withheld_in(self, log: SimLog) -> set[RangeId]:
        """A log keeps what nobody needs of a range where no view tells: it was placed anew since,
        and the primary that lives has come with the log of one that began it.
        """
        ranges = self.scheduler.view.ranges
        came = {r.range_id for r in ranges if r.assignment_epoch == r.term > r.placed_epoch}
        in_vain = {r for r in log.withheld & came if log._is_of_before(r)}
        self.world.counts["withheld in vain"] += bool(in_vain)
        return log.withheld - in_vain

    def _were_placed(self, anew: Sequence[RangeAssignment]) -> None:
        """A server at which one is placed dies before its log has that it began, or soon after."""
        draw = self._holders
        found = [
            server
            for each in anew
            if each.primary is not None
            and isinstance(server := self.servers[each.primary], LoggedServer)
            and not server.is_dead
        ]
        if not found or self.calamities.is_calm or draw.random() >= _STRUCK:
            return
        server, at_s = draw.choice(found), VIEW_DELAY_S * draw.random()
        if draw.random() < _STALLED and server.log.is_well:
            self.world.counts["disks stalled"] += 1
            self.stalls._stall(server)
            at_s += VIEW_DELAY_S * draw.random()
        placed = {r.range_id: r.placed_epoch for r in anew if r.primary == server.node_id}
        self.world.after(at_s, lambda: self._kill_placed(server, placed))

    def _kill_placed(self, server: LoggedServer, placed: dict[RangeId, AssignmentEpoch]) -> None:
        if self.calamities.is_calm or server.is_dead or not self.may_lose(server, for_good=True):
            return
        begun = {
            frame.range_id
            for frame in server.log.frames
            if frame.kind == "begin"
            and frame.range_id in placed
            and frame.assignment_epoch >= placed[frame.range_id]
        }
        self.world.counts["killed before BEGIN was written"] += placed.keys() > begun
        self.world.say(f"KILLED server {server.node_id}, at which {sorted(placed)} were placed")
        self.kill(server)


@pytest.mark.timeout(300)
def test_no_log_brings_back_what_was_removed_or_is_waited_for(sim_seeds: tuple[int, ...]) -> None:
    """Whoever comes with one, and when."""
    run_seeds(EmptiedLogSimulation, sim_seeds[:1])
