"""The kinds of simulation, by name."""

from __future__ import annotations

from tests.sim.scheduled import ScheduledSimulation
from tests.sim.test_batches import BatchReplacementSimulation, BatchSimulation
from tests.sim.test_crashes import CrashSimulation
from tests.sim.test_departures import (
    DepartureAwaySimulation,
    DepartureLogSimulation,
    DepartureReplacementSimulation,
    DepartureRestoreSimulation,
    DepartureSimulation,
)
from tests.sim.test_disagreements import DisagreeingSimulation
from tests.sim.test_effects import EffectSimulation
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_growth import (
    GrowthHandOverSimulation,
    GrowthRestartSimulation,
    GrowthSimulation,
)
from tests.sim.test_hand_overs import (
    HandOverDepartureSimulation,
    HandOverReplacementSimulation,
    HandOverRestartSimulation,
    HandOverSimulation,
)
from tests.sim.test_in_turn import (
    InTurnNewcomerSimulation,
    InTurnReplacementSimulation,
    InTurnRestartSimulation,
    InTurnRestoreSimulation,
)
from tests.sim.test_lanes import LaneSimulation
from tests.sim.test_late_joins import LateJoinRestartSimulation, LateJoinSimulation
from tests.sim.test_late_tables import LateTableSimulation
from tests.sim.test_loads import LoadSimulation
from tests.sim.test_logs import LogSimulation
from tests.sim.test_logs_beside import LogRestartSimulation, LogRestoreSimulation
from tests.sim.test_loops import LoopSimulation
from tests.sim.test_mixed import (
    MixedDepartureSimulation,
    MixedEmptiedSimulation,
    MixedInTurnSimulation,
    MixedLogSimulation,
    MixedReplacementSimulation,
    MixedRestartSimulation,
    MixedRestoreSimulation,
    MixedRunSimulation,
    MixedTableSimulation,
)
from tests.sim.test_newcomers import NewcomerSimulation
from tests.sim.test_passed_clocks import PassedClockSimulation
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_restores import RestoreSimulation
from tests.sim.test_restores_kept import KeptRestoreSimulation
from tests.sim.test_restores_unreadable import (
    UnreadableLogRestoreSimulation,
    UnreadableRestoreSimulation,
)
from tests.sim.test_runs import RunAwaySimulation, RunSimulation
from tests.sim.test_runs_beside import (
    RunDepartureSimulation,
    RunLogSimulation,
    RunRestoreSimulation,
)
from tests.sim.test_runs_emptied import (
    EmptiedRestartSimulation,
    EmptiedRestoreSimulation,
    EmptiedSimulation,
)
from tests.sim.test_runs_emptied_logs import EmptiedLogSimulation
from tests.sim.test_scheduler_away import AwaySimulation
from tests.sim.test_scheduler_restarts import (
    LongRestartSimulation,
    RestartSimulation,
    SumRestartSimulation,
)
from tests.sim.test_sealed_together import TogetherSimulation
from tests.sim.test_shared_data import ShardRestoreSimulation, ShardSimulation
from tests.sim.test_simulation import Simulation
from tests.sim.test_sleepers import (
    SleepingNewcomerSimulation,
    SleepingReplacementSimulation,
    SleepingRestoreSimulation,
)
from tests.sim.test_sums_restored import SumLogSimulation, SumRestoreSimulation
from tests.sim.test_two_lost import TwoLostSimulation

