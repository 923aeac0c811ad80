"""`python -m ps_cli.bench`: run every benchmark; tables on standard error, JSON on standard output.

The JSON document has a member for each benchmark that did not fail, as `bench NAME --json` has it.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from ps_cli.bench.catalogue import BENCHMARKS, run
from ps_cli.bench.settings import BenchSettings
from ps_core.errors import PushpullError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ps_cli.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    settings = BenchSettings(quick=parser.parse_args().quick)
    console = Console(stderr=True, highlight=False)
    documents = {}
    failed = []
    for name in BENCHMARKS:
        try:
            documents[name] = run(name, settings, console)
        except PushpullError as error:  # the other figures took minutes
            console.print(f"{name} failed: {error.message}", style="red", markup=False)
            failed.append(name)
    print(json.dumps(documents, indent=2))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
