"""Routing in two levels: first a cell, by what is known of it as a whole, then instances within it."""

from typing import ClassVar

from twofold.placement import Route
from twofold.request import Request
from twofold.scheduling.cluster.cells import CellLoad, CellPools
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.router import FixedRoles
from twofold.scheduling.routers.draws import drawn, two_of


class CellSelector(FixedRoles):
    """The upper level: of two cells that are drawn, the one with less for its instances to do.

    Compared are the prompt tokens that wait for each instance that prefills and the KV tokens reserved on each that
    decodes, as shares of what both cells have: a phase counts as much as the other, whatever its unit. The pools are
    those of cells (`CellPools.whole`), and so is the route.
    """

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        two = two_of(pools.mixed, drawn(request))
        if two is None:
            return None
        first, second = two
        assert isinstance(first, CellLoad) and isinstance(second, CellLoad)  # noqa: S101, PT018  (as said above)
        cell = second if _share(first, second) > 1.0 else first
        return Route(cell.id, cell.id)


class CellRouter(FixedRoles):
    """Both levels: `within` picks the instances in a cell as it would in a cluster of its own.

    So both instances of a request are in one cell, where links are fast, and a decision looks at one cell, however
    many there are. Where no cell has both phases, or the one that was picked has nobody, `within` picks among all.
    """

    uses_cells: ClassVar[bool] = True

    def __init__(self, within: FixedRoles) -> None:
        self.within = within
        self._upper = CellSelector()

    def new_pools(self) -> Pools:
        return CellPools()

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        assert isinstance(pools, CellPools)  # noqa: S101  (those of `new_pools`)
        picked = self._upper.route(request, tokens, pools.whole, now)
        route = None if picked is None else self.route_in(picked.prefill, request, tokens, pools, now)
        return route or self.within.route(request, tokens, pools, now)

    def route_in(
        self, name: str, request: Request, tokens: int, pools: CellPools, now: float
    ) -> Route | None:
        """The lower level, in the cell of this name."""
        cell = pools.cells[name].pools
        cell.forecast = pools.forecast
        return self.within.route(request, tokens, cell, now)


def _share(first: CellLoad, second: CellLoad) -> float:
    """How much of both phases' load the first of two cells has: 1 where they have the same, between 0 and 2."""
    prompts = _part(
        first.pending_prefill_tokens / first.prefilling, second.pending_prefill_tokens / second.prefilling
    )
    return prompts + _part(first.reserved_tokens / first.decoding, second.reserved_tokens / second.decoding)


def _part(one: float, other: float) -> float:
    both = one + other
    return one / both if both > 0.0 else 0.5
