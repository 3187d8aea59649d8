"""Roles by plan: they stay as they are until a plan, or an operator, changes them."""

from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.pools import Pools, pending_tokens, reserved_tokens
from twofold.scheduling.router import Route, Router


class Planned(Router):
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
