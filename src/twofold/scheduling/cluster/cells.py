"""Pools whose instances are divided into cells: groups near each other, so many that they can be routed in as one.

A cell is whole where it has somebody for both phases. What is known of it as a whole is a `CellLoad`, which stands in
a pool of such loads as an instance stands in its own: whoever picks a cell does so as others pick an instance.
"""

from collections.abc import Iterator

from twofold.instance import InstanceLoad, Role
from twofold.scheduling.cluster.pools import (
    NO_LOAD,
    LoadMeasure,
    LoadTotals,
    Pool,
    Pools,
    load_totals,
    replace_totals,
)


class CellLoad(InstanceLoad):
    """A cell as if it were one mixed instance: its numbers are the sums over its instances.

    `prefilling` and `decoding` are how many of them there are for each phase; a mixed one is for both.
    """

    __slots__ = ("decoding", "prefilling")

    def __init__(self, name: str, prefilling: int = 0, decoding: int = 0) -> None:
        super().__init__(name, Role.MIXED, Role.MIXED, cell=name)
        self.prefilling = prefilling
        self.decoding = decoding


class Cell:
    """The instances of a cell, and what they are as a whole."""

    __slots__ = ("load", "pools")

    def __init__(self, name: str) -> None:
        self.pools = Pools()
        self.load = CellLoad(name)


class _CombinedPool(Pool):
    """The instances of one role in all cells, which are the ones that have them: each is asked, so it takes longer."""

    def __init__(self, cells: dict[str, Cell], role: Role) -> None:
        super().__init__()
        self._cells, self._role = cells, role

    def __len__(self) -> int:
        return sum(len(cell.pools[self._role]) for cell in self._cells.values())

    def __iter__(self) -> Iterator[InstanceLoad]:
        for cell in self._cells.values():
            yield from cell.pools[self._role]

    def __contains__(self, instance_id: str) -> bool:
        return any(instance_id in cell.pools[self._role] for cell in self._cells.values())

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
    """Every instance is in the pool of its role in its cell (`InstanceLoad.cell`); `whole` has the whole cells` loads.

    The pools of the cluster are all cells' together, for those to whom cells mean nothing.
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
        """Let the sums of a cell have `now` of an instance."""
        replace_totals(cell.load, self._counted.get(load.id, NO_LOAD), now)
        self._counted[load.id] = now
        if cell.load.place:
            self.whole.changed(cell.load)

    def _judge(self, cell: Cell) -> None:
        """Somebody came or went: a cell that is not whole is picked by nobody."""
        pools, load = cell.pools, cell.load
        load.prefilling = len(pools.prefill) + len(pools.mixed)
        load.decoding = len(pools.decode) + len(pools.mixed)
        if load.prefilling and load.decoding:
            self.whole.resume(load)
        else:
            self.whole.pause(load)
