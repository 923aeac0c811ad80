"""Tickets that an adapter has not yet waited for, table by table.

Rules:
    - A ticket is waited for until it is done, once: what it raises is raised once, and a wait that
      expires leaves it here for the next call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ps_core.errors import PushpullError

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import PullTicket, PushTicket


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
            try:
                # All at once: a refused read explains a step that would wait for ever.
                self._client.wait_all(self._tickets)
            except PushpullError as first:
                ended = [ticket for ticket in self._tickets if ticket.done()]
                self._tickets = [ticket for ticket in self._tickets if not ticket.done()]
                for failure in (ticket.future.exception() for ticket in ended):
                    if failure is not None and not isinstance(failure, ignore):
                        raise failure from None
                if not isinstance(first, ignore):
                    raise
            else:
                self._tickets.clear()
