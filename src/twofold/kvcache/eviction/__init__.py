"""Eviction rules by name: one file and one line each."""

from collections.abc import Callable

from twofold.errors import ConfigurationError
from twofold.kvcache.eviction.base import EvictionPolicy
from twofold.kvcache.eviction.length_aware import LengthAware
from twofold.kvcache.eviction.lfu import Lfu
from twofold.kvcache.eviction.lru import Lru

__all__ = ["EVICTIONS", "EvictionPolicy", "create_eviction"]

EVICTIONS: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "length-aware": LengthAware,
}


def create_eviction(name: str) -> EvictionPolicy:
    """A fresh rule for one memory; raises ConfigurationError for a name that is not known."""
    rule = EVICTIONS.get(name)
    if rule is None:
        raise ConfigurationError(f"no eviction rule {name!r}; there are {', '.join(EVICTIONS)}")
    return rule()
