"""The cluster key: a secret in a file, from which both ends of a connection derive their key pairs."""

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twofold.errors import ConfigurationError

SECRET_BYTES = 32
_NOTE = "# Twofold cluster key. Its holders can join the service and read and write all of its data."


class ClusterKey:
    """Curve25519 secret keys (32 bytes each) of servers and clients, derived from one secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a cluster key needs {SECRET_BYTES} bytes")
        # Different keys, so a server's message cannot be replayed as a client's, or vice versa.
        self.server_secret = _derived(secret, b"twofold server")
        self.client_secret = _derived(secret, b"twofold client")

    def __repr__(self) -> str:
        return "ClusterKey(…)"


def write_key(path: Path) -> None:
    """Write a new key to a file that only its owner can read. Raises ConfigurationError if the file exists."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, 0o600)
            file.write(f"{_NOTE}\n{secrets.token_hex(SECRET_BYTES)}\n")
    except FileExistsError as error:
        raise ConfigurationError(f"{path} already exists: remove it or choose another file") from error
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error


def read_key(path: Path) -> ClusterKey:
    """Read a key file. Raises ConfigurationError if the file is invalid or accessible to other users."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096)
    except OSError as error:
        raise ConfigurationError(f"cannot read --cluster-key {path}: {error.strerror}") from error
    if stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(f"--cluster-key {path} is accessible to other users: chmod 600 {path}")
    if found.st_uid not in {os.geteuid(), 0}:
        raise ConfigurationError(f"--cluster-key {path} belongs to another user: use your own copy")
    lines = [line for line in text.split(b"\n") if line.strip() and not line.startswith(b"#")]
    try:
        return ClusterKey(bytes.fromhex(lines[0].decode("ascii")))
    except (IndexError, ValueError) as error:
        sentence = f"--cluster-key {path} contains no cluster key: create one with twofold keygen"
        raise ConfigurationError(sentence) from (error if isinstance(error, IndexError) else None)


@contextmanager
def held_key(text: str) -> Iterator[Path]:
    """Yield the path of an in-memory key file, which this process and its children can read."""
    fd = os.memfd_create("twofold-key", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, text.encode("ascii"))
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def _derived(secret: bytes, name: bytes) -> bytes:
    return hashlib.blake2b(key=secret, person=name, digest_size=SECRET_BYTES).digest()
