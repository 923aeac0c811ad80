"""Who may join, and who may call what: the proof, the table of rights, and where the secret is."""

from __future__ import annotations

import hashlib
import hmac
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_core import rights
from ps_core.cluster_view import Role
from ps_core.errors import InvalidConfig, NotPermitted, Recovering, Unauthenticated
from ps_core.rights import CHALLENGE_BYTES, Joiner
from ps_runtime.cluster import join_secret
from pushpull.v1 import parameters_pb2, replication_pb2, scheduler_pb2, types_pb2

SECRET = b"a secret of twenty-one"
CHALLENGE = bytes(range(CHALLENGE_BYTES))
JOINER = Joiner(b"i" * 16, Role.SERVER, None, "h:7000")
WORKER = Joiner(b"i" * 16, Role.WORKER, 0)


@pytest.mark.parametrize("joiner", [JOINER, WORKER])
def test_who_knows_the_secret_is_let_in(joiner: Joiner) -> None:
    proof = joiner.proof(SECRET, CHALLENGE)
    assert len(proof) == 32
    joiner.check(proof, SECRET, CHALLENGE)


def test_without_a_rank_there_is_nothing_in_its_place() -> None:
    assert CHALLENGE_BYTES == 16
    text = f"pushpull-join|{CHALLENGE.hex()}|{'69' * 16}|server||h:7000"
    made = hmac.new(SECRET, text.encode(), hashlib.sha256).digest()
    assert JOINER.proof(SECRET, CHALLENGE) == made


@pytest.mark.parametrize(
    "change",
    [{"registration_id": b"j" * 16}, {"role": Role.WORKER}, {"rank": 0}, {"address": "h:7001"}],
)
def test_a_proof_that_was_overheard_makes_nobody_else_a_node(change: dict[str, Any]) -> None:
    proof = JOINER.proof(SECRET, CHALLENGE)
    with pytest.raises(Unauthenticated, match="is not the cluster's"):
        replace(JOINER, **change).check(proof, SECRET, CHALLENGE)


@pytest.mark.parametrize("change", [{"run": ""}, {"run": "other"}, {"world_size": 3}])
def test_a_proof_is_of_one_run_and_its_size(change: dict[str, Any]) -> None:
    joiner = replace(WORKER, run="nightly", world_size=2)
    proof = joiner.proof(SECRET, CHALLENGE)
    text = f"pushpull-join-run|{CHALLENGE.hex()}|{'69' * 16}|worker|0||nightly|2"
    assert proof == hmac.new(SECRET, text.encode(), hashlib.sha256).digest()
    with pytest.raises(Unauthenticated, match="is not the cluster's"):
        replace(joiner, **change).check(proof, SECRET, CHALLENGE)


@pytest.mark.parametrize("change", [{"identity": "pod-1"}, {"identity": ""}, {"run": "nightly"}])
def test_a_proof_is_of_one_identity(change: dict[str, Any]) -> None:
    joiner = replace(WORKER, identity="pod-0")
    proof = joiner.proof(SECRET, CHALLENGE)
    text = f"pushpull-join-identity|{CHALLENGE.hex()}|{'69' * 16}|worker|0|||0|pod-0"
    assert proof == hmac.new(SECRET, text.encode(), hashlib.sha256).digest()
    with pytest.raises(Unauthenticated, match="is not the cluster's"):
        replace(joiner, **change).check(proof, SECRET, CHALLENGE)


def test_no_address_is_taken_for_a_run() -> None:
    joiner = replace(WORKER, run="nightly", world_size=2)
    other = replace(WORKER, address="|nightly|2")
    assert joiner.proof(SECRET, CHALLENGE) != other.proof(SECRET, CHALLENGE)


def test_a_registration_is_proved_with_its_run() -> None:
    request = scheduler_pb2.RegisterNodeRequest(
        registration_id=b"i" * 16,
        role=types_pb2.NODE_ROLE_WORKER,
        requested_rank=0,
        run="nightly",
        world_size=2,
        identity="pod-0",
    )
    expected = replace(WORKER, run="nightly", world_size=2, identity="pod-0")
    assert join_secret.joiner(request) == expected


def test_a_proof_is_of_one_secret_and_one_challenge() -> None:
    proof = JOINER.proof(SECRET, CHALLENGE)
    for secret, challenge in ((SECRET + b"x", CHALLENGE), (SECRET, CHALLENGE[::-1])):
        with pytest.raises(Unauthenticated):
            JOINER.check(proof, secret, challenge)
    assert WORKER.proof(SECRET, CHALLENGE) != replace(WORKER, rank=None).proof(SECRET, CHALLENGE)


@pytest.mark.parametrize(
    ("proof", "words"), [(b"", "no server joins without"), (b"x" * 32, "of this server is not")]
)
def test_who_is_refused_reads_the_remedy_and_no_secret(proof: bytes, words: str) -> None:
    with pytest.raises(Unauthenticated) as failure:
        JOINER.check(proof, SECRET, CHALLENGE)
    message = failure.value.message
    assert words in message
    assert "PUSHPULL_JOIN_SECRET_FILE" in message
    assert "~/.pushpull/join-secret" in message
    assert "\n" not in message
    assert SECRET.decode() not in message


# --- rights


def test_every_method_of_the_contract_is_in_the_table() -> None:
    services = (
        *scheduler_pb2.DESCRIPTOR.services_by_name.values(),
        *parameters_pb2.DESCRIPTOR.services_by_name.values(),
        *replication_pb2.DESCRIPTOR.services_by_name.values(),
    )
    methods = {name for service in services for name in service.methods_by_name}
    assert methods == rights.MAY_CALL.keys() | rights.NEEDS_NO_SESSION
    assert not rights.MAY_CALL.keys() & rights.NEEDS_NO_SESSION
    assert all(rights.MAY_CALL.values())


