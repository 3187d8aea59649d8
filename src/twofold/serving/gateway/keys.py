"""API keys: known by name everywhere, and kept as digests, so that there is no secret here to give away."""

import hmac
from collections.abc import Sequence
from hashlib import sha256

from twofold.scheduling.admission_limits import KeyLimits

_SCHEME = "bearer "


class ApiKey:
    """One key: its name, which may be logged, and what it may ask for. The key itself is not kept."""

    __slots__ = ("_digest", "limits", "name")

    def __init__(self, name: str, secret: str, limits: KeyLimits | None = None) -> None:
        self.name = name
        self.limits = limits or KeyLimits()
        self._digest = _digest(secret)

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"

    def opens(self, digest: bytes) -> bool:
        """Whether this is the digest of the key; takes as long for any other."""
        return hmac.compare_digest(digest, self._digest)


class KeyRing:
    """The keys of a service, at least one; their names and their secrets are unique."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self.names)})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(key.name for key in self._keys)

    @property
    def limits(self) -> dict[str, KeyLimits]:
        """What each may ask for, by name."""
        return {key.name: key.limits for key in self._keys}

    def find(self, authorization: str) -> ApiKey | None:
        """The key in the value of an Authorization header, `Bearer KEY`; looks at every key, found or not."""
        scheme, secret = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
        digest = _digest(secret.strip())
        found = None
        for key in self._keys:
            if key.opens(digest) and scheme.lower() == _SCHEME:
                found = key
        return found


def _digest(secret: str) -> bytes:
    return sha256(secret.encode()).digest()
