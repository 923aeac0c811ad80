"""The deliberate bugs of works: what happens in the middle of one (S15)."""

from __future__ import annotations

from tests.sim.mutation import Mutant

_SERVERS = ("failover", "loops")

WORK_MUTANTS = (
    Mutant(
        "what others have is released in the middle of a work",
        "S15",
        "tests/sim/replicated.py",
        "self.works.begin(self._releasing(tuple(range_ids)))",
        "self.works.begin(self._doing(self.output.release(self.now_s, tuple(range_ids))))",
        ("logs",),
    ),
    Mutant(
        "an event is decided in the middle of another's work",
        "S15",
        "ps_server/service/work_queue.py",
        "        is_next = not self.jobs\n        self.jobs.append(_Job(work, on_end))",
        "        is_next = not self._is_running\n        self.jobs.appendleft(_Job(work, on_end))",
        ("steps", "failover"),
    ),
    Mutant(
        "a read is answered between two steps of an update",
        "S15",
        "tests/sim/server.py",
        "        self.works.between(lambda: self.capture(event, on_answer))",
        "        number = next(self.waiters)\n        self.reads[number] = on_answer\n"
        "        for _ in self._carrying_out(self.machine.pull(event(number), self.now_s)):\n"
        "            pass",
        ("steps", "changes", "failover"),
    ),
    Mutant(
        "values that were loaded are handed over in the middle of a work",
        "S15",
        "tests/sim/timelines.py",
        "        self.works.finish()\n        for key, versions in self._ranges.hand_over():",
        "        for key, versions in self._ranges.hand_over():\n            self.works.finish()",
        ("restores",),
    ),
    Mutant(
        "a push that came before its range is wrong",
        "S15",
        "ps_server/ranges/server_machine.py",
        "case PushEvent(problem=Recovering() as lost) | SealEvent(problem=Recovering() as lost):",
        "case None as lost:",
        _SERVERS,
    ),
)
