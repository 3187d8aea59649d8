"""The power of two choices: the less loaded of two random instances."""

from twofold.events import Route
from twofold.instance import InstanceLoad
from twofold.request import Request
from twofold.scheduling.cluster.pools import LoadMeasure, Pool, Pools, pending_tokens, reserved_tokens
from twofold.scheduling.cluster.router import FixedRoles
from twofold.scheduling.routers.draws import drawn, scrambled, two_of


class TwoChoices(FixedRoles):
    """Draws two instances for each phase and picks the one with fewer pending tokens (prefill) or less reserved memory
    (decode).

    Nearly as good as the least loaded of all (Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE
    TPDS 2001), and better with outdated loads, because requests do not all go to the same instance (How Useful Is Old
    Information?, IEEE TPDS 2000). Without a prefill pool, one mixed instance runs both phases.
    """

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        draw = drawn(request)
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