KINDS: dict[str, type[Simulation]] = {
    "steps": Simulation,
    "changes": ScheduledSimulation,
    "crashes": CrashSimulation,
    "newcomers": NewcomerSimulation,
    "failover": FailoverSimulation,
    "handovers": HandOverSimulation,
    "handovers-replacements": HandOverReplacementSimulation,
    "handovers-starts": HandOverRestartSimulation,
    "handovers-departures": HandOverDepartureSimulation,
    "away": AwaySimulation,
    "starts": RestartSimulation,
    "starts-more": LongRestartSimulation,
    "starts-sums": SumRestartSimulation,
    "logs": LogSimulation,
    "starts-logs": LogRestartSimulation,
    "restores-logs": LogRestoreSimulation,
    "tables": LateTableSimulation,
    "effects": EffectSimulation,
    "pairs": TwoLostSimulation,
    "replacements": ReplacementSimulation,
    "loads": LoadSimulation,
    "runs": RunSimulation,
    "runs-away": RunAwaySimulation,
    "runs-logs": RunLogSimulation,
    "runs-departures": RunDepartureSimulation,
    "runs-restores": RunRestoreSimulation,
    "runs-emptied": EmptiedSimulation,
    "runs-emptied-starts": EmptiedRestartSimulation,
    "runs-emptied-restores": EmptiedRestoreSimulation,
    "runs-emptied-logs": EmptiedLogSimulation,
    "loops": LoopSimulation,
    "disagreements": DisagreeingSimulation,
    "lanes": LaneSimulation,
    "restores": RestoreSimulation,
    "restores-unreadable": UnreadableRestoreSimulation,
    "restores-unreadable-logs": UnreadableLogRestoreSimulation,
    "departures": DepartureSimulation,
    "departures-away": DepartureAwaySimulation,
    "departures-logs": DepartureLogSimulation,
    "departures-replacements": DepartureReplacementSimulation,
    "departures-restores": DepartureRestoreSimulation,
    "starts-restores": KeptRestoreSimulation,
    "passed-clocks": PassedClockSimulation,
    "together": TogetherSimulation,
    "sleepers": SleepingNewcomerSimulation,
    "sleepers-replaced": SleepingReplacementSimulation,
    "sleepers-restores": SleepingRestoreSimulation,
    "in-turn": InTurnNewcomerSimulation,
    "in-turn-replaced": InTurnReplacementSimulation,
    "in-turn-starts": InTurnRestartSimulation,
    "in-turn-restores": InTurnRestoreSimulation,
    "growth": GrowthSimulation,
    "growth-starts": GrowthRestartSimulation,
    "growth-handovers": GrowthHandOverSimulation,
    "tables-joins": LateJoinSimulation,
    "tables-starts": LateJoinRestartSimulation,
    "batches": BatchSimulation,
    "batches-replacements": BatchReplacementSimulation,
    "shards": ShardSimulation,
    "shards-restores": ShardRestoreSimulation,
    "logs-sums": SumLogSimulation,
    "restores-sums": SumRestoreSimulation,
    "mixed-replacements": MixedReplacementSimulation,
    "mixed-starts": MixedRestartSimulation,
    "mixed-restores": MixedRestoreSimulation,
    "mixed-runs": MixedRunSimulation,
    "mixed-logs": MixedLogSimulation,
    "mixed-departures": MixedDepartureSimulation,
    "mixed-emptied": MixedEmptiedSimulation,
    "mixed-tables": MixedTableSimulation,
    "mixed-in-turn": MixedInTurnSimulation,
}

SHARES = {
    "steps": 5,
    "changes": 5,
    "crashes": 5,
    "newcomers": 5,
    "failover": 1,
    "handovers": 2,
    "handovers-replacements": 10,
    "handovers-starts": 10,
    "handovers-departures": 10,
    "away": 2,
    "starts": 3,
    "starts-more": 10,
    "starts-sums": 10,
    "logs": 4,
    "starts-logs": 10,
    "restores-logs": 10,
    "tables": 5,
    "effects": 5,
    "pairs": 5,
    "replacements": 4,
    "loads": 5,
    "runs": 4,
    "runs-away": 4,
    "runs-logs": 10,
    "runs-departures": 10,
    "runs-restores": 10,
    "runs-emptied": 10,
    "runs-emptied-starts": 10,
    "runs-emptied-restores": 10,
    "runs-emptied-logs": 10,
    "loops": 4,
    "disagreements": 10,
    "lanes": 10,
    "restores": 5,
    "restores-unreadable": 10,
    "restores-unreadable-logs": 10,
    "departures": 4,
    "departures-away": 4,
    "departures-logs": 10,
    "departures-replacements": 10,
    "departures-restores": 10,
    "starts-restores": 10,
    "passed-clocks": 10,
    "together": 5,
    "sleepers": 5,
    "sleepers-replaced": 5,
    "sleepers-restores": 10,
    "in-turn": 3,
    "in-turn-replaced": 3,
    "in-turn-starts": 5,
    "in-turn-restores": 5,
    "growth": 10,
    "growth-starts": 10,
    "growth-handovers": 10,
    "tables-joins": 10,
    "tables-starts": 10,
    "batches": 10,
    "batches-replacements": 10,
    "shards": 4,
    "shards-restores": 10,
    "logs-sums": 10,
    "restores-sums": 10,
    "mixed-replacements": 5,
    "mixed-starts": 5,
    "mixed-restores": 5,
    "mixed-runs": 5,
    "mixed-logs": 5,
    "mixed-departures": 5,
    "mixed-emptied": 10,
    "mixed-tables": 10,
    "mixed-in-turn": 10,
}
"""Every how many-th seed of `make sim` is run: what servers do is what takes most finding."""
