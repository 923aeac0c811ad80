"""`make combinations`: trainings that combine features at random, each whole and in parts.

Ends with 1 if one differs. A seed whose features do not go together is counted, and says why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.combinations.drawn import drawn
from tests.combinations.training import Refused, check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    arguments = parser.parse_args()
    failed, refused, began_s = [], 0, time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        training = drawn(seed)
        with tempfile.TemporaryDirectory() as folder:
            try:
                problem = check(training, Path(folder))
            except Refused as error:
                refused += 1
                print(f"seed {seed}: does not go together: {error}", flush=True)
                continue
            except Exception:  # noqa: BLE001 - whatever it is, the others are run too
                problem = traceback.format_exc(limit=-3)
        if problem:
            failed.append(seed)
            print(f"seed {seed} FAILED: {problem}\n{training}", flush=True)
        else:
            print(f"seed {seed}: as it should be", flush=True)
    took_s = time.monotonic() - began_s
    print(
        f"{arguments.seeds} seeds, {refused} refused, {len(failed)} failed {failed}, {took_s:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
