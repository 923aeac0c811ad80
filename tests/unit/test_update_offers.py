"""The scheduler knows which custom updates the servers have, and lets nothing else come to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core import limits
from ps_core.cluster_view import Role, Session
from ps_core.errors import InvalidConfig, TableExists
from ps_core.tables.optimizers import Hyperparameters, OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec
from ps_core.update_offer import UpdateOffer
from ps_runtime.cluster import wire
from scheduler.machine import view_size
from scheduler.machine.cluster import Created, Parked
from tests.unit.cluster_harness import SPEC, Harness, asking, refused

NUMBERS = (("beta1", 0.9), ("lr", 0.1))
LION = UpdateOffer("lion", NUMBERS, "zoo 1.0;selftest=aa")
BROKEN = UpdateOffer("lion", problem="zoo 1.0 cannot be loaded: ImportError: no tail")
TIGER = UpdateOffer("tiger", (), "zoo 1.0;selftest=bb")


def asks(name: str = "lion", numbers: Hyperparameters = ()) -> OptimizerSpec:
    return OptimizerSpec(OptimizerKind.CUSTOM, numbers, custom_update=name)


def table(update: str = "lion", numbers: Hyperparameters = ()) -> TableSpec:
    return replace(SPEC, optimizer=asks(update, numbers))


@pytest.fixture
def cluster() -> Harness:
    return Harness()


def joined(cluster: Harness, *offers: tuple[UpdateOffer, ...]) -> Session:
    """Servers with these updates, and a worker."""
    for each in offers:
        cluster.join(Role.SERVER, custom_updates=each)
    return cluster.join(Role.WORKER)


def test_a_table_gets_the_numbers_that_nobody_gave(cluster: Harness) -> None:
    worker = joined(cluster, (LION,), (TIGER, LION))
    created = cluster.create(worker, table(numbers=(("lr", 0.5),)))
    assert isinstance(created, Created)
    assert created.table.spec.optimizer.hyperparameters == (("beta1", 0.9), ("lr", 0.5))
    assert created.table.spec.optimizer.label == "custom:lion"
    assert created.table.step_hyperparameters.merged((("beta1", 0.0),)) == (
        ("beta1", 0.0),
        ("lr", 0.5),
    )


def test_however_it_is_written_it_is_the_same_table(cluster: Harness) -> None:
    worker = joined(cluster, (LION,), (LION,))
    first = cluster.create(worker, table())
    assert cluster.create(worker, table(numbers=NUMBERS)) == first
    with pytest.raises(TableExists, match=r"hyperparameters.* is .*'lr', 0.1.* got .*0.2"):
        cluster.create(worker, table(numbers=(("lr", 0.2),)))


def test_a_server_that_lacks_it_is_named_with_what_it_has(cluster: Harness) -> None:
    worker = joined(cluster, (LION,), (TIGER,))
    words = ("table 'model' asks for the custom update 'lion'", "server node 2 at h2:70", "'tiger'")
    refused(InvalidConfig, *words, by=lambda: cluster.create(worker, table()), of=cluster)


def test_a_server_without_any_says_none(cluster: Harness) -> None:
    worker = joined(cluster, ())
    words = ("server node 1 at h1:70", "lacks; it has none")
    refused(InvalidConfig, *words, by=lambda: cluster.create(worker, table()), of=cluster)


def test_a_server_that_cannot_run_it_says_why(cluster: Harness) -> None:
    worker = joined(cluster, (LION,), (BROKEN,))
    words = ("server node 2", "cannot run it: zoo 1.0 cannot be loaded: ImportError: no tail")
    refused(InvalidConfig, *words, by=lambda: cluster.create(worker, table()), of=cluster)


def test_a_silent_server_counts_and_one_that_left_does_not(cluster: Harness) -> None:
    servers = [cluster.join(Role.SERVER, custom_updates=each) for each in ((LION,), (), (LION,))]
    worker = cluster.join(Role.WORKER)
    cluster.pass_time(4, servers[0], servers[2], worker)
    with pytest.raises(InvalidConfig, match=r"server node 2 at h2:70 \(silent, .*\) lacks"):
        cluster.create(worker, table())
    cluster.leave(servers[1])
    assert isinstance(cluster.create(worker, table()), Created)


def test_a_creation_that_waits_is_checked_when_the_servers_come(cluster: Harness) -> None:
    worker = joined(cluster)
    assert isinstance(cluster.create(worker, table()), Parked)
    cluster.join(Role.SERVER, custom_updates=(LION,))
    assert isinstance(cluster.create(worker, table()), Parked)
    cluster.join(Role.SERVER)
    with pytest.raises(InvalidConfig, match="server node 3"):
        cluster.create(worker, table())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((("momentum", 0.1),), "custom:lion has no hyperparameter 'momentum'; it has beta1, lr"),
        ((("lr", float("inf")),), "'lr' is inf; expected a finite number"),
        ((("lr", 1e300),), "expected a magnitude of at most 1e\\+18"),
    ],
)
def test_wrong_numbers_are_refused(cluster: Harness, numbers: Hyperparameters, words: str) -> None:
    worker = joined(cluster, (LION,), (LION,))
    with pytest.raises(InvalidConfig, match=words):
        cluster.create(worker, table(numbers=numbers))


def test_its_numbers_have_no_bounds_of_ours(cluster: Harness) -> None:
    worker = joined(cluster, (LION,), (LION,))
    created = cluster.create(worker, table(numbers=(("beta1", -3.0),)))
    assert isinstance(created, Created)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (OptimizerSpec(OptimizerKind.CUSTOM), "custom with custom_update ''"),
        (OptimizerSpec(OptimizerKind.SGD, custom_update="lion"), "sgd with custom_update 'lion'"),
        (replace(asks(), maximize=True), "maximize True"),
        (replace(asks(), nesterov=True), "custom has no nesterov"),
        (replace(asks(), amsgrad=True), "custom has no amsgrad"),
        (replace(asks(), centered=True), "custom has no centered"),
        (asks("é" * 33), "custom_update has 66 bytes; expected at most 64"),
    ],
)
def test_what_does_not_go_together_is_refused(
    cluster: Harness, spec: OptimizerSpec, words: str
) -> None:
    worker = joined(cluster, (LION,), (LION,))
    with pytest.raises(InvalidConfig, match=words):
        cluster.create(worker, replace(SPEC, optimizer=spec))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(LION, fingerprint="zoo 1.1;selftest=aa"), "'zoo 1.1;selftest=aa'"),
        (replace(LION, fingerprint="zoo 1.0;selftest=ac"), "'zoo 1.0;selftest=ac'"),
        (replace(LION, hyperparameters=(("lr", 0.1),)), "with lr=0.1;"),
        (replace(LION, hyperparameters=(("beta1", 0.9), ("lr", 0.2))), "lr=0.2"),
    ],
)
def test_a_server_that_has_another_one_of_that_name_is_refused(
    cluster: Harness, other: UpdateOffer, words: str
) -> None:
    joined(cluster, (LION, TIGER))
    refused(
        InvalidConfig,
        "the server's custom update 'lion' is ",
        words,
        "server node 1 at h1:70",
        "has 'zoo 1.0;selftest=aa' with beta1=0.9, lr=0.1",
        by=lambda: cluster.join(Role.SERVER, custom_updates=(other,)),
        of=cluster,
    )


def test_one_that_cannot_run_it_differs_from_nobody(cluster: Harness) -> None:
    joined(cluster, (LION,), (BROKEN,), (replace(BROKEN, problem="because"),))


@pytest.mark.parametrize(
    ("offers", "words"),
    [((), "it has none"), ((TIGER,), "it has 'tiger'"), ((BROKEN,), "it cannot run it: zoo 1.0")],
)
def test_a_server_that_comes_without_what_a_table_uses_is_refused(
    cluster: Harness, offers: tuple[UpdateOffer, ...], words: str
) -> None:
    worker = joined(cluster, (LION,), (LION,))
    cluster.create(worker, table())
    refused(
        InvalidConfig,
        "table 'model' uses the custom update 'lion', which the server lacks",
        words,
        by=lambda: cluster.join(Role.SERVER, custom_updates=offers),
        of=cluster,
    )
    cluster.join(Role.SERVER, custom_updates=(LION,))


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        (UpdateOffer("", (), "f"), "its name has 0 bytes; expected 1 to 64"),
        (UpdateOffer("n" * 65, (), "f"), "its name has 65 bytes"),
        (UpdateOffer("n"), "its fingerprint has 0 bytes; expected 1 to 300"),
        (UpdateOffer("n", (), "f" * 301), "its fingerprint has 301 bytes"),
        (UpdateOffer("n", (), "f", "p" * 501), "its problem has 501 bytes"),
        (UpdateOffer("n", (("lr", float("nan")),), "f"), "the default of 'lr' is nan"),
        (UpdateOffer("n", (("lr", 1e19),), "f"), "the default of 'lr' is 1e"),
        (UpdateOffer("n", (("l" * 65, 1.0),), "f"), "of at most 64 bytes"),
        (UpdateOffer("n", (("initial_lr", 1.0),), "f"), "a hyperparameter 'initial_lr'"),
        (UpdateOffer("n", tuple((f"n{i:02}", 0.0) for i in range(33)), "f"), "expected at most 32"),
    ],
)
def test_an_offer_that_is_wrong_in_itself_is_refused(
    cluster: Harness, offer: UpdateOffer, words: str
) -> None:
    refused(
        InvalidConfig,
        words,
        by=lambda: cluster.join(Role.SERVER, custom_updates=(offer,)),
        of=cluster,
    )


def test_too_many_two_of_a_name_and_a_workers_are_refused(cluster: Harness) -> None:
    many = tuple(replace(LION, name=f"n{i}") for i in range(limits.MAX_CUSTOM_UPDATE_COUNT + 1))
    for role, offers, words in (
        (Role.SERVER, many, "65 entries of 65 names; expected at most 64"),
        (Role.SERVER, (LION, TIGER, LION), "3 entries of 2 names"),
        (Role.WORKER, (LION,), "a worker has none"),
        (Role.READER, (LION,), "a reader has none"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            cluster.join(role, custom_updates=offers)


def test_a_registration_that_comes_again_with_others_is_refused(cluster: Harness) -> None:
    cluster.join(Role.SERVER, custom_updates=(LION,))
    again = asking(Role.SERVER, 1, custom_updates=(TIGER,))
    with pytest.raises(InvalidConfig, match=r"custom_updates .*lion.*; it came again with .*tiger"):
        cluster.cluster.register(again, 100.0)


def test_a_view_has_room_for_the_longest_of_them(cluster: Harness) -> None:
    name = "n" * limits.MAX_CUSTOM_UPDATE_NAME_BYTES
    long = "l" * (limits.MAX_HYPERPARAMETER_NAME_BYTES - 2)
    numbers = tuple((f"{long}{i:02}", 0.1) for i in range(limits.MAX_HYPERPARAMETER_COUNT))
    offer = (UpdateOffer(name, numbers, "f"),)
    worker = joined(cluster, offer, offer)
    created = cluster.create(worker, table(update=name))
    assert isinstance(created, Created)
    spec = created.table.spec
    assert wire.spec_to_proto(spec).ByteSize() + 40 <= view_size.table_bytes(spec)
    assert wire.spec_from_proto(wire.spec_to_proto(spec)) == spec
