"""`python -m tests.chaos`: faults on a real cluster under load; see docs/FAULTS.md."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from pathlib import Path
from threading import Event

from ps_core.cluster_view import NodeState, Role
from ps_core.errors import PushpullError
from ps_runtime.cluster_shape import ClusterShape
from tests.chaos.cluster import REPLICAS, Chaos, Footprint, chaos, footprint
from tests.chaos.faults import Faults
from tests.chaos.network import WAYS, Network, enter
from tests.chaos.report import Report
from tests.integration.replicated_cluster import DEADLINE_S

_OUTLASTS_LEASES = 3.0
_ENDS_S = 90.0
_FORGOTTEN_S = 60.0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="SIGKILLs of random servers (20)")
    parser.add_argument("--rounds", type=int, default=2, help="of each other kind of fault (2)")
    parser.add_argument("--quiet-s", type=float, default=5.0, help="between two kills (5)")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lease-s", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="of the victims; by default drawn")
    parser.add_argument("--max-s", type=float, default=1500.0, help="of the whole run (1500)")
    parser.add_argument("--calm-s", type=float, default=0.0, help="0: as long as the kills last")
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
        )
        self.say(f"SEED={self.report.seed}; {given.servers} servers, {given.workers} workers")
        with chaos(shape, self._network, given.log) as made:
            made.cluster.healed()
            self._disturb(made)
        last_s = given.calm_s or self.report.kills_last_s
        self.say(f"the same without faults, for {last_s:.0f} s")
        with chaos(shape, self._network) as made:
            made.cluster.healed()
            self.report.calm_last_s, self.report.calm_steps_per_s = self._calm(made, last_s)
            taken, found = made.workers.finish(_ENDS_S)
            assert all(each == [taken] for each in found), "wrong without any fault"

    def _disturb(self, made: Chaos) -> None:
        given, report = self._given, self.report
        faults = Faults(made, self._draw, self.say)
        report.recoveries = faults.recoveries
        self._calm(made, given.quiet_s)
        report.before = self._footprints(made)
        began_s = time.monotonic()
        for number in range(given.kills):
            self.say(f"kill {number + 1} of {given.kills}")
            faults.kill(given.quiet_s)
        report.kills_last_s = time.monotonic() - began_s
        report.steps_per_s = self._rate(made, began_s)
        self._forgotten(made)
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

    def _calm(self, made: Chaos, lasts_s: float) -> tuple[float, float]:
        """Nothing is done for a while: how long it was, and steps a second."""
        began_s = time.monotonic()
        Event().wait(lasts_s)
        made.workers.check()
        return time.monotonic() - began_s, self._rate(made, began_s)

    @staticmethod
    def _rate(made: Chaos, since_s: float) -> float:
        lasted_s = time.monotonic() - since_s
        ends = (e for r in range(made.workers.count) for _, e in made.workers.commits(r))
        return sum(ended_s > since_s for ended_s in ends) / lasted_s

    @staticmethod
    def _footprints(made: Chaos) -> dict[str, Footprint]:
        cluster = made.cluster
        servers = [server.process for server in cluster.living]
        everybody = [cluster.scheduler, *servers, *made.workers.processes]
        return {process.name: footprint(process) for process in everybody}


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
