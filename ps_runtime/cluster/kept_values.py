"""What a server keeps that another cluster's scheduler has found: a file by which it can be read.

A scheduler that was started again knows nothing of the cluster before it. A server that has values
of that cluster is the only one that has them: it does not register as an empty one, but goes on as
while the scheduler is away, until it is stopped. The file has the last view and a reader's session,
which this server signs as the scheduler did: `pushpull checkpoint rescue` reads every range by it.

Only who may read this server's files can use it: it is in the directory of temporary files, for its
owner alone.

Meanwhile the server says so to the scheduler that it has found, which shows it in its status.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ps_core.cluster_view import ClusterView, Role, Session
from ps_core.errors import InvalidConfig, PushpullError
from ps_core.keys import Incarnation, NodeId
from ps_runtime.cluster import wire
from ps_runtime.cluster.registration import (
    ATTEMPT_DEADLINE_S,
    Addresses,
    answer_of,
    operator_session,
)
from ps_runtime.observe import logs
from pushpull.v1 import scheduler_pb2, types_pb2

FORMAT = "pushpull-kept-values"


def write(session: Session, token_key: bytes, view: ClusterView) -> Path:
    """Write the file for the cluster that a server was in.

    Raises:
        OSError: it cannot be written.
    """
    reader = replace(
        session, role=Role.READER, node_id=NodeId(0), incarnation=Incarnation(0), rank=0
    )
    reader = replace(reader, token=reader.signed(token_key))
    document = {
        "format": FORMAT,
        "session": _text(wire.session_to_proto(reader).SerializeToString()),
        "view": _text(wire.view_to_proto(view).SerializeToString()),
    }
    prefix = f"pushpull-server-{session.node_id}-"
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".json")  # its owner's alone
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document, file)
    return Path(name)


def read(path: Path) -> tuple[types_pb2.SessionIdentity, ClusterView]:
    """A reader's session, and the last view.

    Raises:
        InvalidConfig: it is no such file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        session = types_pb2.SessionIdentity.FromString(base64.b64decode(document["session"]))
        view = types_pb2.ClusterView.FromString(base64.b64decode(document["view"]))
        known = document["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{path} is not what a server wrote: {error}") from error
    if not known:
        raise InvalidConfig(f"{path} has another format than '{FORMAT}'")
    return session, wire.view_from_proto(view)


async def keep_saying(
    addresses: Sequence[str], values: scheduler_pb2.KeptValues, interval_s: float
) -> None:
    """Tell the scheduler of these values again and again, until cancelled: its status shows them.

    Args:
        addresses: the scheduler's, one of which answers.
        values: which, and where.
        interval_s: how long to wait where the scheduler does not say.
    """
    book = Addresses(addresses)
    session: types_pb2.SessionIdentity | None = None
    try:
        while True:
            address, wait_s = book.present, interval_s
            try:
                stub = book.stub()
                if session is None:
                    session = await operator_session(stub, ATTEMPT_DEADLINE_S)
                request = scheduler_pb2.ReportKeptValuesRequest(session=session, kept_values=values)
                answer: scheduler_pb2.ReportKeptValuesResponse = await answer_of(
                    stub.ReportKeptValues(request, timeout=ATTEMPT_DEADLINE_S)
                )
                wait_s = answer.again_ms / 1000
            except PushpullError as error:
                session = None  # it may be another scheduler again
                book.leave(address)
                logs.debug("kept_values_not_told", address=address, error=error.message)
            await asyncio.sleep(wait_s)
    finally:
        await book.close()


def _text(message: bytes) -> str:
    return base64.b64encode(message).decode("ascii")
