"""Callers: sessions that this server has checked, and those that it no longer accepts."""

from __future__ import annotations

from ps_core import rights
from ps_core.cluster_view import ClusterView, Node, NodeState, Session
from ps_core.errors import Fenced, Unauthenticated
from ps_core.keys import NodeId
from ps_runtime.cluster import wire
from pushpull.v1 import types_pb2


class Sessions:
    """The sessions of one server's callers.

    Args:
        own: the server's own session.
        token_key: what genuine tokens are made with.
    """

    def __init__(self, own: Session, token_key: bytes) -> None:
        self._own = own
        self._token_key = token_key
        self._known: set[Session] = set()
        self._left: dict[NodeId, Node] = {}

    @property
    def count(self) -> int:
        """Sessions that have called."""
        return len(self._known)

    @property
    def gone(self) -> list[Node]:
        """The nodes that were declared gone."""
        return [node for node in self._left.values() if node.state is NodeState.GONE]

    def observe(self, view: ClusterView) -> list[Session]:
        """Take a new view; returns the sessions that it ends."""
        self._left = {node.node_id: node for node in view.nodes if not node.state.is_member}
        # Evaluators come and go; those that the scheduler forgot would be checked again.
        known = {
            s for s in self._known if s.node_id in view.nodes_by_id and s.node_id not in self._left
        }
        forgotten, self._known = self._known - known, known
        return list(forgotten)

    def admit(self, message: types_pb2.SessionIdentity, method: str) -> Session:
        """Check the session of a caller of a method.

        Raises:
            NotPermitted: its role may not (`ps_core.rights`).
            Unauthenticated: its token was not made for it by this cluster's scheduler.
            Fenced: it belongs to another cluster or timeline, or has left this one, or is gone.
        """
        if not message.session_token:
            raise Unauthenticated(rights.NO_SESSION)
        session = wire.session_from_proto(message)
        if session not in self._known:
            self._check(session)
        rights.check(method, session.role)
        self._known.add(session)
        return session

    def _check(self, session: Session) -> None:
        """Check that a new session is one of this cluster's."""
        if session.cluster_id != self._own.cluster_id:
            raise Fenced("the session is of another cluster than this server's: register again")
        if session.timeline != self._own.timeline:
            raise Fenced("the session is of another timeline than this server's: register again")
        if not session.is_genuine(self._token_key):
            raise Unauthenticated(
                f"the session token of node {session.node_id} is wrong; send the session as "
                "RegisterNode gave it"
            )
        left = self._left.get(session.node_id)
        if left is not None:
            raise Fenced(left.fence_words)
