"""Reproducible pseudo-random draws."""

from zlib import crc32

from twofold.instance import InstanceLoad
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pool

_MASK = (1 << 64) - 1


def scrambled(turn: int) -> int:
    """Number `turn` of a fixed pseudo-random sequence (SplitMix64, Steele et al., 2014)."""
    z = (turn * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def drawn(request: Request) -> int:
    """64 pseudo-random bits from the id of a request, so that independent controllers draw differently."""
    return scrambled(crc32(request.id.encode()) + 1)


def two_of(pool: Pool, draw: int) -> tuple[InstanceLoad, InstanceLoad] | None:
    """Two members of a pool by 64 random bits, distinct if it has two; None if it is empty."""
    first = pool.nth(draw & 0xFFFFFFFF)
    if first is None:
        return None
    others = len(pool) - 1
    second = pool.nth((draw & 0xFFFFFFFF) + 1 + (draw >> 32) % others) if others else first
    return None if second is None else (first, second)
