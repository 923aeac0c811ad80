"""Tickets of one table that the script has not waited for yet.

Rules:
    - A ticket's error is raised once; a ticket whose wait expires stays for the next call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ps_core.errors import PushpullError

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import PullTicket, PushTicket


class PendingTickets:
    """Tickets of one table, oldest first."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tickets: list[PushTicket | PullTicket[Any]] = []

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def add(self, ticket: PushTicket | PullTicket[Any]) -> None:
        self._tickets.append(ticket)

    def wait(self, ignore: tuple[type[PushpullError], ...] = ()) -> None:
        """Wait for all tickets, as `Client.wait`, but raise no error of those in `ignore`; tickets
        that are not done stay.
        """
        while self._tickets:
            try:
                # All at once: a refused pull explains a step that would wait for ever.
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
