"""`python -m benchmarks`: run every benchmark; tables on standard error, JSON on standard output.

The JSON document has one member for each benchmark: what `pushpull bench NAME --json` writes.
"""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from benchmarks.catalogue import BENCHMARKS, run
from benchmarks.settings import BenchSettings


def main() -> None:
    """Run all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    settings = BenchSettings(quick=parser.parse_args().quick)
    console = Console(stderr=True, highlight=False)
    print(json.dumps({name: run(name, settings, console) for name in BENCHMARKS}, indent=2))


if __name__ == "__main__":
    main()
