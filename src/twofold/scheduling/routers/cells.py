"""Two-level routing: a cell first, then instances within it."""

from typing import ClassVar

from twofold.events import Route
from twofold.request import Request
from twofold.scheduling.cluster.cells import CellLoad, CellPools
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.routers.draws import drawn, two_of


class CellSelector(Router):
    """Picks the less loaded of two random cells.

    The load of a cell is its waiting prompt tokens per prefill instance plus its reserved KV tokens per decode
    instance, each as a share of the sum over both cells. The pools and the route are those of cells
    (`CellPools.whole`).
    """

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        two = two_of(pools.mixed, drawn(request))
        if two is None:
            return None
        first, second = two
        assert isinstance(first, CellLoad) and isinstance(second, CellLoad)  # noqa: S101, PT018  (as said above)
        cell = second if _share(first, second) > 1.0 else first
        return Route(cell.id, cell.id)


class CellRouter(Router):
    """Picks a cell with `CellSelector` and instances within it with the router `within`.

    Both instances of a request are in one cell, where links are fast, and the cost of a decision does not grow with the
    number of cells. If no cell can run both phases, `within` picks among all instances.
    """

    uses_cells: ClassVar[bool] = True

    def __init__(self, within: Router) -> None:
        self.within = within
        self._upper = CellSelector()

    def new_pools(self) -> Pools:
        return CellPools()

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        assert isinstance(pools, CellPools)  # noqa: S101  (those of `new_pools`)
        picked = self._upper.route(request, tokens, pools.whole, now)
        route = None if picked is None else self.route_in(picked.prefill, request, tokens, pools, now)
        return route or self.within.route(request, tokens, pools, now)

    def route_in(self, name: str, request: Request, tokens: int, pools: CellPools, now: float) -> Route | None:
        """Route within a cell."""
        cell = pools.cells[name].pools
        cell.forecast = pools.forecast
        return self.within.route(request, tokens, cell, now)


def _share(first: CellLoad, second: CellLoad) -> float:
    """The load of the first of two cells, from 0 to 2; 1 if they are equal."""
    prompts = _part(first.pending_prefill_tokens / first.prefilling, second.pending_prefill_tokens / second.prefilling)
    return prompts + _part(first.reserved_tokens / first.decoding, second.reserved_tokens / second.decoding)


def _part(one: float, other: float) -> float:
    both = one + other
    return one / both if both > 0.0 else 0.5
