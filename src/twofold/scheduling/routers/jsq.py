"""Join the shortest queue, with fixed roles and with roles that re-planning changes."""

from typing import ClassVar

from twofold.request import Request
from twofold.route import Route
from twofold.scheduling.cluster.pools import LoadMeasure, Pools, pending_tokens, reserved_tokens
from twofold.scheduling.cluster.router import Router


class JoinShortestQueue(Router):
    """Picks the instance with the least of a measure for each phase, at arrival.

    Ties go to the instance that joined first. Without a prefill pool, one mixed instance runs both phases. The default
    measures are those of Splitwise section 4.1, which has a mixed pool too.
    """

    def __init__(self, prefill: LoadMeasure = pending_tokens, decode: LoadMeasure = reserved_tokens) -> None:
        self._prefill, self._decode = prefill, decode

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        prefill = pools.prefill.least(self._prefill)
        if prefill is None:
            both = pools.mixed.least(self._prefill)
            return None if both is None else Route(both.id, both.id)
        decode = pools.decode.least(self._decode) or pools.mixed.least(self._decode)
        return None if decode is None else Route(prefill.id, decode.id)


class PlannedRoles(JoinShortestQueue):
    """Join the shortest queue among instances with changing roles.

    An instance that changed its role first finishes its requests, so every instance must support both phases. If a
    phase has no instances, those of the other phase run it.
    """

    fixed_roles: ClassVar[bool] = False

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        route = super().route(request, tokens, pools, now)
        if route is None:
            only = pools.prefill.least(pending_tokens) or pools.decode.least(pending_tokens)
            route = None if only is None else Route(only.id, only.id)
        return route
