"""The deliberate bugs of replication: of what others must have first, of who may serve, and of what
moves with a range (S8, S9, and the other rules where a range moves).
"""

from __future__ import annotations

from tests.sim.mutation import Mutant

_FAILOVER = ("failover",)
_SCHEDULE = "ps_server/schedule.py"
_SERVER = "ps_server/server_machine.py"
_LOG = "ps_server/range_log.py"
_REPLICA = "ps_server/replica.py"
_PRIMARY = "ps_server/primary.py"
_REPLICATION = "ps_server/replication.py"
_OUTPUT = "ps_server/output_commit.py"
_COPY = "ps_server/part_copy.py"
_CONFIGURATIONS = "scheduler/configurations.py"

REPLICATION_MUTANTS = (
    Mutant(
        "the ledger does not move",
        "S2",
        _COPY,
        "            if not ledger.has_ended(sequence):  # else it was answered again",
        "            if False:",
        _FAILOVER,
    ),
    Mutant(
        "commit before replication",
        "S8",
        _LOG,
        "        held = min(self._acked.values(), default=self.number)",
        "        held = self.number",
        _FAILOVER,
    ),
    Mutant(
        "one backup's word is enough",
        "S8",
        _LOG,
        "        held = min(self._acked.values(), default=self.number)",
        "        held = max(self._acked.values(), default=self.number)",
        _FAILOVER,
    ),
    Mutant(
        "who joins does not count before it is configured",
        "S8",
        _LOG,
        "        held = min(self._acked.values(), default=self.number)",
        "        configured = list(self._acked.values())[: self._configured_count]\n"
        "        held = min(configured, default=self.number)",
        _FAILOVER,
    ),
    Mutant(
        "a silent backup does not count before the scheduler says so",
        "S8",
        _PRIMARY,
        "            self._asked = self._in_question = wanted\n",
        "            self._asked = self._in_question = wanted\n"
        "            for gone in set(log.backups) - wanted:\n"
        "                del log._acked[gone]\n",
        _FAILOVER,
    ),
    Mutant(
        "the tenure of a batch is not checked",
        "S8",
        _REPLICA,
        "batch.assignment_epoch >= self.assignment_epoch and batch.tenure == self.tenure",
        "batch.assignment_epoch >= self.assignment_epoch",
        _FAILOVER,
    ),
    Mutant(
        "the epoch of a request is not checked",
        "S8",
        _CONFIGURATIONS,
        "is_present = (old.primary, old.assignment_epoch) == (primary, wish.assignment_epoch)",
        "is_present = old.primary == primary",
        _FAILOVER,
    ),
    Mutant(
        "no lease is needed",
        "S8",
        _LOG,
        "        return now_s < since_s + self._lease_s",
        "        return True",
        _FAILOVER,
    ),
    Mutant(
        "a lease counts from its answer",
        "S8",
        _PRIMARY,
        "self.log.granted(backup, sent_s)",
        "self.log.granted(backup, now_s)",
        _FAILOVER,
    ),
    Mutant(
        "one backup's grant is enough",
        "S8",
        _LOG,
        "        since_s = min((self._granted_s.get(b, -math.inf) for b in self._acked), default",
        "        since_s = max((self._granted_s.get(b, -math.inf) for b in self._acked), default",
        _FAILOVER,
    ),
    Mutant(
        "one that is promoted grants on, and waits on",
        "S8",
        _REPLICA,
        "        if assignment_epoch < self.assignment_epoch or self.is_promoted:",
        "        if False:",
        _FAILOVER,
    ),
    Mutant(
        "one that is promoted grants on, and does not wait for it",
        "S8",
        _REPLICA,
        "        if assignment_epoch < self.assignment_epoch or self.is_promoted:\n"
        "            return False\n",
        "        if self.is_promoted:\n            return True\n",
        _FAILOVER,
    ),
    Mutant(
        "the last grant is not waited out",
        "S8",
        _REPLICA,
        "        return self._granted_s + self._lease_s * (1.0 + MAX_DRIFT)",
        "        return -math.inf",
        _FAILOVER,
    ),
    Mutant(
        "a clock stands still while its server is paused",
        "S8",
        "tests/sim/replicated.py",
        "return self._clock.read(self.world.now_s)",
        "return self._clock.read(self.world.now_s - self.paused_s)",
        _FAILOVER,
    ),
    Mutant(
        "sums are not sent",
        "S8",
        _OUTPUT,
        "into.changes.append(Kept(record, self._sums.kept(record)))",
        "into.changes.append(Kept(record, ()))",
        _FAILOVER,
    ),
    Mutant(
        "a read shows what is not committed",
        "S8",
        _LOG,
        "            self._entries.append(_Entry(self.number, None, effects))",
        "            self._entries.appendleft(_Entry(0, None, effects))",
        _FAILOVER,
    ),
    Mutant(
        "a gap in the batches is passed over",
        "S8",
        _REPLICA,
        "        if batch.number != self.number + 1:",
        "        if batch.number <= self.number:",
        _FAILOVER,
    ),
    Mutant(
        "a promise is made before the backups have it",
        "S6",
        _OUTPUT,
        "untold = {table_id for table_id, _ in self._untold}",
        "untold: set[TableId] = set()",
        _FAILOVER,
    ),
    Mutant(
        "what was promised is not moved",
        "S6",
        _SCHEDULE,
        "self.number, self._promised, self.hold_clock = number, promised, hold_clock",
        "self.number = number",
        _FAILOVER,
    ),
    Mutant(
        "which reads were answered is forgotten",
        "S6",
        _COPY,
        "state.read_clock = done_clock + 1 if held is None else min(done_clock + 1, held)",
        "pass",
        _FAILOVER,
    ),
    Mutant(
        "where no worker was heard yet nothing is settled",
        "S6",
        _OUTPUT,
        "        for place, part in self._machine.parts.items():\n            if self._replication",
        "        for place, part in self._machine.parts.items():\n"
        "            if not part.state.workers or self._replication",
        _FAILOVER,
    ),
    Mutant(
        "a goodbye is lost",
        "S6",
        _COPY,
        "left = None if worker.holds_last_seal else worker.left_clock",
        "left = None",
        _FAILOVER,
    ),
    Mutant(
        "a new primary waits for the dead",
        "S6",
        _SERVER,
        "            for node in self._ended.values():\n"
        "                effects += part.ended(node, now_s)\n",
        "            pass\n",
        _FAILOVER,
    ),
    Mutant(
        "a seal that formed nothing is moved",
        "S9",
        _COPY,
        "    sealed = min(worker.sealed_clock, worker.done_clock)\n",
        "    sealed = worker.sealed_clock\n",
        _FAILOVER,
    ),
    Mutant(
        "versions do not move",
        "S9",
        _COPY,
        "            self.versions[block] += 1",
        "            pass",
        _FAILOVER,
    ),
    Mutant(
        "whose updates they were does not move",
        "S9",
        _COPY,
        "                    own_updates[block] = own_updates.get(block, 0) + 1",
        "                    pass",
        _FAILOVER,
    ),
    Mutant(
        "a snapshot without what is held",
        "S9",
        _REPLICATION,
        "held = tuple(effect for effect in log.held if isinstance(effect, Change))",
        "held: tuple[Change, ...] = ()",
        _FAILOVER,
    ),
    Mutant(
        "an update names a kept sum that a joiner does not have",
        "S9",
        _OUTPUT,
        "                into.changes.append(Put(record, None if is_kept else total))",
        "                into.changes.append(Put(record, None))",
        _FAILOVER,
    ),
    Mutant(
        "what was decided alone has the old number",
        "S9",
        _LOG,
        "            self.number += 1\n            self._released = self.number\n",
        "",
        _FAILOVER,
    ),
    Mutant(
        "one joins that is behind",
        "S9",
        _PRIMARY,
        "{n for n in log.backups if log.acked_by(n) >= log.released}",
        "set(log.backups)",
        _FAILOVER,
    ),
    Mutant(
        "a snapshot of a deposed primary replaces its heir's",
        "S9",
        _REPLICATION,
        "if replica is not None and replica.tenure > snapshot.tenure:",
        "if False:",
        _FAILOVER,
        first_seed=1000,
    ),
    Mutant(
        "a snapshot that is late replaces what is newer",
        "S9",
        _REPLICATION,
        "if replica is not None and is_known and replica.number >= snapshot.number:",
        "if False:",
        _FAILOVER,
    ),
    Mutant(
        "one that was given up goes on with what it had",
        "S9",
        _REPLICATION,
        "                effects += self._machine.give_up(range_id)\n",
        "",
        _FAILOVER,
    ),
    Mutant(
        "who hears late of a range that was placed has lost it",
        "S8",
        _REPLICATION,
        "        return self._node_id in assignment.initial_holders and range_id not in self._had",
        "        is_new = assignment.assignment_epoch == PLACED_EPOCH\n"
        "        return is_new and range_id not in self._had",
        ("tables",),
    ),
    Mutant(
        "who has nothing of a range tells nobody",
        "S8",
        _REPLICATION,
        "return [*self._missing_wishes(), *(wish",
        "return [*(wish",
        ("effects",),
    ),
    Mutant(
        "who has left a range begins it anew",
        "S8",
        _REPLICATION,
        " in assignment.initial_holders and range_id not in self._had",
        " in assignment.initial_holders",
        ("effects",),
    ),
    Mutant(
        "a server goes on after an effect that failed",
        "S8",
        "ps_server/fail_stop.py",
        "        if self.failure is None:\n            self.failure = failure",
        "        if failure is None:\n            self.failure = failure",
        ("effects",),
    ),
    Mutant(
        "who is promoted has no heirs in the eyes of the scheduler",
        "S8",
        _CONFIGURATIONS,
        "new = replace(old, primary=chosen, backups=others, joining=())",
        "new = replace(old, primary=chosen, backups=(), joining=())",
        ("pairs",),
    ),
)