def test_a_reader_calls_nothing_that_changes_what_others_see() -> None:
    may = {method for method, roles in rights.MAY_CALL.items() if Role.READER in roles}
    own = {"Heartbeat", "DeregisterNode", "OpenSession", "BeginCut", "EndCut"}
    assert may - own == {"WatchCluster", "GetClusterStatus", "Pull", "GetRangeStats"}


def test_who_may_not_is_told_who_may() -> None:
    rights.check("SetConsistency", Role.OPERATOR)
    with pytest.raises(
        NotPermitted, match="SetConsistency is for workers and operators; the caller's role is read"
    ):
        rights.check("SetConsistency", Role.READER)
    with pytest.raises(NotPermitted, match="Push is for workers;"):
        rights.check("Push", Role.OPERATOR)
    with pytest.raises(NotPermitted, match="Unheard is for nobody;"):
        rights.check("Unheard", Role.SERVER)
    everybody = frozenset(Role)
    assert rights.words(everybody) == "servers, workers, readers and operators"


# --- where the secret is


def test_the_variable_goes_before_the_file_and_the_file_before_the_users_own(
    tmp_path: Path,
) -> None:
    named = tmp_path / "named"
    named.write_text("the secret of the file\n")
    home = tmp_path / "home"
    home.mkdir()
    env = {"HOME": str(home)}
    assert join_secret.found(env) == b""
    own = join_secret.found_or_made(env)
    assert own == join_secret.found(env)
    assert join_secret.place(env) == str(home / ".pushpull" / "join-secret")
    env[join_secret.SECRET_FILE] = str(named)
    assert join_secret.place(env) == str(named)
    assert join_secret.found(env) == join_secret.found_or_made(env) == b"the secret of the file"
    env[join_secret.SECRET] = " the secret of the variable "
    assert join_secret.found(env) == join_secret.found_or_made(env) == b"the secret of the variable"
    assert join_secret.place(env) == "PUSHPULL_JOIN_SECRET"


def test_a_secret_is_drawn_once_and_kept_for_its_owner_alone(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    drawn = join_secret.found_or_made(env)
    assert len(drawn) == 64
    assert join_secret.found_or_made(env) == drawn
    (path,) = (tmp_path / ".pushpull").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    other = {"HOME": str(tmp_path), join_secret.SECRET_FILE: str(tmp_path / "other")}
    assert join_secret.found_or_made(other) not in (b"", drawn)
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o600


def test_one_that_others_can_read_is_refused_with_the_command_that_mends_it(
    tmp_path: Path,
) -> None:
    env = {"HOME": str(tmp_path)}
    join_secret.found_or_made(env)
    path = tmp_path / ".pushpull" / "join-secret"
    path.chmod(0o640)
    with pytest.raises(InvalidConfig, match=f"run: chmod 600 {path}"):
        join_secret.found(env)


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    env = {join_secret.SECRET_FILE: str(tmp_path / "join-secret")}
    with pytest.raises(Recovering, match="not there yet"):
        join_secret.found(env)
    drawn = join_secret.found_or_made(env)
    assert join_secret.found(env) == drawn


@pytest.mark.parametrize("secret", ["too short", "x" * 1025])
def test_one_that_can_be_none_is_named_and_not_shown(tmp_path: Path, secret: str) -> None:
    named = tmp_path / "named"
    named.write_text(secret)
    for env in ({join_secret.SECRET: secret}, {join_secret.SECRET_FILE: str(named)}):
        with pytest.raises(InvalidConfig, match="expected 16 to 1024") as failure:
            join_secret.found_or_made(env)
        assert secret not in failure.value.message


def test_where_none_can_be_kept_a_scheduler_says_so_and_a_local_cluster_has_one_all_the_same(
    tmp_path: Path,
) -> None:
    for env in ({}, {"HOME": str(tmp_path / "nowhere")}):
        with pytest.raises(InvalidConfig, match="set PUSHPULL_JOIN_SECRET to"):
            join_secret.found_or_made(env)
        join_secret.ensure(env)
        assert len(join_secret.found(env)) == 64


def test_what_a_local_cluster_has_already_stays(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    drawn = join_secret.found_or_made(env)
    join_secret.ensure(env)
    assert env == {"HOME": str(tmp_path)}
    assert join_secret.found(env) == drawn


def test_without_a_secret_a_registration_proves_nothing() -> None:
    request = scheduler_pb2.RegisterNodeRequest(registration_id=b"i" * 16, role=2)  # type: ignore[arg-type]
    join_secret.set_proof(request, b"", CHALLENGE)
    assert not request.join_proof
    join_secret.set_proof(request, SECRET, CHALLENGE)
    assert request.join_proof == replace(WORKER, rank=None).proof(SECRET, CHALLENGE)


def test_a_named_file_that_cannot_be_made_is_refused_for_a_local_cluster_too(
    tmp_path: Path,
) -> None:
    """Its name may be mistyped: the others would look for the secret there."""
    env = {"HOME": str(tmp_path), join_secret.SECRET_FILE: str(tmp_path / "absent" / "secret")}
    with pytest.raises(InvalidConfig, match=r"secret \(PUSHPULL_JOIN_SECRET_FILE\): No such"):
        join_secret.ensure(env)
    assert join_secret.SECRET not in env
