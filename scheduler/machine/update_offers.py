"""Custom updates that servers offer: all agree, and tables use no others.

Two servers with an update of one name have the same hyperparameters, defaults and fingerprint.
Otherwise the bits of a table would depend on the placement of its blocks. A table's update is on
every server that has not left, whichever gets its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ps_core import limits
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.errors import InvalidConfig, listed
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table_spec import TableSpec
from ps_core.update_offer import UpdateOffer
from scheduler.machine.state import ClusterState, Registration

_LISTED_COUNT = 8

Describe = Callable[[Node], str]  # says who a node is and when it was last heard


def check_offers(request: Registration) -> None:
    """Raise InvalidConfig for offers that are wrong in themselves."""
    offers = request.custom_updates
    if offers and request.role is not Role.SERVER:
        raise InvalidConfig(
            f"custom_updates has {len(offers)} entries; a {request.role.value} has none"
        )
    names = {offer.name for offer in offers}
    if len(offers) > limits.MAX_CUSTOM_UPDATE_COUNT or len(names) < len(offers):
        raise InvalidConfig(
            f"custom_updates has {len(offers)} entries of {len(names)} names; expected at most "
            f"{limits.MAX_CUSTOM_UPDATE_COUNT}, each of its own name"
        )
    for offer in offers:
        offer.validated()


def check_agreement(request: Registration, state: ClusterState, describe: Describe) -> None:
    """Raise InvalidConfig for a server that differs from another, or lacks a table's update."""
    for node, theirs in _present(state):
        for offer in _usable(request.custom_updates):
            other = theirs.get(offer.name)
            if other is not None and other != offer:
                raise InvalidConfig(
                    f"the server's custom update '{offer.name}' is {_shown(offer)}; "
                    f"{describe(node)} has {_shown(other)}. Servers of one cluster need the same, "
                    f"or their results differ"
                )
    for table in state.tables.values():
        name = table.spec.optimizer.custom_update
        if name and name not in {offer.name for offer in _usable(request.custom_updates)}:
            raise InvalidConfig(
                f"table '{table.spec.name}' uses the custom update '{name}', which the server "
                f"lacks; {_had(request.custom_updates, name)}"
            )


def completed(spec: TableSpec, state: ClusterState, describe: Describe) -> TableSpec:
    """The spec with all hyperparameters of its custom update; unchanged without one, or before any
    server has registered.
    """
    optimizer = spec.optimizer
    if optimizer.kind is not OptimizerKind.CUSTOM:
        return spec
    name = optimizer.custom_update
    found: UpdateOffer | None = None
    for node, offers in _present(state):
        if name not in offers:
            registered = state.members[node.node_id].registration.custom_updates
            raise InvalidConfig(
                f"table '{spec.name}' asks for the custom update '{name}', which "
                f"{describe(node)} lacks; {_had(registered, name)}"
            )
        found = offers[name]
    if found is None:
        return spec
    defaults = replace(optimizer, hyperparameters=found.hyperparameters)
    merged = defaults.merged(optimizer.hyperparameters)
    return replace(spec, optimizer=replace(optimizer, hyperparameters=merged))


def _present(state: ClusterState) -> Iterator[tuple[Node, dict[str, UpdateOffer]]]:
    """Servers that have not left, with the usable offers of each by name."""
    for node in state.nodes_of(Role.SERVER):
        if node.state is not NodeState.LEFT:
            offers = state.members[node.node_id].registration.custom_updates
            yield node, {offer.name: offer for offer in _usable(offers)}


def _usable(offers: tuple[UpdateOffer, ...]) -> Iterator[UpdateOffer]:
    return (offer for offer in offers if not offer.problem)


def _had(offers: tuple[UpdateOffer, ...], name: str) -> str:
    """Words on the offers of a server that lacks the update `name`."""
    broken = next((offer for offer in offers if offer.name == name), None)
    if broken is not None:
        return f"it cannot run it: {broken.problem}"
    names = [f"'{each}'" for each in sorted(offer.name for offer in _usable(offers))]
    return f"it has {listed(names, _LISTED_COUNT) or 'none'}"


def _shown(offer: UpdateOffer) -> str:
    pairs = ", ".join(f"{name}={value:g}" for name, value in offer.hyperparameters)
    return f"'{offer.fingerprint}' with {pairs or 'no hyperparameters'}"
