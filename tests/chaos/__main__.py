"""`python -m tests.chaos`: faults on a real cluster under load; see docs/explanation/FAULTS.md."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

from ps_core.cluster_view import NodeState, Role
from ps_core.errors import PushpullError
from ps_runtime.launch.cluster_shape import ClusterShape
from tests.chaos.cluster import REPLICAS, Chaos, Footprint, chaos, footprint
from tests.chaos.faults import KILLED, RESTARTED, SCHEDULER_KILLED, Faults
from tests.chaos.network import WAYS, Network, enter
from tests.chaos.report import Away, Loop, Rate, Report
from tests.integration.replicated_cluster import DEADLINE_S

_OUTLASTS_LEASES = 3.0
_ENDS_S = 90.0
_FORGOTTEN_S = 60.0
_SETTLES_S = 5.0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="SIGKILLs of random servers (20)")
    parser.add_argument("--scheduler-kills", type=int, default=5, help="of the scheduler (5)")
    parser.add_argument("--rolls", type=int, default=1, help="rolling restarts of all servers (1)")
    parser.add_argument("--rounds", type=int, default=2, help="of each other kind of fault (2)")
    parser.add_argument("--quiet-s", type=float, default=5.0, help="between two kills (5)")
    parser.add_argument(
        "--scheduler-away",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="nothing but this: no scheduler for so long under load, which then comes back",
    )
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lease-s", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="of the victims; by default drawn")
    parser.add_argument("--max-s", type=float, default=1500.0, help="of the whole run (1500)")
    parser.add_argument("--calm-s", type=float, default=0.0, help="0: as long as the longest loop")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    parser.add_argument("--log", type=Path, default=None, help="where to write what roles say")
    return parser.parse_args()


class Run:
    """One run of everything."""

    def __init__(self, given: argparse.Namespace, why_no_network: str) -> None:
        seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
        self._given = given
        self._began_s = time.monotonic()
        self._draw = random.Random(seed)
        self._network = None if why_no_network else Network()
        self._made: Chaos | None = None
        self._faults: Faults | None = None
        self.report = Report(given.lease_s, given.workers, given.servers, seed)
        if why_no_network:
            self.report.impossible.append(
                f"network cuts: no network namespace can be made ({why_no_network})"
            )
        self.report.impossible.append(
            "a full disk: these servers write none; tests/integration/test_update_log.py has it"
        )

    def say(self, line: str) -> None:
        """A line of progress; also the place where a run that takes too long ends."""
        took_s = time.monotonic() - self._began_s
        print(f"[{took_s:6.1f} s] {line}", file=sys.stderr, flush=True)
        if took_s > self._given.max_s:
            raise TimeoutError(f"the run takes longer than --max-s {self._given.max_s:g}")

    def all(self) -> None:
        """The kills, the other faults, and a calm run."""
        given = self._given
        shape = ClusterShape(
            given.servers,
            given.workers,
            listen=f"{self._network.address if self._network else '127.0.0.1'}:0",
            replica_count=REPLICAS,
            lease_s=given.lease_s,
            has_journal=True,
        )
        self.say(f"SEED={self.report.seed}; {given.servers} servers, {given.workers} workers")
        with chaos(shape, self._network, given.log) as made:
            made.cluster.healed()
            self._made = made
            if given.scheduler_away:
                self._without_scheduler(made, given.scheduler_away)
                return
            self._disturb(made)
        longest_s = max((loop.whole.lasted_s for loop in self.report.loops.values()), default=0.0)
        last_s = given.calm_s or longest_s
        self.say(f"the same without faults, for {last_s:.0f} s")
        with chaos(shape, self._network) as made:
            made.cluster.healed()
            self.report.calm = self._calm(made, last_s)
            taken, found = made.workers.finish(_ENDS_S)
            assert all(each == [taken] for each in found), "wrong without any fault"

    def _disturb(self, made: Chaos) -> None:
        given, report = self._given, self.report
        faults = self._faults = Faults(made, self._draw, self.say)
        report.recoveries = faults.recoveries
        self._calm(made, given.quiet_s)
        report.before = self._footprints(made)
        self._loop(faults, KILLED, given.kills, faults.kill)
        self._forgotten(made)
        self._loop(faults, SCHEDULER_KILLED, given.scheduler_kills, faults.kill_scheduler)
        self._loop(faults, RESTARTED, given.rolls, faults.roll)
        report.after = self._footprints(made)
        lasts_s = _OUTLASTS_LEASES * given.lease_s
        for _ in range(given.rounds):
            faults.pause(lasts_s)
            for way in WAYS if made.network is not None else ():
                faults.cut(way, 2 * lasts_s)
            if made.network is not None:
                faults.cut_between(2 * lasts_s)
        self.say("the workers come to their end")
        report.taken, report.found = made.workers.finish(_ENDS_S)

    def _loop(self, faults: Faults, kind: str, count: int, fault: Callable[[float], None]) -> None:
        """A fault, some quiet, another one; and what was done meanwhile."""
        began_s = time.monotonic()
        quiet = faults.quiet
        quiet.clear()
        for number in range(count):
            self.say(f"{kind} {number + 1} of {count}")
            fault(self._given.quiet_s)
        if count:
            whole = [(began_s, time.monotonic())]
            self.report.loops[kind] = Loop(_rate(faults.made, whole), _rate(faults.made, quiet))

    def _without_scheduler(self, made: Chaos, lasts_s: float) -> None:
        """Load, the same without a scheduler, and again with the one that came back."""
        around_s = lasts_s / 2
        cluster, workers = made.cluster, made.workers
        self._calm(made, _SETTLES_S)
        was = cluster.views.catch_up()
        self.say(f"{around_s:.0f} s with a scheduler")
        began_s = time.monotonic()
        before = self._calm(made, around_s)
        calm_worst_s = workers.worst_step_s(began_s)
        self.say(f"{lasts_s:.0f} s without")
        cluster.kill_scheduler()
        began_s = time.monotonic()
        while_away = self._calm(made, lasts_s)
        worst_s = workers.worst_step_s(began_s)
        cluster.start_scheduler_again()
        self.say(f"it is back; {around_s:.0f} s with it")
        after = self._calm(made, around_s)
        assert cluster.views.catch_up().ranges == was.ranges, "a range moved"
        self.report.away = Away(before, while_away, after, worst_s, calm_worst_s)
        self.say("the workers come to their end")
        self.report.taken, self.report.found = workers.finish(_ENDS_S)

    def note_failures(self) -> None:
        """Count the calls of workers that failed to the fault that was under way."""
        failed = self._made.workers.failed_calls if self._made is not None else []
        if failed:
            kind = self._faults.under_way if self._faults is not None else "no scheduler"
            self.report.failed_calls[kind] = failed

    def _forgotten(self, made: Chaos) -> None:
        """Wait until the dead have left the view, and with them what was kept for them."""
        self.say("waiting until the dead are given up")
        made.cluster.views.until(
            lambda view: all(
                n.state is NodeState.ALIVE or n.state is NodeState.LEFT
                for n in view.nodes
                if n.role is Role.SERVER
            ),
            "no server is silent",
            _FORGOTTEN_S,
        )
        self._calm(made, self._given.quiet_s)

    def _calm(self, made: Chaos, lasts_s: float) -> Rate:
        """Nothing is done for a while."""
        began_s = time.monotonic()
        Event().wait(lasts_s)
        made.workers.check()
        return _rate(made, [(began_s, time.monotonic())])

    @staticmethod
    def _footprints(made: Chaos) -> dict[str, Footprint]:
        cluster = made.cluster
        servers = [server.process for server in cluster.living]
        everybody = [cluster.scheduler, *servers, *made.workers.processes]
        return {process.name: footprint(process) for process in everybody}


def _rate(made: Chaos, times: list[tuple[float, float]]) -> Rate:
    lasted_s = sum(ended_s - began_s for began_s, ended_s in times)
    return Rate(lasted_s, made.workers.rate_within(times))


def main() -> int:
    """Run it all; 0 if nothing was lost, nothing was done twice, and nothing grows."""
    given = arguments()
    why_no_network = enter()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = Run(given, why_no_network)
    try:
        run.all()
    except KeyboardInterrupt:
        print("stopped; every process of the run has ended", file=sys.stderr)
        return 130
    except (AssertionError, OSError, PushpullError, RuntimeError) as error:
        run.note_failures()
        print("\n".join(run.report.lines()))
        print(f"FAILED (SEED={run.report.seed}): {error}", file=sys.stderr)
        return 1
    finally:
        if given.json is not None:
            given.json.write_text(json.dumps(run.report.to_json(), indent=2) + "\n")
    print("\n".join(run.report.lines()))
    return 0 if run.report.is_exact and not run.report.growth else 1


assert DEADLINE_S < _ENDS_S  # a worker's own patience ends first, and says more

if __name__ == "__main__":
    sys.exit(main())
