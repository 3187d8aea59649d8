"""API keys. A line of a key file has the form `name key [max_concurrent] [requests_per_minute]`."""

import hmac
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from twofold.errors import ConfigurationError
from twofold.scheduling.admission.limits import KeyLimits

_SCHEME = "bearer "
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]+")  # characters allowed in a header value
_UNLIMITED = "-"


class ApiKey:
    """An API key: its name (safe to log), its limits, and the digest of its secret."""

    __slots__ = ("_digest", "limits", "name")

    def __init__(self, name: str, secret: str, limits: KeyLimits | None = None) -> None:
        self.name = name
        self.limits = limits or KeyLimits()
        self._digest = _digest(secret)

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"

    def matches(self, digest: bytes) -> bool:
        """Return whether `digest` is the digest of this key, in constant time."""
        return hmac.compare_digest(digest, self._digest)


class KeyRing:
    """All API keys of a service, with unique names and secrets."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)
        self._last: tuple[bytes, ApiKey | None] = (b"", None)  # the last valid header value, and its key

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(key.name for key in self._keys)})"

    @property
    def limits(self) -> dict[str, KeyLimits]:
        return {key.name: key.limits for key in self._keys}

    def find(self, authorization: str) -> ApiKey | None:
        """Return the API key for the header value `Bearer KEY`, or None if it is unknown."""
        given, (last, key) = authorization.encode(), self._last
        if key is not None and hmac.compare_digest(given, last):
            return key
        scheme, secret = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
        digest = _digest(secret.strip(" \t"))  # not the other spaces of Unicode
        found = None
        for key in self._keys:  # all of them, in constant time
            if key.matches(digest) and scheme.lower() == _SCHEME:
                found = key
        if found is not None:
            self._last = given, found
        return found


def _digest(secret: str) -> bytes:
    return sha256(secret.encode()).digest()


def read_keys(secrets: Sequence[str], file: Path | None) -> KeyRing | None:
    """Return the API keys in `secrets` and `file`, or None without keys. Raises ConfigurationError for invalid keys."""
    # Error messages contain no key.
    keys: list[ApiKey] = []
    taken: set[str] = set()
    for place, name, secret, limits in _entries(secrets, file):
        if not _KEY.fullmatch(secret):
            raise ConfigurationError(f"{place}: an API key must be printable ASCII without spaces")
        if name in {key.name for key in keys}:
            raise ConfigurationError(f"{place}: duplicate key name {name!r}")
        if secret in taken:
            raise ConfigurationError(f"{place}: duplicate key")
        taken.add(secret)
        keys.append(ApiKey(name, secret, limits))
    return KeyRing(keys) if keys else None


def _entries(secrets: Sequence[str], file: Path | None) -> Iterator[tuple[str, str, str, KeyLimits]]:
    for number, secret in enumerate(secrets, start=1):
        yield "--api-key", f"key-{number}", secret, KeyLimits()
    if file is not None:
        yield from _file_entries(file)


def _file_entries(file: Path) -> Iterator[tuple[str, str, str, KeyLimits]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigurationError(f"--api-keys {file} cannot be read: {reason}") from error
    found = False
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        found = True
        place = f"{file}:{number}"
        if not 2 <= len(words) <= 4 or not _NAME.fullmatch(words[0]):
            raise ConfigurationError(
                f"{place}: expected `name key [max_concurrent] [requests_per_minute]`, the name of up to 64 "
                "letters, digits, dots, dashes and underscores"
            )
        bounds = [_bound(place, word) for word in words[2:]] + [None, None]
        limits = KeyLimits(max_concurrent=bounds[0], requests_per_minute=bounds[1])
        yield place, words[0], words[1], limits
    if not found:
        raise ConfigurationError(f"--api-keys {file} has no key in it: write `name key` on a line")


def _bound(place: str, word: str) -> int | None:
    if word == _UNLIMITED:
        return None
    if word.isdecimal() and word.isascii() and 0 < len(word) < 10 and int(word) > 0:
        return int(word)
    raise ConfigurationError(f"{place}: a limit is a positive number, or {_UNLIMITED} for none")
