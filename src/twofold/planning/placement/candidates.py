"""Candidate placements, computed from the goodput of single prefill and decode instances. Unlike DistServe, Twofold
also divides accelerators of several machine types between the phases.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from twofold.instance import Role
from twofold.planning.design import Design, Family, MachineKind, RatedDesign
from twofold.planning.placement.instances import shares_nodes
from twofold.planning.rates import RateSearch
from twofold.request import Phase

_FED = 1.5  # prefill capacity in front of a decode instance, as a multiple of the instance's analytic bound


class PhaseGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput of one phase on one instance: the highest rate (requests/s) that meets the SLO bound of this phase."""

    kind: MachineKind
    phase: Phase
    rate: float
    batcher: str | None = None  # of the prefill instances, the best of those searched; None for the default

    @property
    def per_accelerator(self) -> float:
        return self.rate / self.kind.accelerators


async def goodputs(
    search: RateSearch, kinds: Sequence[MachineKind], *, shared: bool = False
) -> tuple[tuple[PhaseGoodput, ...], tuple[PhaseGoodput, ...]]:
    """Return the simulated goodputs of prefill and of decode on each instance type (DistServe, Algorithm 1)."""
    # Both results are in descending order of goodput per accelerator, without kinds that meet the bound at no rate.
    prefills = await _of_phase(search, [_prefill(kind, name) for kind in kinds for name in search.split_batchers])
    if not prefills:
        return (), ()
    decodes = await _of_phase(search, [_decode(search, prefills[0], kind, shared=shared) for kind in kinds])
    return prefills, decodes


async def _of_phase(search: RateSearch, designs: Sequence[Design]) -> tuple[PhaseGoodput, ...]:
    found = [_judged(each.design.family, each.rate) for each in await search.highest_of(designs)]
    best: dict[MachineKind, PhaseGoodput] = {}
    for each in sorted(found, key=lambda each: (-each.per_accelerator, each.kind.accelerators, each.kind.short)):
        best.setdefault(each.kind, each)
    return tuple(best.values())


def _judged(family: Family, rate: float) -> PhaseGoodput:
    phase = family.judged or Phase.PREFILL
    kind = family.kinds[0 if phase is Phase.PREFILL else 1]
    return PhaseGoodput(kind=kind, phase=phase, rate=rate, batcher=family.batcher)


def _prefill(kind: MachineKind, batcher: str | None) -> Design:
    return Family(kinds=(kind, kind), judged=Phase.PREFILL, batcher=batcher).smallest


def _decode(search: RateSearch, feeder: PhaseGoodput, kind: MachineKind, *, shared: bool) -> Design:
    family = Family(kinds=(feeder.kind, kind), judged=Phase.DECODE, shared=shared, batcher=feeder.batcher)
    most = search.bound.upper(family.smallest)
    feeders = 1 if math.isinf(most) else math.ceil(_FED * most / feeder.rate)
    return Design(family=family, counts=(max(1, feeders), 1))


def balanced(
    prefills: Sequence[PhaseGoodput],
    decodes: Sequence[PhaseGoodput],
    most_accelerators: int,
    *,
    node: int | None = None,
) -> list[RatedDesign]:
    """Return designs with nearly equal prefill and decode goodput, highest goodput per accelerator first.

    `node` is the number of accelerators per node if prefill and decode must share nodes, otherwise None.
    """
    found = {
        candidate.design: candidate
        for prefill in prefills
        for decode in decodes
        for candidate in _of_pair(prefill, decode, most_accelerators, shared=node is not None)
        if node is None or shares_nodes(candidate.design, node)
    }
    return sorted(
        found.values(), key=lambda each: (-round(each.per_accelerator, 9), -each.design.accelerators, each.design.name)
    )


def replicated(
    prefills: Iterable[PhaseGoodput],
    decodes: Sequence[PhaseGoodput],
    rate: float,
    most_accelerators: int,
    *,
    shared: bool = False,
) -> list[RatedDesign]:
    """Return designs with enough instances of each phase for `rate`, fewest accelerators first."""
    found = []
    for prefill in prefills:
        for decode in decodes:
            counts = math.ceil(rate / prefill.rate), math.ceil(rate / decode.rate)
            family = Family(kinds=(prefill.kind, decode.kind), shared=shared, batcher=prefill.batcher)
            design = Design(family=family, counts=counts)
            if design.accelerators <= most_accelerators:
                promised = min(counts[0] * prefill.rate, counts[1] * decode.rate)
                found.append(RatedDesign(design=design, rate=promised))
    return sorted(found, key=lambda each: (each.design.accelerators, -each.rate, each.design.name))


