"""The identity of the node that answers at a server's address.

Rules:
    - A node is the server only if it names the cluster, node id and incarnation of the view.
    - Anything else, errors included, is no answer: a dead address, tried until the view changes.

This is no protection from a liar: a process with the cluster's key can be any node.
"""

from __future__ import annotations

from ps_core.cluster_view import Node
from ps_core.errors import PushpullError, Recovering, WaitExpired
from ps_runtime.grpc.retry import is_retryable


class AddressTaken(Recovering):
    """Another process answers at a server's address."""


def check_answers(node: Node, cluster_id: str, named: tuple[str, int, int]) -> None:
    """Raise AddressTaken for an answer of another than `node`, a server of `cluster_id`. `named` is
    the cluster, the node id and the incarnation that the answer names.
    """
    if named == (cluster_id, node.node_id, node.incarnation):
        return
    cluster, node_id, incarnation = named
    if not node_id:
        who = "a process that is no server"
    elif cluster != cluster_id:
        who = f"server {node_id} of cluster '{cluster[:100]}'"
    else:
        who = f"server {node_id} (incarnation {incarnation})"
    raise AddressTaken(f"{who} answers there")


def as_of_unknown(error: PushpullError) -> PushpullError:
    """The error of an answer that came before the answering node was known."""
    if is_retryable(error) or isinstance(error, WaitExpired):
        return error
    return AddressTaken(f"an unknown process answers there: {error.message}")
