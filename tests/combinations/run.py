"""`make combinations`: trainings that combine features at random, each whole and in parts, and
others that are counted.

Ends with 1 if one differs. A seed whose features do not go together is counted, and says why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ps_runtime.launch import launcher as launching
from tests.combinations import counting, training
from tests.combinations.counted import counted
from tests.combinations.drawn import drawn
from tests.combinations.training import Refused
from tests.integration.warm_roles import FORKER, begin_warm


def _in_parts(seed: int, folder: Path) -> tuple[str, str]:
    """What is wrong with a training that is run whole and in parts, and which it is."""
    one = drawn(seed)
    return _problem_of(lambda: training.check(one, folder)), str(one)


def _counted(seed: int, folder: Path) -> tuple[str, str]:
    """What is wrong with a counted training, and which it is."""
    one = counted(seed)
    return _problem_of(lambda: counting.check(one, folder)), str(one)


def _problem_of(check: Callable[[], str]) -> str:
    try:
        return check()
    except Refused:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, the others are run too
        return traceback.format_exc(limit=-3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--kind", choices=("parts", "counted"), help="only these")
    arguments = parser.parse_args()
    launching.start_role = begin_warm
    failed, refused, began_s = [], 0, time.monotonic()
    kinds = {"parts": _in_parts, "counted": _counted}
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        for kind in (arguments.kind,) if arguments.kind else kinds:
            name = f"{kind} {seed}"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    problem, drawn_words = kinds[kind](seed, Path(folder))
                except Refused as error:
                    refused += 1
                    print(f"{name}: does not go together: {error}", flush=True)
                    continue
            if problem:
                failed.append(name)
                print(f"{name} FAILED: {problem}\n{drawn_words}", flush=True)
            else:
                print(f"{name}: as it should be", flush=True)
    FORKER.close()
    took_s = time.monotonic() - began_s
    print(
        f"{arguments.seeds} seeds, {refused} refused, {len(failed)} failed {failed}, {took_s:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
