"""`python -m tests.chaos.mixed`: tables of every kind, update logs and checkpoints, through faults
that are drawn (docs/explanation/FAULTS.md).

Two workers train the tables of `tests.chaos.features` on three servers; two hold each range. No
step may be lost, done twice, or wait for ever, and a server that is told to stop must end well.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ps_worker as ps
from ps_core.errors import PushpullError
from ps_runtime.launch.cluster_shape import CheckpointPlan, ClusterShape, UpdateLogPlan
from tests.chaos.cluster import REPLICAS, Chaos, chaos
from tests.chaos.faults import Faults
from tests.chaos.features import Reader, check_restored
from tests.chaos.network import WAYS, Network, enter
from tests.integration.replicated_cluster import replicated_cluster

_QUIET_S = 1.0
_LEASE_S = 1.0
_PAUSED_S = 3.0
_CUT_S = 8.0  # longer than it takes until a silent link is opened anew
_ENDS_S = 150.0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.mixed", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="of faults (180)")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; by default drawn")
    parser.add_argument("--no-update-logs", action="store_true", help="servers keep none")
    parser.add_argument("--sync", action="store_true", help="update logs are synced")
    parser.add_argument("--no-checkpoints", action="store_true", help="none is made")
    parser.add_argument("--no-cuts", action="store_true", help="all is on the loopback device")
    parser.add_argument("--log", type=Path, default=None, help="where to write what roles say")
    return parser.parse_args()


def shape_of(given: argparse.Namespace, folder: Path, network: Network | None) -> ClusterShape:
    """The cluster that was asked for."""
    log = "" if given.no_update_logs else str(folder / "logs")
    plan = CheckpointPlan()
    if not given.no_checkpoints:
        plan = CheckpointPlan(str(folder / "checkpoints"), every="3s", keep=2, full_every=3)
    return ClusterShape(
        3,
        2,
        listen=f"{network.address if network else '127.0.0.1'}:0",
        replica_count=REPLICAS,
        lease_s=_LEASE_S,
        has_journal=True,
        checkpoints=plan,
        update_log=UpdateLogPlan(log, is_synced=given.sync),
    )


def strike(
    made: Chaos, reader: Reader, draw: random.Random, seconds: float, say: Callable[[str], None]
) -> None:
    """Fault after fault, each when all have recovered from the one before."""
    faults = Faults(made, draw, say)
    kinds: dict[str, Callable[[], None]] = {
        "a server is killed, and another one comes": lambda: faults.kill(_QUIET_S),
        "a server is killed, and starts again": faults.kill_and_return,
        "a server is paused": lambda: faults.pause(_PAUSED_S),
        "a server is told to stop, and another one comes": faults.restart,
        "a server is killed, and nobody comes for a while": faults.kill_for_a_while,
        "the scheduler is killed": lambda: faults.kill_scheduler(_QUIET_S),
        "the scheduler and a server are killed": faults.kill_both,
    }
    if made.network is not None:
        kinds["two servers do not reach each other"] = lambda: faults.cut_between(_CUT_S)
        kinds["a server is cut off"] = lambda: faults.cut(draw.choice(list(WAYS)), _CUT_S)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        kind = draw.choice(list(kinds))
        say(kind)
        kinds[kind]()
        made.workers.check()
        reader.check()


def run(given: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> None:
    """Train through faults, and start once more from the newest checkpoint."""
    network = None if given.no_cuts else Network()
    shape = shape_of(given, folder, network)
    draw = random.Random(given.seed)
    with chaos(shape, network, given.log, "tests.chaos.mixed_worker") as made:
        made.cluster.healed()
        reader = Reader(made.cluster.address, shape.worker_count)
        try:
            strike(made, reader, draw, given.seconds, say)
        finally:
            read_count = reader.finish()
        say(f"a reader has read {read_count} times; the workers come to their end")
        taken, found = made.workers.finish(_ENDS_S)
        assert all(each == [taken] for each in found), f"{taken} steps were taken, found: {found}"
    if not given.no_checkpoints:
        say("another cluster starts from the newest checkpoint")
        plan = CheckpointPlan(resume=str(folder / "checkpoints"))
        with (
            replicated_cluster(workers=1, checkpoints=plan) as cluster,
            ps.connect(cluster.address, rank=0) as client,
        ):
            say(f"it has all of so many steps: {check_restored(client, shape.worker_count)}")


def main() -> int:
    """Run it all; 0 if nothing was wrong."""
    given = arguments()
    why_no_network = "" if given.no_cuts else enter()
    if why_no_network:
        given.no_cuts = True
        print(f"NOT DONE HERE: network cuts: {why_no_network}", flush=True)
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(10**6)
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began_s:6.1f} s] {line}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(f"SEED={given.seed}")
    with tempfile.TemporaryDirectory(prefix="pushpull-mixed-") as folder:
        try:
            run(given, Path(folder), say)
        except KeyboardInterrupt:
            print("stopped; every process of the run has ended", file=sys.stderr)
            return 130
        except (AssertionError, OSError, PushpullError, RuntimeError) as error:
            print(f"FAILED (SEED={given.seed}): {error}", file=sys.stderr)
            return 1
    say("nothing was lost, and nothing was done twice")
    return 0


if __name__ == "__main__":
    sys.exit(main())
