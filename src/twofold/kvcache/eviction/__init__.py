"""Registry of eviction policies, which maps each policy's name to its class."""

from twofold.errors import ConfigurationError
from twofold.kvcache.eviction.base import EvictionPolicy
from twofold.kvcache.eviction.lru import Lru
from twofold.kvcache.eviction.ranked import LengthAware, Lfu

__all__ = ["EVICTIONS", "EvictionPolicy", "create_eviction"]

EVICTIONS: dict[str, type[EvictionPolicy]] = {"lru": Lru, "lfu": Lfu, "length-aware": LengthAware}


def create_eviction(name: str) -> EvictionPolicy:
    """Create the eviction policy named `name`. Raises ConfigurationError for an unknown name."""
    policy = EVICTIONS.get(name)
    if policy is None:
        raise ConfigurationError(f"unknown eviction policy {name!r}: choose one of {', '.join(EVICTIONS)}")
    return policy()
