"""Custom updates that this server's operator has installed, found by their entry points.

Rules:
    - An entry point of the group ``pushpull.updates`` names an update, and gives it its name. Code
      comes from where pip put it, never over the wire.
    - An update that cannot be loaded, breaks the contract or fails its self-test is not run: the
      server logs why, starts without it, and tells the scheduler, which tells clients that ask for
      the update. Other tables lose nothing.
    - If two packages have an update of one name, neither is run.
    - Packages that are installed later count after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_core.update_offer import UpdateOffer
from ps_runtime.cluster import wire
from ps_runtime.observe import logs
from ps_server.values.custom_updates import CheckedUpdate, checked, described
from ps_server.values.update_check import self_test
from pushpull.v1 import scheduler_pb2

GROUP = "pushpull.updates"


@dataclass(frozen=True, slots=True)
class InstalledUpdates:
    """Offers for the scheduler, and the updates that can be run, by name."""

    offers: tuple[UpdateOffer, ...]
    updates: dict[str, CheckedUpdate]

    def to_proto(self) -> list[scheduler_pb2.CustomUpdate]:
        return [
            scheduler_pb2.CustomUpdate(
                name=offer.name,
                hyperparameters=wire.hyperparameters_to_proto(offer.hyperparameters),
                fingerprint=offer.fingerprint,
                problem=offer.problem,
            )
            for offer in self.offers
        ]


def installed_updates() -> InstalledUpdates:
    """Load the installed updates. Logs a line for those that can be run, and one for each other.

    Raises:
        InvalidConfig: there are too many to register, or a name is too long.
    """
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        by_name.setdefault(entry.name, []).append(entry)
    if len(by_name) > limits.MAX_CUSTOM_UPDATE_COUNT:
        raise InvalidConfig(
            f"{len(by_name)} updates of the group '{GROUP}' are installed; expected at most "
            f"{limits.MAX_CUSTOM_UPDATE_COUNT}"
        )
    offers, updates = [], {}
    for name, entries in sorted(by_name.items()):
        offer, update = _offered(name, entries)
        offers.append(offer.validated())
        if update is not None:
            updates[name] = update
        else:
            logs.warning("update_not_offered", update=name, reason=offer.problem)
    if updates:
        usable = (f"{offer.name} ({offer.fingerprint})" for offer in offers if not offer.problem)
        logs.info("updates_offered", updates=", ".join(usable))
    return InstalledUpdates(tuple(offers), updates)


def _offered(name: str, entries: list[EntryPoint]) -> tuple[UpdateOffer, CheckedUpdate | None]:
    sources = sorted({_source(entry) for entry in entries})
    if len(entries) > 1:
        return _problem(name, f"several packages have it: {', '.join(sources)}"), None
    try:
        named = entries[0].load()
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - whatever a stranger's package does
        text = f"{entries[0].value} of {sources[0]} cannot be loaded: {described(failure)}"
        return _problem(name, text), None
    try:
        update = checked(name, named)
        fingerprint = f"{sources[0]};selftest={self_test(update)}"
        return UpdateOffer(name, update.defaults, fingerprint).validated(), update
    except InvalidConfig as error:
        return _problem(name, f"{error.message} ({sources[0]})"), None


def _problem(name: str, text: str) -> UpdateOffer:
    encoded = text.encode()[: limits.MAX_CUSTOM_UPDATE_PROBLEM_BYTES]
    return UpdateOffer(name, problem=encoded.decode(errors="ignore"))


def _source(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
