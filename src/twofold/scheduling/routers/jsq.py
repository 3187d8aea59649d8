"""Join the shortest queue: the baselines that look at how much, or how many, is there.

Roles by plan: they stay as they are until a plan, or an operator, changes them.
"""

from twofold.instance import InstanceLoad, Role
from twofold.placement import Route
from twofold.request import Request
from twofold.scheduling.cluster.pools import LoadMeasure, Pools, pending_tokens, requests, reserved_tokens
from twofold.scheduling.cluster.router import FixedRoles, Router


class JoinShortestQueue(FixedRoles):
    """Both instances are picked at arrival, among the pools as they were started.

    Prefill goes to the least of one measure and decode to the least of another; ties go to the instance that
    joined first. Where there is no prefill pool, one mixed instance does both.
    """

    def __init__(self, prefill: LoadMeasure, decode: LoadMeasure) -> None:
        self._prefill, self._decode = prefill, decode

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        prefill = pools.prefill.least(self._prefill)
        if prefill is None:
            both = pools.mixed.least(self._prefill)
            return None if both is None else Route(both.id, both.id)
        decode = pools.decode.least(self._decode) or pools.mixed.least(self._decode)
        return None if decode is None else Route(prefill.id, decode.id)


def by_tokens() -> JoinShortestQueue:
    """Least pending tokens for prefill, least reserved memory for decode (Splitwise section 4.1, without its pools)."""
    return JoinShortestQueue(pending_tokens, reserved_tokens)


def by_pending_tokens() -> JoinShortestQueue:
    """Least pending tokens for both."""
    return JoinShortestQueue(pending_tokens, pending_tokens)


def by_requests() -> JoinShortestQueue:
    """Fewest requests for both."""
    return JoinShortestQueue(requests, requests)


class PlannedRoles(Router):
    """Join the shortest queue among instances whose roles may be changed while they run.

    Prefill goes to the least pending tokens and decode to the least reserved memory, as with `jsq`. An instance that
    has changed its role ends what it had, so every one must be able to do both phases; where nobody is left for a
    phase, others do it.
    """

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        prefill, decode = pools.prefill.least(pending_tokens), pools.decode.least(reserved_tokens)
        mixed = pools.mixed
        first = prefill or mixed.least(pending_tokens) or pools.decode.least(pending_tokens)
        if first is None:
            return None
        if prefill is None:
            return Route(first.id, first.id)
        second = decode or mixed.least(reserved_tokens) or prefill
        return Route(first.id, second.id)

    def role_of(self, load: InstanceLoad, idle: bool) -> Role:
        return load.role
