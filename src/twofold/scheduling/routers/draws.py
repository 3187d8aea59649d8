"""Routers that pick instances round-robin or by reproducible pseudo-random numbers."""

from collections.abc import Callable
from typing import ClassVar
from zlib import crc32

from twofold.events import Route
from twofold.instance import InstanceLoad, LoadMeasure
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pool, Pools, pending_tokens, reserved_tokens
from twofold.scheduling.cluster.router import Router

_MASK = (1 << 64) - 1


def scrambled(turn: int) -> int:
    """Return element `turn` of a fixed sequence of 64-bit pseudo-random numbers (SplitMix64, Steele et al., 2014)."""
    z = (turn * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def drawn(request: Request) -> int:
    """Return 64 pseudo-random bits derived from the id of a request."""
    return scrambled(crc32(request.id.encode()) + 1)


def two_of(pool: Pool, draw: int) -> tuple[InstanceLoad, InstanceLoad] | None:
    """Select two instances of `pool` with the 64-bit random number `draw`. Return None if the pool is empty."""
    # Distinct unless the pool has only one.
    first = pool.nth(draw & 0xFFFFFFFF)
    if first is None:
        return None
    others = len(pool) - 1
    second = pool.nth((draw & 0xFFFFFFFF) + 1 + (draw >> 32) % others) if others else first
    return None if second is None else (first, second)


class TwoChoices(Router):
    """Router that picks the less loaded of two random instances for each phase.

    With two random choices, load is balanced nearly as well as with a choice from all instances (Mitzenmacher,
    The Power of Two Choices in Randomized Load Balancing, IEEE TPDS 2001). If loads are outdated, two random
    choices balance load better than a choice from all instances (How Useful Is Old Information?, IEEE TPDS 2000).
    """

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        draw = drawn(request)
        # Without a prefill pool, one mixed instance runs both phases.
        prefill = _lesser(pools.prefill, draw, pending_tokens)
        if prefill is None:
            both = _lesser(pools.mixed, draw, pending_tokens)
            return None if both is None else Route(both.id, both.id)
        again = scrambled(draw)
        decode = _lesser(pools.decode, again, reserved_tokens) or _lesser(pools.mixed, again, reserved_tokens)
        return None if decode is None else Route(prefill.id, decode.id)


def _lesser(pool: Pool, draw: int, measure: LoadMeasure) -> InstanceLoad | None:
    two = two_of(pool, draw)
    if two is None:
        return None
    first, second = two
    return second if measure.of(second) < measure.of(first) else first


class InTurn(Router):
    """Router that ignores load, and picks instances round-robin or by pseudo-random numbers."""

    repeats_routes: ClassVar[bool] = False

    def __init__(self, number: Callable[[int], int]) -> None:
        # Returns the pool index for prefill number n (argument n) and decode number n (argument −n − 1), from 0.
        self._number = number
        self._prefills = 0
        self._decodes = 0

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        split = len(pools.prefill) > 0
        prefill = (pools.prefill if split else pools.mixed).nth(self._number(self._prefills))
        if prefill is None:
            return None
        decode = prefill
        if split:
            load = (pools.decode if len(pools.decode) else pools.mixed).nth(self._number(~self._decodes))
            self._decodes += 1
            if load is None:
                return None
            decode = load
        self._prefills += 1
        return Route(prefill.id, decode.id)


def round_robin() -> InTurn:
    """Create a router that picks the instances of each pool in turn."""
    return InTurn(lambda turn: turn if turn >= 0 else ~turn)


def at_random() -> InTurn:
    """Create a router that picks uniformly random instances of each pool, reproducibly."""
    return InTurn(scrambled)
