"""Router that keeps the turns of a session on the instances of its previous turn."""

from collections import OrderedDict
from typing import Final

from twofold.events import Route
from twofold.instance import LoadMeasure
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools, pending_tokens, reserved_tokens
from twofold.scheduling.routers.jsq import JoinShortestQueue

SLACK: Final = 2.0
_REMEMBERED: Final = 65_536  # sessions


class SessionAffinity(JoinShortestQueue):
    """Join-the-shortest-queue router that sends a turn to the instances of its session's previous turn.

    These have the KV of its prompt, unless it was evicted. So that no instance is overloaded, another one gets the turn
    if their load exceeds `slack` times the least load by more than the turn's own tokens (as in consistent hashing with
    bounded loads, Mirrokni et al., SODA 2018). Unlike `conductor`, the router needs no information on caches.
    """

    def __init__(
        self, prefill: LoadMeasure = pending_tokens, decode: LoadMeasure = reserved_tokens, slack: float = SLACK
    ) -> None:
        super().__init__(prefill, decode)
        self._slack = slack
        self._routes: OrderedDict[str, Route] = OrderedDict()  # of the last turns

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        route = super().route(request, tokens, pools, now)
        if route is None or not request.session:
            return route
        before = self._routes.get(request.session)
        if before is not None:
            prefill = self._kept(pools, before.prefill, route.prefill, self._prefill, tokens)
            if route.prefill == route.decode:  # a mixed instance
                route = Route(prefill, prefill)
            else:
                route = Route(prefill, self._kept(pools, before.decode, route.decode, self._decode, tokens))
        self._routes[request.session] = route
        self._routes.move_to_end(request.session)
        if len(self._routes) > _REMEMBERED:
            self._routes.popitem(last=False)
        return route

    def _kept(self, pools: Pools, before: str, least: str, measure: LoadMeasure, tokens: int) -> str:
        """Return the instance `before`, or `least` if `before` has gone, changed its role or is overloaded."""
        old, new = pools.get(before), pools.get(least)
        if old is None or new is None or old.place < 1 or old.role is not new.role:  # paused instances have no place
            return least
        return before if measure.of(old) <= self._slack * measure.of(new) + tokens else least
