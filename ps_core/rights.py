"""Who may call what: every method of the contract, and the roles whose sessions it takes.

Rules:
    - A reader reads, and changes nothing that anybody else sees. Operators look after the cluster
      and touch no values. Only servers speak for ranges.
    - A method that is not in the table may be called by nobody.

docs/REFERENCE.md has the table, and a test calls every method with a session of every role.
"""

from __future__ import annotations

from collections.abc import Mapping

from ps_core.cluster_view import Role
from ps_core.errors import NotPermitted

_EVERYBODY = frozenset(Role)
_SERVERS = frozenset({Role.SERVER})
_WORKERS = frozenset({Role.WORKER})
_READERS = frozenset({Role.READER})
_PULLING = _WORKERS | _READERS
_CHANGING = _WORKERS | {Role.OPERATOR}

NEEDS_NO_SESSION = frozenset({"GetJoinChallenge", "RegisterNode"})
"""Whoever registers has none yet: RegisterNode asks for the proof of the join secret instead."""

NO_SESSION = "the session token is missing; send the session as RegisterNode gave it"
"""What a call without a session is told."""

MAY_CALL: Mapping[str, frozenset[Role]] = {
    "Heartbeat": _EVERYBODY,
    "DeregisterNode": _EVERYBODY,
    "WatchCluster": _EVERYBODY,
    "GetClusterStatus": _EVERYBODY,
    "CreateTable": _WORKERS,
    "ReportKeptValues": frozenset({Role.OPERATOR}),
    "EndRun": frozenset({Role.OPERATOR}),
    "RemoveRun": frozenset({Role.OPERATOR}),
    "SetConsistency": _CHANGING,
    "PromiseChange": _SERVERS,
    "SetBackups": _SERVERS,
    "CreateCheckpoint": _CHANGING,
    "RestoreCheckpoint": _CHANGING,
    "JoinCheckpoint": _WORKERS,
    "ReportCheckpointPart": _SERVERS | _WORKERS,
    "OpenSession": _PULLING,
    "Push": _WORKERS,
    "Pull": _PULLING,
    "PushPull": _WORKERS,
    "BeginCut": _READERS,
    "EndCut": _READERS,
    "GetRangeStats": _EVERYBODY,
    "EnterCollective": _WORKERS,
    "SettleChange": _SERVERS,
    "Replicate": _SERVERS,
}
"""The roles that may call a method, each with its own session."""


def check(method: str, role: Role) -> None:
    """Refuse a caller whose role has no right to the method.

    Raises:
        NotPermitted: it has none; the message says who has.
    """
    roles = MAY_CALL.get(method, frozenset())
    if role not in roles:
        raise NotPermitted(f"{method} is for {words(roles)}; the caller's role is {role.value}")


def words(roles: frozenset[Role]) -> str:
    """The roles in a sentence: "workers and operators"."""
    names = [f"{role.value}s" for role in Role if role in roles]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or "nobody"
