"""The cluster key: one secret in one file, from which the keys of both ends of a connection follow."""

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twofold.errors import ConfigurationError

SECRET_BYTES = 32
_NOTE = "# Twofold cluster key. Whoever has it may join the service, and read and write all that it computes."


class ClusterKey:
    """The key pairs (Curve25519) of those that listen and of those that call, made from one secret.

    There are two, so that what one end says can never be passed off as what the other says. Keys are 32 bytes each,
    and secret ones appear in no representation.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a cluster key has {SECRET_BYTES} bytes")
        self.server_secret = _derived(secret, b"twofold server")
        self.client_secret = _derived(secret, b"twofold client")

    def __repr__(self) -> str:
        return "ClusterKey(…)"


def write_key(path: Path) -> None:
    """Write a new key to a file that only its owner may read; raises ConfigurationError, also where there is one."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, 0o600)
            file.write(f"{_NOTE}\n{secrets.token_hex(SECRET_BYTES)}\n")
    except FileExistsError as error:
        raise ConfigurationError(
            f"{path} exists already: remove it first, or write to another file"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error


def read_key(path: Path) -> ClusterKey:
    """The key in a file; raises ConfigurationError, which quotes nothing of it."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096)
    except OSError as error:
        raise ConfigurationError(f"--cluster-key {path} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(f"--cluster-key {path} is open to other users: chmod 600 {path}")
    if found.st_uid not in {os.geteuid(), 0}:
        raise ConfigurationError(f"--cluster-key {path} belongs to another user, who may change it: copy it")
    lines = [line for line in text.split(b"\n") if line.strip() and not line.startswith(b"#")]
    try:
        return ClusterKey(bytes.fromhex(lines[0].decode("ascii")))
    except (IndexError, ValueError) as error:
        sentence = f"--cluster-key {path} holds no cluster key: make one with twofold keygen"
        raise ConfigurationError(sentence) from (error if isinstance(error, IndexError) else None)


@contextmanager
def held_key(text: str) -> Iterator[Path]:
    """A file with this key that lies in memory only, and that this process and its children can read meanwhile."""
    fd = os.memfd_create("twofold-key", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, text.encode("ascii"))
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def _derived(secret: bytes, name: bytes) -> bytes:
    return hashlib.blake2b(key=secret, person=name, digest_size=SECRET_BYTES).digest()
