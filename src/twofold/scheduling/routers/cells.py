"""Two-level routing: choose a cell (a group of nearby instances), then instances within the cell."""

from collections.abc import Iterator
from typing import ClassVar

from twofold.events import Route
from twofold.instance import NO_LOAD, InstanceLoad, LoadMeasure, LoadTotals, Role
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pool, Pools
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.routers.draws import drawn, two_of


class CellLoad(InstanceLoad):
    """Total load of the instances in a cell (a group of nearby instances)."""

    def __init__(self, name: str, prefilling: int = 0, decoding: int = 0) -> None:
        super().__init__(name, Role.MIXED, cell=name)
        self.prefilling = prefilling  # instances that run prefill; mixed instances count for both phases
        self.decoding = decoding


class Cell:
    """Group of nearby instances, with the total load of the group."""

    def __init__(self, name: str) -> None:
        self.pools = Pools()
        self.load = CellLoad(name)


class _CombinedPool(Pool):
    """The instances of one role in all cells (groups of instances), as one pool."""

    def __init__(self, cells: dict[str, Cell], role: Role) -> None:
        super().__init__()
        self._cells, self._role = cells, role  # operations take time linear in the number of cells

    def __len__(self) -> int:
        return sum(len(cell.pools[self._role]) for cell in self._cells.values())

    def __iter__(self) -> Iterator[InstanceLoad]:
        for cell in self._cells.values():
            yield from cell.pools[self._role]

    def least(self, measure: LoadMeasure) -> InstanceLoad | None:
        found = [cell.pools[self._role].least(measure) for cell in self._cells.values()]
        return min((load for load in found if load is not None), key=measure.of, default=None)

    def nth(self, number: int) -> InstanceLoad | None:
        size = len(self)
        place = number % size if size else 0
        for cell in self._cells.values():
            pool = cell.pools[self._role]
            if place < len(pool):
                return pool.nth(place)
            place -= len(pool)
        return None


class CellPools(Pools):
    """Pools of instances, one for each cell and role. A cell is a group of nearby instances."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: dict[str, Cell] = {}
        self.whole = Pools()  # loads of the cells that can run both phases
        self._counted: dict[str, LoadTotals] = {}
        # All cells together, for callers that ignore cells.
        self.prefill = _CombinedPool(self.cells, Role.PREFILL)
        self.decode = _CombinedPool(self.cells, Role.DECODE)
        self.mixed = _CombinedPool(self.cells, Role.MIXED)

    def enter(self, load: InstanceLoad) -> None:
        cell = self.cells.get(load.cell)
        if cell is None:
            cell = self.cells[load.cell] = Cell(load.cell)
            self.whole.add(cell.load)
        cell.pools.add(load)
        self._count(cell, load, load.less(NO_LOAD))
        self._judge(cell)

    def leave(self, load: InstanceLoad) -> None:
        cell = self.cells[load.cell]
        cell.pools.remove(load.id)
        self._count(cell, load, NO_LOAD)
        self._judge(cell)

    def changed(self, load: InstanceLoad) -> None:
        cell = self.cells[load.cell]
        cell.pools.changed(load)
        self._count(cell, load, load.less(NO_LOAD))

    def _count(self, cell: Cell, load: InstanceLoad, now: LoadTotals) -> None:
        """Update the summed load of a cell after the load of one of its instances changed."""
        cell.load.replace(self._counted.get(load.id, NO_LOAD), now)
        self._counted[load.id] = now
        if cell.load.place:
            self.whole.changed(cell.load)

    def _judge(self, cell: Cell) -> None:
        """Allow routing to a cell if it has instances for both phases, else pause it."""
        pools, load = cell.pools, cell.load
        load.prefilling = len(pools.prefill) + len(pools.mixed)
        load.decoding = len(pools.decode) + len(pools.mixed)
        if load.prefilling and load.decoding:
            self.whole.resume(load)
        else:
            self.whole.pause(load)


class CellSelector(Router):
    """Picks the less loaded of two random cells (groups of nearby instances). A returned route contains
    the cell's name in place of the prefill and decode instance ids.
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
    """Router that first picks a cell (a group of nearby instances), and then instances in this cell."""

    uses_cells: ClassVar[bool] = True

    def __init__(self, within: Router) -> None:
        self.within = within
        self._upper = CellSelector()

    def new_pools(self) -> Pools:
        return CellPools()

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        assert isinstance(pools, CellPools)  # noqa: S101  (those of `new_pools`)
        # The cost of a decision does not grow with the number of cells, unless no cell can run both phases.
        picked = self._upper.route(request, tokens, pools.whole, now)
        route = None if picked is None else self.route_in(picked.prefill, request, tokens, pools, now)
        return route or self.within.route(request, tokens, pools, now)

    def route_in(self, name: str, request: Request, tokens: int, pools: CellPools, now: float) -> Route | None:
        """Choose the prefill and the decode instance of a request within one cell."""
        cell = pools.cells[name].pools
        cell.forecast = pools.forecast
        return self.within.route(request, tokens, cell, now)


def _share(first: CellLoad, second: CellLoad) -> float:
    # Waiting prompt tokens per prefill instance, and reserved KV tokens per decode instance, each relative to its total
    # over both cells: from 0 to 2, and 1 for equal loads.
    prompts = _part(first.pending_prefill_tokens / first.prefilling, second.pending_prefill_tokens / second.prefilling)
    return prompts + _part(first.reserved_tokens / first.decoding, second.reserved_tokens / second.decoding)


def _part(one: float, other: float) -> float:
    both = one + other
    return one / both if both > 0.0 else 0.5
