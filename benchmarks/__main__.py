"""`python -m benchmarks`: measure, and print one JSON document. It passes or fails nothing."""

from __future__ import annotations

import argparse
import json

from benchmarks.ceilings import memcpy, tcp_loopback
from benchmarks.measure import environment, summary
from benchmarks.transfers import transfers

MIB = 1024 * 1024


def main() -> None:
    """Measure the ceilings, then transfers on one and on two servers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the table (default: 64)")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each (default: 9)")
    parser.add_argument(
        "--servers", type=int, nargs="+", default=[1, 2], help="server counts (default: 1 2)"
    )
    arguments = parser.parse_args()
    byte_count = arguments.mib * MIB
    ceilings = {
        "memcpy": summary(memcpy(byte_count, arguments.rounds)),
        "tcp_loopback": summary(tcp_loopback(byte_count, arguments.rounds)),
    }
    measured = [transfers(count, byte_count, arguments.rounds) for count in arguments.servers]
    document = {
        "environment": environment(),
        "ceilings_gb_per_s": ceilings,
        "transfers": [with_ratios(result, ceilings["tcp_loopback"]) for result in measured],
    }
    print(json.dumps(document, indent=2))


def with_ratios(result: dict[str, object], ceiling: dict[str, float]) -> dict[str, object]:
    """A result with its medians over the ceiling's: what compares across machines."""
    rates = result["gb_per_s"]
    assert isinstance(rates, dict)
    ratios = {name: round(rate["median"] / ceiling["median"], 3) for name, rate in rates.items()}
    return {**result, "of_tcp_loopback": ratios}


if __name__ == "__main__":
    main()