def _of_pair(prefill: PhaseGoodput, decode: PhaseGoodput, most: int, *, shared: bool) -> Iterator[RatedDesign]:
    family = Family(kinds=(prefill.kind, decode.kind), shared=shared, batcher=prefill.batcher)
    for count in range(1, most // prefill.kind.accelerators + 1):
        room = (most - count * prefill.kind.accelerators) // decode.kind.accelerators
        wanted = count * prefill.rate / decode.rate
        # On a node, the balanced count may not fit.
        fewest = 1 if shared else max(1, math.floor(wanted))
        for others in range(min(fewest, room), min(math.ceil(wanted), room) + 1):
            if others:
                design = Design(family=family, counts=(count, others))
                yield RatedDesign(design=design, rate=min(count * prefill.rate, others * decode.rate))


Counts = tuple[tuple[MachineKind, int], ...]


class StockDivision(msgspec.Struct, frozen=True, kw_only=True):
    """Division of a stock of accelerators into prefill instances and decode instances."""

    prefill: float = 0.0  # total goodput of the prefill instances in requests/s
    decode: float = 0.0
    prefills: Counts = ()  # number of prefill instances of each type
    decodes: Counts = ()

    @property
    def rate(self) -> float:
        """Goodput in requests/s: the lower one of `prefill` and `decode`."""
        return min(self.prefill, self.decode)

    @property
    def accelerators(self) -> int:
        return sum(kind.accelerators * count for kind, count in (*self.prefills, *self.decodes))

    def beside(self, other: "StockDivision") -> "StockDivision":
        """Return the sum of two divisions: instances and goodputs are added separately for prefill and decode."""
        return StockDivision(
            prefill=self.prefill + other.prefill,
            decode=self.decode + other.decode,
            prefills=self.prefills + other.prefills,
            decodes=self.decodes + other.decodes,
        )

    def design(self, batcher: str | None) -> Design:
        parts = [(kind, count, Role.PREFILL) for kind, count in self.prefills]
        parts += [(kind, count, Role.DECODE) for kind, count in self.decodes]
        kinds, counts, roles = zip(*parts, strict=True)
        return Design(family=Family(kinds=kinds, roles=roles, batcher=batcher), counts=counts)


def divided(
    stock: Mapping[str, int], prefills: Sequence[PhaseGoodput], decodes: Sequence[PhaseGoodput], most: int
) -> list[RatedDesign]:
    """Divide a stock of accelerators between the phases; return up to `most` designs with the highest goodput, best
    first. `stock` maps machine types to numbers of accelerators.
    """
    whole = [StockDivision()]
    for machine, accelerators in sorted(stock.items()):
        options = _splits(
            accelerators,
            [each for each in prefills if each.kind.name == machine],
            [each for each in decodes if each.kind.name == machine],
        )
        whole = _unbettered(one.beside(other) for one in whole for other in options)
    batcher = prefills[0].batcher if prefills else None  # a design has one
    useful = [RatedDesign(design=split.design(batcher), rate=split.rate) for split in whole if split.rate > 0]
    useful.sort(key=lambda each: (-round(each.rate, 9), each.design.accelerators, each.design.name))
    return useful[:most]


def _splits(
    accelerators: int, prefills: Sequence[PhaseGoodput], decodes: Sequence[PhaseGoodput]
) -> list[StockDivision]:
    """Return the Pareto-optimal divisions of one machine type's accelerators between the phases."""
    first, second = _packed(accelerators, prefills), _packed(accelerators, decodes)
    return _unbettered(
        StockDivision(
            prefill=first[given][0],
            prefills=first[given][1],
            decode=second[accelerators - given][0],
            decodes=second[accelerators - given][1],
        )
        for given in range(accelerators + 1)
    )


def _packed(accelerators: int, goodputs: Sequence[PhaseGoodput]) -> list[tuple[float, Counts]]:
    """Find, for each number up to `accelerators`, the instances of one phase with the highest total goodput."""
    # This is an unbounded knapsack problem over the instance kinds.
    best: list[tuple[float, dict[MachineKind, int]]] = [(0.0, {})]
    for given in range(1, accelerators + 1):
        found = best[given - 1]
        for each in goodputs:
            left = given - each.kind.accelerators
            if left >= 0 and best[left][0] + each.rate > found[0]:
                counts = best[left][1]
                found = best[left][0] + each.rate, {**counts, each.kind: counts.get(each.kind, 0) + 1}
        best.append(found)
    return [(rate, tuple(counts.items())) for rate, counts in best]


def _unbettered(splits: Iterable[StockDivision]) -> list[StockDivision]:
    # Of divisions with equal goodputs, one with the fewest accelerators is kept.
    kept: list[StockDivision] = []
    for split in sorted(splits, key=lambda each: (-each.prefill, -each.decode, each.accelerators)):
        if not kept or split.decode > kept[-1].decode:
            kept.append(split)
    return kept
