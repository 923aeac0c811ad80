"""The values that a server keeps when it has found another cluster's scheduler, and their file.

A scheduler that was started again knows nothing of the cluster before it. A server with values of
that cluster is the only one that has them. So it does not register as an empty server, but goes on
as while the scheduler is away, until it is stopped. It reports its values to the scheduler that it
has found, which shows them in its status.

The file has the last view and a reader's session, which this server signs as the scheduler did:
`pushpull checkpoint rescue` reads every range with it. It is in the directory of temporary files,
readable by its owner alone.
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

from google.protobuf.message import DecodeError

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
    """Write the file for the cluster that a server was in, or none. Raises: OSError."""
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
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".json")  # readable by its owner
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def read(path: Path) -> tuple[types_pb2.SessionIdentity, ClusterView]:
    """Read a reader's session and the last view; InvalidConfig if it is no such file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        session = types_pb2.SessionIdentity.FromString(base64.b64decode(document["session"]))
        message = types_pb2.ClusterView.FromString(base64.b64decode(document["view"]))
        view = wire.view_from_proto(message)
        known = document["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, DecodeError, PushpullError) as error:
        raise InvalidConfig(f"{path} is no file of kept values: {error}") from error
    if not known:
        raise InvalidConfig(f"{path} has another format than '{FORMAT}'")
    return session, view


async def keep_reporting(
    addresses: Sequence[str], values: scheduler_pb2.KeptValues, interval_s: float
) -> None:
    """Report these values, as they are by then, again and again, until cancelled; `interval_s`
    after a failure.
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
                session = None  # the scheduler may be another one again
                book.leave(address)
                logs.debug("kept_values_not_told", address=address, error=error.message)
            await asyncio.sleep(wait_s)
    finally:
        await book.close()


def _text(message: bytes) -> str:
    return base64.b64encode(message).decode("ascii")
