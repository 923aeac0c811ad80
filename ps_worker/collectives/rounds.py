"""The rounds of collective calls, as one worker has them (SEMANTICS S17).

Rules:
    - A share is given until its round has ended, whichever server is the host by then, and however
      often the script was interrupted.
    - Each host is told of the last round that this worker had, before anything else.
"""

from __future__ import annotations

from typing import NamedTuple

from ps_core.collective import Host, Round, Share


class Entering(NamedTuple):
    """What a host is told."""

    ended_round: int
    last: Round | None
    share: Share | None


class Rounds:
    """What one worker knows of rounds.

    Args:
        is_late_joiner: whether hosts have to hear of it before it has taken part in anything.
    """

    def __init__(self, *, is_late_joiner: bool) -> None:
        self._is_late_joiner = is_late_joiner
        self._last: Round | None = None
        self._told: Host | None = None

    def must_announce(self, host: Host) -> bool:
        """Whether that host has to be told of this worker, though its script makes no call."""
        return host != self._told and (self._is_late_joiner or self._last is not None)

    def entering(self, host: Host, share: Share | None) -> Entering:
        """What to tell a host."""
        ended_round = 0 if self._last is None else self._last.number
        return Entering(ended_round, self._last if host != self._told else None, share)

    def told(self, host: Host) -> None:
        """The host has answered: it knows the last round."""
        self._told = host

    def must_tell_again(self) -> None:
        """A host does not know the last round after all."""
        self._told = None

    def ended(self, host: Host, ended: Round) -> None:
        """The host has said what the round was that this worker was in."""
        self._last, self._told = ended, host
