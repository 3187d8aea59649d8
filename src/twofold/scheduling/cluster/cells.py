"""Pools divided into cells, which are groups of nearby instances.

A cell is routable if it has instances for both phases. Its `CellLoad` sums the loads of its instances and is ranked in
a pool like the load of an instance.
"""

from collections.abc import Iterator

from twofold.instance import InstanceLoad, Role
from twofold.scheduling.cluster.pools import NO_LOAD, LoadMeasure, LoadTotals, Pool, Pools, load_totals, replace_totals


class CellLoad(InstanceLoad):
    """The summed load of a cell, as a mixed instance.

    `prefilling` and `decoding` count its instances by phase; mixed instances count for both.
    """

    def __init__(self, name: str, prefilling: int = 0, decoding: int = 0) -> None:
        super().__init__(name, Role.MIXED, Role.MIXED, cell=name)
        self.prefilling = prefilling
        self.decoding = decoding


class Cell:
    """The instances of a cell and their summed load."""

    def __init__(self, name: str) -> None:
        self.pools = Pools()
        self.load = CellLoad(name)


class _CombinedPool(Pool):
    """A view of the pools of one role in all cells. Its operations take time linear in the number of cells."""

    def __init__(self, cells: dict[str, Cell], role: Role) -> None:
        super().__init__()
        self._cells, self._role = cells, role

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
    """Pools per cell and role; `whole` has the loads of the routable cells.

    The inherited pools combine all cells, for callers that ignore cells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cells: dict[str, Cell] = {}
        self.whole = Pools()
        self._counted: dict[str, LoadTotals] = {}
        self.prefill = _CombinedPool(self.cells, Role.PREFILL)
        self.decode = _CombinedPool(self.cells, Role.DECODE)
        self.mixed = _CombinedPool(self.cells, Role.MIXED)

    def enter(self, load: InstanceLoad) -> None:
        cell = self.cells.get(load.cell)
        if cell is None:
            cell = self.cells[load.cell] = Cell(load.cell)
            self.whole.add(cell.load)
        cell.pools.add(load)
        self._count(cell, load, load_totals(load))
        self._judge(cell)

    def leave(self, load: InstanceLoad) -> None:
        cell = self.cells[load.cell]
        cell.pools.remove(load.id)
        self._count(cell, load, NO_LOAD)
        self._judge(cell)

    def changed(self, load: InstanceLoad) -> None:
        cell = self.cells[load.cell]
        cell.pools.changed(load)
        self._count(cell, load, load_totals(load))

    def _count(self, cell: Cell, load: InstanceLoad, now: LoadTotals) -> None:
        """Update the sums of a cell with the new load of an instance."""
        replace_totals(cell.load, self._counted.get(load.id, NO_LOAD), now)
        self._counted[load.id] = now
        if cell.load.place:
            self.whole.changed(cell.load)

    def _judge(self, cell: Cell) -> None:
        """Pause or resume a cell after an instance joined or left."""
        pools, load = cell.pools, cell.load
        load.prefilling = len(pools.prefill) + len(pools.mixed)
        load.decoding = len(pools.decode) + len(pools.mixed)
        if load.prefilling and load.decoding:
            self.whole.resume(load)
        else:
            self.whole.pause(load)
