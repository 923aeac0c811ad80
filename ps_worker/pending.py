"""What an adapter has begun on a table and not seen the end of.

Rules:
    - A ticket is waited for until it is done, once: what it raises is raised once, and a wait that
      expires leaves it here for the next call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ps_core.errors import PushpullError

if TYPE_CHECKING:
    from ps_worker.client import Client
    from ps_worker.tickets import PullTicket, PushTicket


class Pending:
    """Tickets of one table, in the order in which they were begun."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tickets: list[PushTicket | PullTicket[Any]] = []

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def add(self, ticket: PushTicket | PullTicket[Any]) -> None:
        """Something was begun."""
        self._tickets.append(ticket)

    def wait(self, ignore: tuple[type[PushpullError], ...] = ()) -> None:
        """Waits until nothing is pending.

        Args:
            ignore: errors that a ticket may end with without the call raising them.

        Raises:
            PushpullError: as `Client.wait`; what is not done stays pending.
        """
        while self._tickets:
            ticket = self._tickets[0]
            try:
                self._client.wait(ticket)
            except ignore:
                if not ticket.done():
                    raise
            finally:
                if ticket.done():
                    self._tickets.pop(0)
