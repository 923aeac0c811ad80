"""The deliberate bugs that the simulations must see, by the rule of SEMANTICS that each breaks.

A bug that no oracle sees is a gap in the simulation: mend that, and leave the bug here.
"""

from __future__ import annotations

from tests.sim.beside_mutants import BESIDE_MUTANTS
from tests.sim.departure_mutants import DEPARTURE_MUTANTS
from tests.sim.edit_mutants import EDIT_MUTANTS
from tests.sim.given_mutants import GIVEN_MUTANTS
from tests.sim.hand_over_mutants import HAND_OVER_MUTANTS
from tests.sim.held_mutants import HELD_MUTANTS
from tests.sim.journal_mutants import JOURNAL_MUTANTS
from tests.sim.log_mutants import LOG_MUTANTS
from tests.sim.mutation import Mutant
from tests.sim.place_mutants import PLACE_MUTANTS
from tests.sim.replacement_mutants import REPLACEMENT_MUTANTS
from tests.sim.replication_mutants import REPLICATION_MUTANTS
from tests.sim.restore_mutants import RESTORE_MUTANTS
from tests.sim.row_mutants import ROW_MUTANTS
from tests.sim.run_separation_mutants import RUN_SEPARATION_MUTANTS
from tests.sim.shard_mutants import SHARD_MUTANTS
from tests.sim.work_mutants import WORK_MUTANTS

_STEPS = ("steps", "changes")
_FAILOVER = ("failover",)
_TRAINED = ("changes", "crashes", "newcomers")
_CHECKPOINTS = "scheduler/machine/checkpoints.py"
_LEDGER = "ps_core/ledger.py"
_WINDOW = "ps_worker/window/push_window.py"
_GATE = "ps_server/ranges/update_gate.py"
_RULES = "ps_server/ranges/range_machine.py"
_DISAGREEMENTS = ("disagreements",)
_LANES = ("lanes",)
_READS = "ps_server/ranges/read_gate.py"
_SCHEDULE = "ps_server/ranges/schedule.py"
_RANGE = "ps_server/ranges/range_machine.py"
_SERVER = "ps_server/ranges/server_machine.py"

