"""The join secret of every cluster that a test starts, and registrations that prove it."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from ps_core.errors import InvalidConfig
from ps_runtime.cluster.join_secret import set_proof
from pushpull.v1 import scheduler_pb2, types_pb2

SECRET = "the join secret of every test"
DEADLINE_S = 10.0


def proven(stub: Any, request: scheduler_pb2.RegisterNodeRequest) -> Any:
    """The registration, with the proof that a scheduler wants. Blocking: one call."""
    asked = scheduler_pb2.GetJoinChallengeRequest()
    answer = stub.GetJoinChallenge(asked, timeout=DEADLINE_S)
    with contextlib.suppress(InvalidConfig):  # there are tests of roles that are none
        set_proof(request, SECRET.encode(), answer.challenge)
    return request


def operator(stub: Any) -> types_pb2.SessionIdentity:
    """An operator's session. Blocking: two calls."""
    request = scheduler_pb2.RegisterNodeRequest(
        registration_id=secrets.token_bytes(16),
        role=types_pb2.NODE_ROLE_OPERATOR,
        protocol_version=1,
    )
    answer = stub.RegisterNode(proven(stub, request), timeout=DEADLINE_S)
    session: types_pb2.SessionIdentity = answer.session
    return session
