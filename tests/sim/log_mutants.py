"""The deliberate bugs of the update log: what it must have first, and who goes on from it (S13).

What takes two faults at once to show is seen by `tests/unit/test_logged_ranges.py` and
`test_update_log_claims.py`.
"""

from __future__ import annotations

from tests.sim.mutation import Mutant

_LOGS = ("logs",)
_LOG = "ps_server/replication/replication_log.py"
_PRIMARY = "ps_server/replication/primary.py"
_SEGMENTS = "ps_server/update_log/segments.py"
_LOGGED = "ps_server/update_log/logged_ranges.py"
_STALL = "ps_server/update_log/disk_stall.py"
_REPLICATION = "ps_server/replication/range_roles.py"
_CONFIGURATIONS = "scheduler/machine/configurations.py"
_CLUSTER = "scheduler/machine/cluster.py"

LOG_MUTANTS = (
    Mutant(
        "segments go that a range needs",
        "S13",
        _SEGMENTS,
        "            if number >= needed or self.byte_count <= self._bound_bytes:",
        "            if number >= self.newest or self.byte_count <= self._bound_bytes:",
        _LOGS,
    ),
    Mutant(
        "a snapshot counts as written when it is on its way",
        "S13",
        _SEGMENTS,
        "            self._on_its_way.append((range_id, self.newest))",
        "            self._on_its_way.append((range_id, self.newest))\n"
        "            self._starts[range_id] = self.newest",
        _LOGS,
    ),
    Mutant(
        "commit before the log has it",
        "S13",
        _LOG,
        "        return held if self._written is None else min(held, self._written)",
        "        return held",
        _LOGS,
    ),
    Mutant(
        "reads of too few servers do not wait for the log",
        "S13",
        _LOG,
        "        return held if self._written is None else min(held, self._written)",
        "        is_read = self._written is None or self.is_short\n"
        "        return held if is_read else min(held, self._written or 0)",
        _LOGS,
    ),
    Mutant(
        "with a log nobody waits for anything",
        "S13",
        _LOG,
        "        is_only_here = not self._acked and self._written is None",
        "        is_only_here = not self._acked",
        _LOGS,
    ),
    Mutant(
        "a range that was taken over needs no snapshot",
        "S13",
        _REPLICATION,
        "        return replica.number if is_recovered else -1",
        "        return replica.number",
        _LOGS,
    ),
    Mutant(
        "a log that goes on does not say so",
        "S13",
        _LOGGED,
        "            self._writer.take_over(log)",
        "            pass",
        _LOGS,
    ),
    Mutant(
        "a range is given to any log that has it",
        "S13",
        _CONFIGURATIONS,
        "        return before is not None and before.log_id == claim.log_id",
        "        return before is not None",
        _LOGS,
    ),
    Mutant(
        "whoever was promoted is the last primary",
        "S13",
        _CONFIGURATIONS,
        "        return found or LogSource(primary, assignment.term)",
        "        return LogSource(primary, assignment.term)",
        _LOGS,
    ),
    Mutant(
        "a promoted backup serves before its log has the range",
        "S13",
        _PRIMARY,
        "            if not log.is_confirmed and not log.is_logged:",
        "            if False:",
        _LOGS,
    ),
    Mutant(
        "who was promoted alone is the last primary at once",
        "S13",
        _CONFIGURATIONS,
        "            if not new.backups and not self._has_log(chosen):",
        "            if not new.backups:",
        ("departures-logs",),
    ),
    Mutant(
        "who was promoted alone serves before the scheduler knows that its log has the range",
        "S13",
        _LOG,
        "        self.may_go_back = not self._acked and not self.is_logged",
        "        self.may_go_back = False",
        ("departures-logs",),
    ),
    Mutant(
        "values of a checkpoint come to a range that its new primary's log lacks",
        "S13",
        _REPLICATION,
        "        return primary is None or not primary.log.must_be_known",
        "        return True",
        ("restores-unreadable-logs", "restores-logs"),
    ),
    Mutant(
        "a claim gives nothing back",
        "S13",
        _CLUSTER,
        "        if claim.timeline == self.settings.timeline:",
        "        if False:",
        _LOGS,
    ),
    Mutant(
        "a disk that does not answer is waited for",
        "S13",
        _STALL,
        "        return self._lasts_s >= limits.LOG_STALL_S",
        "        return False",
        _LOGS,
    ),
    Mutant(
        "a server that was paused gives its disk up",
        "S13",
        _STALL,
        "        passed_s = min(now_s - self._looked_s, _MOST_LOOK_S)",
        "        passed_s = now_s - self._looked_s",
        _LOGS,
    ),
    Mutant(
        "a slow disk is given up",
        "S13",
        _STALL,
        "        is_same = operation and operation == self._operation",
        "        is_same = operation and self._operation",
        _LOGS,
    ),
)
