"""Servers with the values of an earlier cluster, shown by `pushpull status`.

A server that has values, and hears that the scheduler has another cluster, is no node of that
cluster and keeps its values (SEMANTICS S10). It reports so, because only its own log would tell.

Reports are only shown: no decision depends on them, as whoever has the join secret can send them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_core.errors import InvalidConfig, Overloaded

KEPT_LEASES = 3
MAX_COUNT = 100

_MAX_BYTES = {"address": 300, "cluster_id": 300, "file": 1000}


@dataclass(frozen=True, slots=True)
class KeptValues:
    """A server's address, and the cluster of its values; `file` is on its machine, or empty."""

    address: str
    cluster_id: str
    file: str

    def check(self) -> None:
        if not self.address or not self.cluster_id:
            raise InvalidConfig("kept values without an address or a cluster_id; expected both")
        for name, most in _MAX_BYTES.items():
            text = getattr(self, name)
            if len(text.encode()) > most or not text.isprintable():
                raise InvalidConfig(
                    f"{name} of kept values is {text[:100]!a}; expected at most {most} printable "
                    "bytes"
                )


class KeptElsewhere:
    """The reports to one cluster."""

    def __init__(self, lease_s: float) -> None:
        self._kept_s = KEPT_LEASES * lease_s
        self._said: dict[str, tuple[KeptValues, float]] = {}

    def said(self, values: KeptValues, now_s: float) -> bool:
        """Note a report; False if it is a repeat."""
        values.check()
        known = dict(self.at(now_s))
        if values.address not in self._said and len(known) >= MAX_COUNT:
            raise Overloaded(f"{MAX_COUNT} servers have reported kept values; no more are shown")
        before = self._said.get(values.address)
        self._said[values.address] = values, now_s
        return before is None or before[0] != values

    def at(self, now_s: float) -> list[tuple[str, tuple[KeptValues, float]]]:
        """Reports by address, each with the moment of its last repeat."""
        for address, (_, heard_s) in list(self._said.items()):
            if now_s - heard_s > self._kept_s:
                del self._said[address]
        return sorted(self._said.items())
