"""One worker's rounds of collective calls (SEMANTICS S17).

Rules:
    - A worker sends its share until the round has ended, whichever server is the host by then, and
      however often the script was interrupted.
    - A worker tells each host its last round before anything else.
"""

from __future__ import annotations

from typing import NamedTuple

from ps_core.collective_calls import Host, Round, Share


class Entering(NamedTuple):
    """A worker's message to a host."""

    ended_round: int
    last: Round | None
    share: Share | None


class Rounds:
    """One worker's state of rounds. Hosts must know a late joiner before it takes part in one."""

    def __init__(self, *, is_late_joiner: bool) -> None:
        self._is_late_joiner = is_late_joiner
        self._last: Round | None = None
        self._told: Host | None = None

    def must_announce(self, host: Host) -> bool:
        """True if that host must know this worker even without a call of its script."""
        return host != self._told and (self._is_late_joiner or self._last is not None)

    def entering(self, host: Host, share: Share | None) -> Entering:
        ended_round = 0 if self._last is None else self._last.number
        return Entering(ended_round, self._last if host != self._told else None, share)

    def told(self, host: Host) -> None:
        """The host has answered, so it knows the last round."""
        self._told = host

    def must_tell_again(self) -> None:
        """A host has answered that it does not know the last round."""
        self._told = None

    def ended(self, host: Host, ended: Round) -> None:
        """The host has answered with the ended round of this worker's share."""
        self._last, self._told = ended, host
