"""Routers that join the shortest queue, with fixed roles or with roles that re-planning can change."""

from typing import ClassVar

from twofold.events import Route
from twofold.instance import LoadMeasure
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools, pending_tokens, reserved_tokens
from twofold.scheduling.cluster.router import Router


class JoinShortestQueue(Router):
    """Picks the least loaded instance for each phase, at arrival. Load is pending tokens (prefill) and reserved memory
    (decode) by default (Splitwise section 4.1).
    """

    def __init__(self, prefill: LoadMeasure = pending_tokens, decode: LoadMeasure = reserved_tokens) -> None:
        self._prefill, self._decode = prefill, decode

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        # Without a prefill pool, one mixed instance runs both phases.
        prefill = pools.prefill.least(self._prefill)
        if prefill is None:
            both = pools.mixed.least(self._prefill)
            return None if both is None else Route(both.id, both.id)
        decode = pools.decode.least(self._decode) or pools.mixed.least(self._decode)
        return None if decode is None else Route(prefill.id, decode.id)


class PlannedRoles(JoinShortestQueue):
    """Join-the-shortest-queue router for clusters in which a re-planner changes the roles of instances."""

    # After a role change, an instance finishes its earlier requests, so every instance must support both phases.
    fixed_roles: ClassVar[bool] = False

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        route = super().route(request, tokens, pools, now)
        if route is None:  # a phase has no instances
            only = pools.prefill.least(pending_tokens) or pools.decode.least(pending_tokens)
            route = None if only is None else Route(only.id, only.id)
        return route
