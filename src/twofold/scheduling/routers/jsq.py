"""Join the shortest queue: the baselines that look at how much, or how many, is there."""

from twofold.request import Request
from twofold.scheduling.pools import Measure, Pools, pending_tokens, requests, reserved_tokens
from twofold.scheduling.router import FixedRoles, Route


class JoinShortestQueue(FixedRoles):
    """Both instances are picked at arrival, among the pools as they were started.

    Prefill goes to the least of one measure and decode to the least of another; ties go to the instance that
    joined first. Where there is no prefill pool, one mixed instance does both.
    """

    def __init__(self, prefill: Measure, decode: Measure) -> None:
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
