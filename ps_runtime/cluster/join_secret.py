"""The join secret, which every process of a cluster has.

Rules:
    - It is PUSHPULL_JOIN_SECRET, else in the file PUSHPULL_JOIN_SECRET_FILE, else in
      ~/.pushpull/join-secret: one user's processes on one host need no setting.
    - The process that starts a cluster makes a missing file, for its owner alone. Where the user
      has no place for one, a cluster of one program and its children has a secret in their
      environment. A cluster that others join by hand is refused there; a named file that cannot be
      made is refused to all.
    - The secret is in no flag, no log line, no error and no other file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ps_core.errors import InvalidConfig, Recovering
from ps_core.rights import Joiner
from ps_runtime.cluster import wire
from pushpull.v1 import scheduler_pb2

SECRET = "PUSHPULL_JOIN_SECRET"  # noqa: S105 - the variable's name
SECRET_FILE = "PUSHPULL_JOIN_SECRET_FILE"  # noqa: S105
MIN_BYTES = 16
MAX_BYTES = 1024

_OWN_FILE = Path(".pushpull", "join-secret")
_DRAWN_BYTES = 32


def found(env: Mapping[str, str] = os.environ) -> bytes:
    """The secret of this process; empty if it has none. Blocking: reads a file.

    Raises:
        InvalidConfig: it is too short or too long, or its file cannot be read, or the user's own
            file is open to others.
        Recovering: the file that PUSHPULL_JOIN_SECRET_FILE names is not there yet.
    """
    if given := env.get(SECRET):
        return _checked(given.encode(), SECRET)
    if named := env.get(SECRET_FILE):
        secret = _read(Path(named))
        if secret is None:
            raise Recovering(f"the join secret is not there yet: no file {named} ({SECRET_FILE})")
        return secret
    own = _own_file(env)
    return b"" if own is None else _read(own, is_own=True) or b""


def found_or_made(env: Mapping[str, str] = os.environ) -> bytes:
    """As `found`; a missing secret is drawn and written, or InvalidConfig has the remedy."""
    if env.get(SECRET):
        return found(env)
    named = env.get(SECRET_FILE)
    path = Path(named) if named else _own_file(env)
    if path is None:
        raise _UnkeptError("a file: this user has no home directory")
    try:
        _make(path, is_own=not named)
    except OSError as error:
        place = f"{path} ({SECRET_FILE})" if named else f"{path}"
        raise _UnkeptError(f"{place}: {error.strerror}") from None
    return _read(path, is_own=not named) or b""


def place(env: Mapping[str, str] = os.environ) -> str:
    """The name of the variable or the file that has the secret, for people."""
    own = _own_file(env)
    return SECRET if env.get(SECRET) else env.get(SECRET_FILE) or str(own)


def set_proof(request: scheduler_pb2.RegisterNodeRequest, secret: bytes, challenge: bytes) -> None:
    """Put a proof of the secret into a registration; without a secret, do nothing."""
    if secret:
        request.join_proof = joiner(request).proof(secret, challenge)


def joiner(request: scheduler_pb2.RegisterNodeRequest) -> Joiner:
    """The joining node of a registration; InvalidConfig if its role is unset or unknown."""
    role = wire.role_from_proto(request.role)
    rank = request.requested_rank if request.HasField("requested_rank") else None
    asked = request.registration_id, role, rank, request.address
    return Joiner(*asked, request.run, request.world_size, request.identity)


def _own_file(env: Mapping[str, str]) -> Path | None:
    home = env.get("HOME")
    return Path(home) / _OWN_FILE if home else None


def _read(path: Path, *, is_own: bool = False) -> bytes | None:
    """The secret in a file; None if there is no file."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_BYTES + 2)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidConfig(f"the join secret in {path} cannot be read: {error.strerror}") from None
    if is_own and stat.S_IMODE(mode) & 0o077:
        raise InvalidConfig(f"others may read the join secret; run: chmod 600 {path}")
    return _checked(content, str(path))


def _checked(content: bytes, where: str) -> bytes:
    secret = content.strip()
    if not MIN_BYTES <= len(secret) <= MAX_BYTES:
        raise InvalidConfig(
            f"the join secret in {where} has {len(secret)} bytes; expected {MIN_BYTES} to "
            f"{MAX_BYTES}, such as openssl rand -hex 32 prints"
        )
    return secret


def _make(path: Path, *, is_own: bool) -> None:
    """Draw a secret and write the file atomically, unless it exists."""
    if path.exists():
        return
    if is_own:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(_DRAWN_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):  # another process was faster
            path.hardlink_to(unfinished)
    finally:
        unfinished.unlink()


def ensure(env: MutableMapping[str, str]) -> None:
    """Have a secret before a local cluster is started. If the user has no place for a file, it goes
    into `env`, which the cluster's processes inherit.

    Blocking, Raises: as `found`; InvalidConfig if the file that PUSHPULL_JOIN_SECRET_FILE names
        cannot be made.
    """
    try:
        found_or_made(env)
    except _UnkeptError:
        if env.get(SECRET_FILE):
            raise
        env[SECRET] = secrets.token_hex(_DRAWN_BYTES)


class _UnkeptError(InvalidConfig):
    """No file can keep a secret."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"the cluster has no join secret, and one cannot be kept in {where}; set {SECRET} to "
            f"what openssl rand -hex 32 prints, the same for every process of the cluster"
        )
