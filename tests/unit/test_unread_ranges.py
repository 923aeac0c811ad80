"""The reason that `pushpull checkpoint rescue` gives for a range that it cannot read."""

from __future__ import annotations

from ps_cli.checkpoint.rescue import unread
from ps_core.errors import NotOwner, WaitExpired

WHERE = "range 3 of table 'model' at a:1"


def test_a_primary_that_does_not_answer_may_wait_for_its_backups() -> None:
    """One of them is paused, and the primary has no lease without it."""
    silent = WaitExpired("DEADLINE_EXCEEDED: Deadline Exceeded")
    said = unread(WHERE, ("b:2", "c:3"), silent)
    assert isinstance(said, WaitExpired)
    assert said.message == (
        f"{WHERE} cannot be read: no answer came within 60 s; it takes the servers that back it up "
        "too: b:2, c:3"
    )
    assert unread(WHERE, (), silent).message == f"{WHERE} cannot be read: {silent.message}"


def test_a_refusal_is_told_as_it_is() -> None:
    said = unread(WHERE, ("b:2",), NotOwner("the range is elsewhere"))
    assert isinstance(said, NotOwner)
    assert said.message == f"{WHERE} cannot be read: the range is elsewhere"
