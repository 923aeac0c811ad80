"""Who answers at a server's address: a node, or somebody else who has its address now.

Rules:
    - An address is no node. Whoever answers there is the server only if its own word says so: the
      cluster, the node id and the incarnation that the view has for the address.
    - Anything else that comes from there, errors included, is as if nobody answered: a dead
      address, tried again until the view says otherwise.

What it deliberately does not do: guard against a liar. Who has the cluster's key can be anybody.
"""

from __future__ import annotations

from ps_core.cluster_view import Node
from ps_core.errors import PushpullError, Recovering, WaitExpired
from ps_runtime.grpc.retry import is_retryable


class AddressTaken(Recovering):
    """Somebody else answers at a server's address."""


def check_answers(node: Node, cluster_id: str, named: tuple[str, int, int]) -> None:
    """Refuse an answer of another than `node`.

    Args:
        node: the server that is meant.
        cluster_id: its cluster.
        named: the cluster, the node id and the incarnation that the answer names.

    Raises:
        AddressTaken: somebody else has its address.
    """
    if named == (cluster_id, node.node_id, node.incarnation):
        return
    cluster, node_id, incarnation = named
    if not node_id:
        who = "somebody who is no server"
    elif cluster != cluster_id:
        who = f"server {node_id} of cluster '{cluster[:100]}'"
    else:
        who = f"server {node_id} (incarnation {incarnation})"
    raise AddressTaken(f"{who} answers there")


def as_of_unknown(error: PushpullError) -> PushpullError:
    """An error of whoever answered at an address before it was known who that is."""
    if is_retryable(error) or isinstance(error, WaitExpired):
        return error
    return AddressTaken(f"whoever answers there says: {error.message}")
