"""Servers that keep the values of a cluster that was here before: what `pushpull status` shows.

A server that has values, and hears that the scheduler's cluster is another one, is no node of it
and stays as it is (SEMANTICS S10). Nobody would know of it but who reads its log: so it says so.

Rules:
    - It is shown and nothing else: no decision depends on it, and whoever has the join secret can
      say it.
    - What is not said again for `KEPT_LEASES` leases is forgotten; there are `MAX_COUNT` at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_core.errors import InvalidConfig, Overloaded

KEPT_LEASES = 3
MAX_COUNT = 100

_MAX_BYTES = {"address": 300, "cluster_id": 300, "file": 1000}


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Where there are values, and of which cluster; `file` is on that machine, empty: none."""

    address: str
    cluster_id: str
    file: str

    def check(self) -> None:
        """Refuse what is no such thing.

        Raises:
            InvalidConfig: naming the field.
        """
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
    """Those of one cluster's lifetime.

    Args:
        lease_s: the cluster's.
    """

    def __init__(self, lease_s: float) -> None:
        self._kept_s = KEPT_LEASES * lease_s
        self._said: dict[str, tuple[KeptValues, float]] = {}

    def said(self, values: KeptValues, now_s: float) -> bool:
        """A server says that it has them; whether that is news.

        Raises:
            InvalidConfig: what it says cannot be.
            Overloaded: there are too many.
        """
        values.check()
        known = dict(self.at(now_s))
        if values.address not in self._said and len(known) >= MAX_COUNT:
            raise Overloaded(f"{MAX_COUNT} servers keep values already, which is all that is shown")
        before = self._said.get(values.address)
        self._said[values.address] = values, now_s
        return before is None or before[0] != values

    def at(self, now_s: float) -> list[tuple[str, tuple[KeptValues, float]]]:
        """Those that there are, by address, each with the moment at which it was heard."""
        for address, (_, heard_s) in list(self._said.items()):
            if now_s - heard_s > self._kept_s:
                del self._said[address]
        return sorted(self._said.items())
