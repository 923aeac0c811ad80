"""The times of an optimizer's steps, for `step_record`, and emulated computation."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ps_runtime.system.clock import now_s
from ps_worker.client.client import Client
from ps_worker.client.step_record import StepLine
from ps_worker.spec.optimizers import Assign
from ps_worker.spec.settings import BSP
from ps_worker.steps.steps import PushTicket


class StepTimes:
    """The times of one optimizer's steps; sleeps to emulate computation. If steps are recorded,
    making it blocks until all workers of the cluster are here.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._compute = client.compute_time
        if self._compute is not None:
            self._compute.check_fits(client.world_size)
        if client.connection.record.is_on:
            # Compared runs should not contain the time that some workers start later: under BSP the
            # others would wait in their first step, and under ASP they would train alone.
            table = client.create_table("pushpull-start", 1, optimizer=Assign(), consistency=BSP())
            client.tables.set_aside(table)
            if table.clock == 0:  # one barrier a client, however many optimizers it has
                client.push_pull(table, np.zeros(1, dtype=np.float32))
        self._tickets: Sequence[PushTicket] = ()
        self._committed_s: list[float] = []
        self._ended_s = self._computed_s = self._sealed_s = now_s()

    def computed(self, step: int) -> None:
        """The gradients of `step` (`Outer`: an inner one) are there. Sleeps until the emulated
        computation would be done, which began when the last step ended; real computation counts in
        it.
        """
        if self._compute is not None:
            client = self._client
            needed_s = self._compute.seconds(client.rank, client.world_size, step)
            left_s = self._ended_s + needed_s - now_s()
            if left_s > 0:
                time.sleep(left_s)
        self._computed_s = now_s()

    def sealed(self, tickets: Sequence[PushTicket]) -> None:
        """The step was handed over; `tickets` are done when it is committed."""
        self._sealed_s = now_s()
        if not self._client.connection.record.is_on:
            return
        self._tickets = tickets
        times: list[float] = []
        self._committed_s = times
        for ticket in tickets:
            ticket.future.add_done_callback(lambda _: times.append(now_s()))

    def inner_ended(self, clock: int) -> None:
        """An inner step has ended (`Outer`), of which the servers know nothing."""
        computed_from_s, self._ended_s = self._ended_s, now_s()
        self._client.connection.record.step(
            StepLine(
                clock=clock,
                compute_s=self._computed_s - computed_from_s,
                send_s=self._ended_s - self._computed_s,
                commit_s=0.0,
                read_s=0.0,
                staleness=None,
                rejected=0,
                discarded=False,
                applied=True,
            )
        )

    def ended(self, *, is_early: bool = False) -> None:
        """The parameters are here. `is_early`: as in `StepLine`."""
        computed_from_s, self._ended_s = self._ended_s, now_s()
        # A skipped step's blocks may have been refused; the optimizer raises that.
        futures = [ticket.future for ticket in self._tickets if ticket.done()]
        results = [future.result() for future in futures if future.exception() is None]
        if not results:
            return
        # A commit that came together with the values may not have been noted yet.
        has_all = len(self._committed_s) == len(self._tickets)
        committed_s = max(self._committed_s) if has_all else self._ended_s
        self._client.connection.record.step(
            StepLine(
                clock=max(result.clock for result in results),
                compute_s=self._computed_s - computed_from_s,
                send_s=max(
                    0.0, self._sealed_s - self._computed_s
                ),  # it may be an inner step's since
                commit_s=committed_s - self._sealed_s,
                read_s=max(0.0, self._ended_s - committed_s),
                staleness=max(result.staleness for result in results),
                rejected=sum(len(result.rejected) for result in results),
                discarded=any(result.discarded for result in results),
                applied=all(result.applied for result in results),
                is_early=is_early,
            )
        )
        self._tickets = ()
