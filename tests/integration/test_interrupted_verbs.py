"""Ctrl-C and expired waits in the client's verbs, and scripts that go on after them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import ps_worker as ps
from tests.integration.ctrl_c import ctrl_c_after, ctrl_c_in

SIZE = 8
DEADLINE_S = 5.0

Floats = npt.NDArray[np.float32]
Verb = Callable[[ps.Client, ps.TableHandle], object]

_names = count()


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[ps.Client, ps.Client]]:
    with (
        ps.local_cluster(servers=2, workers=2) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=DEADLINE_S) as first,
        ps.connect(cluster.address, rank=1, request_deadline_s=DEADLINE_S) as second,
    ):
        yield first, second


def full(value: float) -> Floats:
    return np.full(SIZE, value, np.float32)


def _push_and_seal(client: ps.Client, table: ps.TableHandle) -> None:
    client.push(table, full(1.0), seal=False)
    client.seal(table)


@pytest.mark.parametrize(
    "verb",
    [
        lambda client, table: client.push(table, full(1.0)),
        lambda client, table: client.push_pull(table, full(1.0)),
        _push_and_seal,
    ],
    ids=["push", "push_pull", "seal"],
)
def test_ctrl_c_leaves_no_step_without_its_seal(
    workers: tuple[ps.Client, ps.Client], verb: Verb
) -> None:
    """It comes when the step has its clock, and before its seal has left."""
    client, _ = workers
    table = client.create_table(
        f"sealed {next(_names)}", SIZE, optimizer=ps.SGD(lr=1.0), consistency="asp"
    )
    with ctrl_c_after("sealed"):
        verb(client, table)
    assert table.clock == 1
    assert client.wait(client.push(table, full(1.0))).clock == 2
    np.testing.assert_array_equal(client.pull(table), full(-2.0))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1])
def test_a_signal_that_the_script_handles_leaves_no_step_without_its_seal(
    workers: tuple[ps.Client, ps.Client], number: signal.Signals
) -> None:
    """Its handler raises, as those of preemptible jobs and of time limits do."""
    client, _ = workers
    table = client.create_table(
        f"handled {next(_names)}", SIZE, optimizer=ps.SGD(lr=1.0), consistency="asp"
    )
    before = signal.signal(number, signal.default_int_handler)
    try:
        with ctrl_c_after("sealed", number):
            client.push(table, full(1.0))
    finally:
        signal.signal(number, before)
    assert client.wait(client.push(table, full(1.0)), timeout_s=DEADLINE_S).clock == 2
    np.testing.assert_array_equal(client.pull(table), full(-2.0))


@pytest.mark.parametrize("asks", ["wait", "done"])
def test_ctrl_c_leaves_no_ticket_locked(workers: tuple[ps.Client, ps.Client], asks: str) -> None:
    """It comes before the lock of the ticket's future is given back: the end of the step needs it.

    Both workers push: the step ends after the interruption.
    """
    first, second = workers
    ours, theirs = (
        client.create_table(f"waited {asks}", SIZE, optimizer=ps.SGD(lr=1.0)) for client in workers
    )
    ticket = first.push(ours, full(1.0))
    with ctrl_c_in("__exit__", "threading.py"):
        first.wait(ticket) if asks == "wait" else ticket.done()
    second.push(theirs, full(1.0))
    assert first.wait(ticket).clock == 1


def test_ctrl_c_leaves_no_step_of_rows_without_its_seal(
    workers: tuple[ps.Client, ps.Client],
) -> None:
    """The gradient of the interrupted step counts once."""
    client, _ = workers
    rows = ps.Embedding(
        client, "rows", SIZE, optimizer=ps.SGD(lr=1.0), init=ps.Zeros(), consistency="asp"
    )
    ids = torch.tensor([3])
    rows(ids).sum().backward()
    with ctrl_c_after("sealed"):
        rows.step()
    rows(ids).sum().backward()
    rows.step()
    assert rows.table.clock == 2
    np.testing.assert_array_equal(rows(ids).detach(), [full(-2.0)])


def test_ctrl_c_leaves_no_initial_values_without_their_seal(
    workers: tuple[ps.Client, ps.Client],
) -> None:
    client, _ = workers
    table = client.create_table(
        f"assigned {next(_names)}", SIZE, optimizer=ps.SGD(lr=1.0), init=ps.FromRank0()
    )
    with ctrl_c_after("sealed"):
        client.assign(table, full(3.0))
    np.testing.assert_array_equal(client.pull(table), full(3.0))


@pytest.mark.parametrize("verb", ["pull", "push_pull"])
def test_what_ctrl_c_has_interrupted_does_not_write_into_out_afterwards(
    workers: tuple[ps.Client, ps.Client], verb: str
) -> None:
    """The pull has begun, and waits for the other worker."""
    first, second = workers
    ours, theirs = (
        client.create_table(f"out of {verb}", SIZE, optimizer=ps.SGD(lr=1.0)) for client in workers
    )
    out = full(0.0)
    if verb == "pull":
        first.push(ours, full(1.0))
    with ctrl_c_after("start_values"):
        if verb == "pull":
            first.pull(ours, out=out)
        else:
            first.push_pull(ours, full(1.0), out=out)
    out[:] = 7.0
    second.push(theirs, full(1.0))
    np.testing.assert_array_equal(first.pull(ours), full(-1.0))
    np.testing.assert_array_equal(out, full(7.0))


def test_a_callback_that_ends_its_thread_keeps_no_later_one(
    workers: tuple[ps.Client, ps.Client], caplog: pytest.LogCaptureFixture
) -> None:
    """As by `sys.exit`, which ends no more than the callback there."""
    client, _ = workers
    table = client.create_table("called back", SIZE, optimizer=ps.SGD(lr=1.0))
    client.wait(client.pull(table, callback=lambda _: sys.exit(1)))
    seen: list[Any] = []
    client.wait(client.pull(table, callback=seen.append))
    np.testing.assert_array_equal(seen, [full(0.0)])
    assert "event=pull_callback_failed" in caplog.text
