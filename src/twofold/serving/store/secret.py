"""The secret that a service's keys of blocks begin with, kept beside the blocks so that its next start finds them."""

import os
import secrets
from pathlib import Path

from twofold.errors import ConfigurationError

_BYTES = 32


def kept_secret(directory: Path) -> bytes:
    """That of this directory, made when it is first asked for; raises ConfigurationError where it cannot be kept."""
    path = directory / "secret"
    try:
        if path.exists() and len(secret := path.read_bytes()) == _BYTES:
            return secret
        secret = secrets.token_bytes(_BYTES)
        whole = path.with_suffix(".new")
        whole.unlink(missing_ok=True)
        with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123  (its mode)
            file.write(secret)
        whole.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be kept: {error.strerror}") from error
    return secret