_ONE_TABLE = (
    Mutant(
        "a mean divides by those who skipped too",
        "S1",
        "ps_server/ranges/events.py",
        "return len([each for each in self.contributors if not each.skip])",
        "return len(self.contributors)",
        _STEPS,
    ),
    Mutant(
        "a worker's own scale is lost",
        "S1",
        "ps_server/ranges/aggregation.py",
        "step.clock, terms.contribution_scale",
        "step.clock, 1.0",
        _STEPS,
    ),
    Mutant(
        "a worker's weight is at least a half",
        "S1",
        "ps_server/ranges/aggregation.py",
        "step.clock, terms.contribution_scale",
        "step.clock, max(terms.contribution_scale, 0.5)",
        _STEPS,
    ),
    Mutant(
        "a leader's mean counts once",
        "S21",
        "ps_server/ranges/aggregation.py",
        "step.clock, terms.contribution_scale",
        "step.clock, min(terms.contribution_scale, 1.0)",
        (*_STEPS, "failover"),
    ),
    Mutant(
        "the momentum of outer steps does not look ahead",
        "S12",
        "ps_server/values/optimizers.py",
        'getattr(spec, name) for name in ("maximize", *self.flags)}',
        'getattr(spec, name) and name != "nesterov" for name in ("maximize", *self.flags)}',
        _STEPS,
    ),
    Mutant(
        "a block that nobody pushed has another version",
        "S12",
        "ps_server/ranges/aggregation.py",
        "        for block in record.blocks:\n            state.versions[block] += 1",
        "        for block in state.versions:\n            state.versions[block] += 1",
        _STEPS,
    ),
    Mutant(
        "a tensor without a gradient takes a step",
        "S1",
        "ps_server/values/optimizers.py",
        "here = np.ones(len(steps), dtype=np.bool_) if present is None else present",
        "here = np.ones(len(steps), dtype=np.bool_)",
        _STEPS,
    ),
    Mutant(
        "a gradient is corrected for what its worker had seen",
        "S1",
        "ps_server/values/delay_compensation.py",
        "torch.sub(head(state.values, length), head(kept, length), out=change)",
        "torch.sub(head(kept, length), head(state.values, length), out=change)",
        _STEPS,
    ),
    Mutant(
        "what is lent is not copied before its slot is given back",
        "S3",
        "ps_server/values/shard_store.py",
        "is_owned = is_shared or codec is not self._codec or not view.readonly",
        "is_owned = codec is not self._codec or not view.readonly",
        _STEPS,
    ),
    Mutant(
        "workers that disagree about a rate make an update",
        "S4",
        _RULES,
        "            if theirs != mine and theirs and mine:",
        "            if False:",
        _DISAGREEMENTS,
    ),
    Mutant(
        "a seal says another rate than its eager pushes",
        "S4",
        _RULES,
        "if step.eager is not None and not terms.skip and step.eager != mine:",
        "if False:",
        _DISAGREEMENTS,
    ),
    Mutant(
        "an empty sum is none",
        "S12",
        "ps_server/ranges/aggregation.py",
        "if record.blocks or state.table.spec.optimizer.kind is OptimizerKind.AGGREGATE:",
        "if record.blocks:",
        _STEPS,
    ),
    Mutant(
        "no sum is kept",
        "S12",
        "ps_server/values/update_arithmetic.py",
        "for old in [kept for kept in self._sums if kept <= clock - _KEPT_SUM_COUNT]:",
        "for old in [kept for kept in self._sums if kept]:",
        _STEPS,
    ),
    Mutant(
        "the highest sequence instead of a ledger",
        "S2",
        _LEDGER,
        "return 0 < sequence <= self.low_water or sequence in self._endings",
        "return 0 < sequence <= max(self._endings, default=self.low_water)",
        _STEPS,
    ),
    Mutant(
        "a resend is taken as new",
        "S2",
        _RANGE,
        "            if worker.ledger.has_ended(event.sequence):\n                self.resent",
        "            if event.sequence in worker.ledger._endings:\n                self.resent",
        _STEPS,
    ),
    Mutant(
        "a replaced push counts beside the one that replaces it",
        "S2",
        _RANGE,
        "            self.state.drop_push(step, worker, event.replaces)",
        "            pass",
        _STEPS,
    ),
    Mutant(
        "a clock is left out on one table alone",
        "S7",
        "ps_worker/steps/steps.py",
        "    return (count,) * len(missed_counts)",
        "    return tuple(max(count, missed) for missed in missed_counts)",
        ("changes", "failover"),
    ),
    Mutant(
        "room goes to who came first",
        "S3",
        "ps_server/ranges/staging_memory.py",
        "for other in sorted((s for s in self._staged if s > step), reverse=True):",
        "for other in ():",
        _STEPS,
    ),
    Mutant(
        "what was received survives a move",
        "S3",
        _WINDOW,
        "if entry.state in (_SENT, _RECEIVED):",
        "if entry.state is _SENT:",
        _FAILOVER,
    ),
    Mutant(
        "a seal overtakes its pushes at the server",
        "S4",
        _GATE,
        "            if number not in held and not ledger.has_ended(number):\n"
        "                return False",
        "            pass",
        _STEPS,
    ),
    Mutant(
        "a seal leaves before its pushes were received",
        "S4",
        _WINDOW,
        "return self.terms is not None and not self.awaited",
        "return self.terms is not None",
        _STEPS,
    ),
    Mutant(
        "steps that are sealed together part",
        "S4",
        _WINDOW,
        "self._release(step.together or (step,))",
        "self._release((step,))",
        ("together",),
    ),
    Mutant(
        "an invalid push leaves half a step behind",
        "S4",
        _GATE,
        "        problem = None if step.skip else self._step_problem(step, seal, invalid)",
        "        step.skip = seal.terms.skip\n        problem = None",
        _STEPS,
    ),
    Mutant(
        "an update is scaled by what one range told",
        "S4",
        "ps_server/ranges/update_scales.py",
        "        found[clock] = squares\n",
        "        found[clock] = squares[:1]\n",
        _STEPS,
    ),
    Mutant(
        "a sum of nothing stays when its scale is said",
        "S4",
        _GATE,
        "        out.append(Apply(record) if record.blocks else Drop(record))\n",
        "        if record.blocks:\n            out.append(Apply(record))\n",
        _FAILOVER,
    ),
    Mutant(
        "a read does not wait for its own step",
        "S5",
        _READS,
        "        if self._done_clock(event) < clock:\n            return False\n",
        "",
        _STEPS,
    ),
    Mutant(
        "the bound of staleness is one too wide",
        "S5",
        _READS,
        "state.clock >= clock - setting.staleness",
        "state.clock >= clock - setting.staleness - 1",
        _STEPS,
    ),
    Mutant(
        "a consistent read is torn: an eager step is in it",
        "S5",
        _READS,
        "        if max(clock, state.changed_clock) <= event.clock:\n",
        "        if clock <= event.clock:\n",
        ("changes", "steps"),
    ),
    Mutant(
        "a consistent read is torn: the cut holds nothing",
        "S5",
        _SCHEDULE,
        "if self._cuts and any(clock > cut.clock for cut in self._cuts.values()):",
        "if False:",
        _STEPS,
    ),
    Mutant(
        "a copy counts though its block has changed",
        "S5",
        "ps_core/sequence_locks.py",
        "    np.copyto(target, values)\n    return int(locks[number]) == lock",
        "    is_same = int(locks[number]) == lock\n    np.copyto(target, values)\n"
        "    return is_same",
        _LANES,
    ),
    Mutant(
        "a block that has changed has the sequence lock that it had",
        "S5",
        "ps_core/sequence_locks.py",
        "        locks[number] = lock + 1\n\n\ndef _overlap",
        "        locks[number] = lock - 1\n\n\ndef _overlap",
        _LANES,
    ),
    Mutant(
        "what is promised is not held",
        "S6",
        _SCHEDULE,
        "return self.hold_point is not None and clock > self.hold_point",
        "return False",
        ("changes",),
    ),
    Mutant(
        "a change is after what one server reached",
        "S6",
        "scheduler/machine/changes.py",
        "after_clock = max(proposal.clocks.values(), default=clock)",
        "after_clock = clock",
        ("changes", "newcomers"),
    ),
    Mutant(
        "a change is committed before all have promised",
        "S6",
        "scheduler/machine/changes.py",
        "        if proposal.missing or change.checkpoint:",
        "        if change.checkpoint:",
        ("changes", "newcomers"),
    ),
    Mutant(
        "a clock of BSP that nobody is in is left out, and not passed",
        "S6",
        _GATE,
        "state.schedule.up_to_bsp(clock, state.slowest_clock())",
        "state.slowest_clock()",
        ("passed-clocks",),
    ),
    Mutant(
        "a late joiner is waited for from the first clock",
        "S6",
        _RANGE,
        "worker.sealed_clock = worker.done_clock = worker.joined_clock = join.after_clock",
        "worker.joined_clock = join.after_clock",
        ("newcomers", "crashes"),
    ),
    Mutant(
        "a late joiner reads before it has joined everywhere",
        "S6",
        _READS,
        "        if state.schedule.holds_reads(clock + 1) or self._is_joining(event):",
        "        if state.schedule.holds_reads(clock + 1):",
        ("newcomers", "crashes"),
    ),
    Mutant(
        "the dead are not fenced",
        "S6",
        _SERVER,
        "        if incarnation in self._ended:\n            raise Fenced",
        "        if False:\n            raise Fenced",
        ("crashes", "newcomers"),
    ),
    Mutant(
        "what the dead had not sealed counts",
        "S6",
        _GATE,
        "        self.leave_unsealed(worker, out)\n        if not self._state.initialized:",
        "        if not self._state.initialized:",
        ("crashes", "newcomers"),
    ),
    Mutant(
        "a checkpoint is cut after the lowest clock that servers hold",
        "S10",
        "scheduler/machine/changes.py",
        "return None if proposal.missing else max(proposal.clocks.values(), default=0)",
        "return None if proposal.missing else min(proposal.clocks.values(), default=0)",
        _TRAINED,
    ),
    Mutant(
        "a checkpoint is cut wherever its workers are",
        "S10",
        _CHECKPOINTS,
        "max(clock or 0, *named, 0)",
        "clock or 0",
        _TRAINED,
    ),
    Mutant(
        "a checkpoint is cut before all servers have promised",
        "S10",
        _CHECKPOINTS,
        "if attempt.awaited or any(clock is None for clock in held.values()):",
        "if attempt.awaited:",
        _TRAINED,
    ),
    Mutant(
        "a checkpoint is cut before all workers have answered",
        "S10",
        _CHECKPOINTS,
        "if attempt.awaited or any(clock is None for clock in held.values()):",
        "if any(clock is None for clock in held.values()):",
        _TRAINED,
    ),
    Mutant(
        "what is cut for a checkpoint goes on by a clock",
        "S10",
        _SCHEDULE,
        "held = Cut(cut.after_clock, now_s + limits.CHECKPOINT_CUT_S)",
        "held = Cut(cut.after_clock + 1, now_s + limits.CHECKPOINT_CUT_S)",
        _TRAINED,
    ),
    Mutant(
        "what has no room for copies goes on by a clock",
        "S10",
        _SCHEDULE,
        "        self._cuts[cut_id] = Cut(clock, deadline_s)",
        "        self._cuts[cut_id] = Cut(clock + 1, deadline_s)",
        _TRAINED,
    ),
    Mutant(
        "a range is captured before it has come to the cut",
        "S10",
        _READS,
        "return not event.consistent or state.clock >= event.clock",
        "return not event.consistent or state.clock >= event.clock - 1",
        _TRAINED,
    ),
    Mutant(
        "a cut that was given up is held",
        "S10",
        _SCHEDULE,
        "for cut_id in [c for c in self._cuts if c[0] == _CHECKPOINTS and c != wanted]:",
        "for cut_id in ():",
        _TRAINED,
    ),
    Mutant(
        "whether a range is torn is asked when its setting is forgotten",
        "S10",
        _SCHEDULE,
        "return self._torn_for == cut.checkpoint",
        "return self.at(cut.after_clock).mode is Mode.ASP",
        _TRAINED,
    ),
    Mutant(
        "who was too late is told that it took part",
        "S7",
        "ps_server/ranges/aggregation.py",
        "Ending(Outcome.DISCARDED, past, squares",
        "Ending(Outcome.APPLIED, past, squares",
        _STEPS,
    ),
    Mutant(
        "a worker is not told which blocks were too late",
        "S7",
        _WINDOW,
        "                step.discarded_blocks.add(entry.block)",
        "                pass",
        _STEPS,
    ),
    Mutant(
        "numbers of int8 are twice what they are",
        "S3",
        "ps_core/codecs/int8_passes.py",
        "    return np.repeat(of_groups, SCALED_GROUP_COUNT)[:count]",
        "    return np.repeat(of_groups * 2, SCALED_GROUP_COUNT)[:count]",
        _STEPS,
    ),
    Mutant(
        "a block of low rank begins with the first column of its matrix",
        "S3",
        "ps_core/codecs/low_rank_passes.py",
        "            begin = row * columns - first",
        "            begin = row * columns",
        _STEPS,
    ),
    Mutant(
        "one more is left behind than may be",
        "S7",
        "ps_server/ranges/aggregation.py",
        "ready_count < len(members) - setting.backup_workers:",
        "ready_count < len(members) - setting.backup_workers - 1:",
        _STEPS,
    ),
)

MUTANTS = (
    _ONE_TABLE
    + REPLICATION_MUTANTS
    + HAND_OVER_MUTANTS
    + LOG_MUTANTS
    + PLACE_MUTANTS
    + REPLACEMENT_MUTANTS
    + RESTORE_MUTANTS
    + DEPARTURE_MUTANTS
    + WORK_MUTANTS
    + EDIT_MUTANTS
    + HELD_MUTANTS
    + JOURNAL_MUTANTS
    + RUN_SEPARATION_MUTANTS
    + ROW_MUTANTS
    + SHARD_MUTANTS
    + GIVEN_MUTANTS
    + BESIDE_MUTANTS
)
