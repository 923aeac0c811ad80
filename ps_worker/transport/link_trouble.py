"""Why a server cannot be reached, and since when: one log line per transition."""

from __future__ import annotations

from ps_core.cluster_view import Node
from ps_core.errors import PushpullError, Recovering
from ps_runtime.cluster.node_identity import AddressTaken
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s


class Trouble:
    """The trouble with one server, if there is any.

    Args:
        node: the server.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._reason = ""
        self._since_s = 0.0
        self._is_taken = False

    @property
    def words(self) -> str:
        """Why the server cannot be reached, for a person; empty if it can."""
        if not self._reason:
            return ""
        return (
            f"server {self._node.node_id} at {self._node.address} cannot be reached for "
            f"{self.lasted_s:.1f} s: {self._reason}"
        )

    @property
    def lasted_s(self) -> float:
        """For how long it could not be reached; 0 if it can."""
        return now_s() - self._since_s if self._reason else 0.0

    def note(self, error: PushpullError) -> None:
        """It could not be reached."""
        is_taken = isinstance(error, AddressTaken)
        if not self._reason:
            self._since_s = now_s()
            # Only a server that answers says when to ask again: that is no trouble so far.
            answered = isinstance(error, Recovering) and error.retry_after_ms > 0
            event = "server_not_ready" if answered else "server_unreachable"
            self._log(event, error, is_odd=not answered)
        elif is_taken and not self._is_taken:
            self._log("server_address_taken", error, is_odd=True)
        self._is_taken = is_taken
        self._reason = error.message

    def end(self) -> None:
        """It was reached."""
        if self._reason:
            self._reason = ""
            logs.info("server_reached", server=self._node.node_id, address=self._node.address)

    def _log(self, event: str, error: PushpullError, *, is_odd: bool) -> None:
        log = logs.warning if is_odd else logs.info
        log(event, server=self._node.node_id, address=self._node.address, error=error.message)
