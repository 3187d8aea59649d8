"""API keys from flags and from a file with a key on each line: `name key [max_concurrent] [requests_per_minute]`."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from twofold.errors import ConfigurationError
from twofold.scheduling.admission_limits import KeyLimits
from twofold.serving.gateway.keys import ApiKey, KeyRing

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]+")  # what a header can carry
_UNLIMITED = "-"


def read_keys(secrets: Sequence[str], file: Path | None) -> KeyRing | None:
    """The keys given one by one (named key-1, key-2 …) and those of the file; None where there are none at all.

    Raises ConfigurationError, which never quotes a key.
    """
    keys: list[ApiKey] = []
    taken: set[str] = set()
    for place, name, secret, limits in _entries(secrets, file):
        if not _KEY.fullmatch(secret):
            raise ConfigurationError(f"{place}: an API key is made of printable ASCII without spaces")
        if name in {key.name for key in keys}:
            raise ConfigurationError(f"{place}: there is a key of the name {name!r} already")
        if secret in taken:
            raise ConfigurationError(f"{place}: the same key was given before")
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
