"""Round-robin and random routing."""

from collections.abc import Callable
from typing import ClassVar

from twofold.events import Route
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.routers.draws import scrambled


class InTurn(Router):
    """Picks members of the pools by number. Without a prefill pool, one mixed instance runs both phases."""

    repeats_routes: ClassVar[bool] = False

    def __init__(self, number: Callable[[int], int]) -> None:
        """`number` maps the count of decisions, from 0, to the number of a member."""
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
    """Each phase goes to the next instance in turn."""
    return InTurn(lambda turn: turn if turn >= 0 else ~turn)


def at_random() -> InTurn:
    """Each phase goes to a uniformly random instance, the same in every run."""
    return InTurn(scrambled)
