"""DistServe's placement (OSDI'24, section 4): phases by themselves, then the most promising placements jointly."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.planning.design import Design, Family, MachineKind
from twofold.planning.evaluation import Evaluation, Trial
from twofold.planning.placement.candidates import PhaseGoodput, balanced, divided, goodputs, replicated
from twofold.planning.problem import COLOCATED
from twofold.planning.rates import RateSearch
from twofold.planning.search import by_accelerators, cheapest

BREADTH = 6  # placements, and colocated designs, that are simulated jointly


class SimulatedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """A placement that was simulated: the highest rate at which it keeps the whole SLO, and how it then was.

    `copies` of it are needed for the rate that was asked for; each serves its share.
    """

    design: Design
    rate: float
    evaluation: Evaluation
    copies: int = 1

    @property
    def per_accelerator(self) -> float:
        """Goodput as DistServe compares it: requests per second and accelerator."""
        return self.rate / self.design.accelerators

    @property
    def accelerators(self) -> int:
        return self.copies * self.design.accelerators


class PlacementResults(msgspec.Struct, frozen=True, kw_only=True):
    """What was found; `split` and `colocated` have the best first, and what could not keep the SLO is not in them.

    `prefills` and `decodes` are the goodputs of one instance of each kind.
    """

    prefills: tuple[PhaseGoodput, ...]
    decodes: tuple[PhaseGoodput, ...]
    split: tuple[SimulatedPlacement, ...]
    colocated: tuple[SimulatedPlacement, ...]


async def most_goodput(
    search: RateSearch, kinds: Sequence[MachineKind], most_accelerators: int, *, node: int | None = None
) -> PlacementResults:
    """The placements with the most goodput per accelerator, on at most so many.

    Instances may be anywhere (Algorithm 1), or, with a `node` of so many accelerators, each stage of prefill beside
    the same stage of decode (Algorithm 2).
    """
    prefills, decodes = await goodputs(search, kinds, shared=node is not None)
    candidates = balanced(prefills, decodes, most_accelerators, node=node)
    split = await _highest(search, [each.design for each in candidates[:BREADTH]])
    return PlacementResults(
        prefills=tuple(prefills),
        decodes=tuple(decodes),
        split=split,
        colocated=await _colocated(
            search, kinds, split[0].design.accelerators if split else most_accelerators
        ),
    )


async def for_rate(
    search: RateSearch,
    kinds: Sequence[MachineKind],
    rate: float,
    most_accelerators: int,
    *,
    shared: bool = False,
) -> PlacementResults:
    """The placements, anywhere or all on one node (`shared`), that keep the SLO at `rate` on the fewest accelerators.

    ⌈rate / goodput⌉ instances of each phase are where the search begins: together they may need one more, because a
    request counts only when both phases were in time, or one less, because several even out what one cannot.
    """
    prefills, decodes = await goodputs(search, kinds, shared=shared)
    found = replicated(prefills, decodes, rate, most_accelerators, shared=shared)
    families = [each.design.family for each in found[:BREADTH]]

    def allows(design: Design) -> bool:
        return design.accelerators <= most_accelerators

    async def fewest(families: Sequence[Family]) -> tuple[SimulatedPlacement, ...]:
        designs = await asyncio.gather(
            *(cheapest(search, family, rate, allows, by_accelerators) for family in families)
        )
        placed = await asyncio.gather(
            *(_at(search, design, rate) for design in designs if design is not None)
        )
        return tuple(sorted(placed, key=_fewest))

    return PlacementResults(
        prefills=tuple(prefills),
        decodes=tuple(decodes),
        split=await fewest(families),
        colocated=await fewest(await _best_colocated(search, kinds)),
    )


async def whole_stock(
    search: RateSearch, kinds: Sequence[MachineKind], stock: Mapping[str, int]
) -> PlacementResults:
    """The placements that take most of all of a stock of unlike accelerators (by machine), wherever they are."""
    prefills, decodes = await goodputs(search, kinds)
    candidates = divided(stock, prefills, decodes, BREADTH)
    split = await _highest(search, [each.design for each in candidates])
    colocated = await _highest(search, await _all_colocated(search, kinds, stock))
    return PlacementResults(
        prefills=tuple(prefills),
        decodes=tuple(decodes),
        split=tuple(sorted(split, key=_most)),
        colocated=tuple(sorted(colocated, key=_most)),
    )


def best_of(placement: PlacementResults) -> SimulatedPlacement:
    """The best split placement; raises ConfigurationError, saying which phase cannot, where there is none."""
    if placement.split:
        return placement.split[0]
    if not placement.prefills:
        raise ConfigurationError(
            "no instance keeps the TTFT bound at any rate: loosen it, or allow more accelerators"
        )
    if not placement.decodes:
        raise ConfigurationError(
            "no instance keeps the TPOT bound at any rate: loosen it, or allow more accelerators"
        )
    raise ConfigurationError(
        "each phase can keep its bound, but no placement within the limits keeps both: allow more accelerators"
    )


async def _highest(search: RateSearch, designs: Sequence[Design]) -> tuple[SimulatedPlacement, ...]:
    """Their goodputs, best per accelerator first; of equals the one with fewer accelerators."""
    told = await asyncio.gather(*(search.highest(design) for design in designs))
    placed = [
        SimulatedPlacement(design=each.design, rate=search.grid.rate(each.step), evaluation=each.kept)
        for each in told
        if each.step is not None and each.kept is not None
    ]
    return tuple(
        sorted(placed, key=lambda each: (-each.per_accelerator, each.accelerators, each.design.name))
    )


async def _at(search: RateSearch, design: Design, rate: float) -> SimulatedPlacement:
    return SimulatedPlacement(design=design, rate=rate, evaluation=await search.evaluate(Trial(design, rate)))


async def _colocated(
    search: RateSearch, kinds: Sequence[MachineKind], accelerators: int
) -> tuple[SimulatedPlacement, ...]:
    """As many colocated instances as fit on as many accelerators, of the families that are best by themselves."""
    designs = [
        Design(family=family, counts=(max(1, accelerators // family.kinds[0].accelerators),))
        for family in await _best_colocated(search, kinds)
    ]
    return await _highest(search, designs)


async def _best_colocated(search: RateSearch, kinds: Sequence[MachineKind]) -> list[Family]:
    """By the goodput per accelerator of one instance."""
    alone = [
        Design(family=Family(kinds=(kind,), batcher=batcher, max_num_batched_tokens=budget), counts=(1,))
        for kind in kinds
        for batcher, budget in COLOCATED
    ]
    return [each.design.family for each in (await _highest(search, alone))[:BREADTH]]


async def _all_colocated(
    search: RateSearch, kinds: Sequence[MachineKind], stock: Mapping[str, int]
) -> list[Design]:
    """For each way to batch the best kind of each machine by itself, and as many of them as there is room for."""
    designs = []
    for batcher, budget in COLOCATED:
        alone = [
            Design(family=Family(kinds=(kind,), batcher=batcher, max_num_batched_tokens=budget), counts=(1,))
            for kind in kinds
        ]
        best: dict[str, MachineKind] = {}
        for placed in await _highest(search, alone):
            (kind,) = placed.design.family.kinds
            best.setdefault(kind.name, kind)
        if best:
            family = Family(
                kinds=tuple(best.values()),
                batcher=batcher,
                max_num_batched_tokens=budget,
                roles=(Role.MIXED,) * len(best),
            )
            counts = tuple(stock[kind.name] // kind.accelerators for kind in best.values())
            designs.append(Design(family=family, counts=counts))
    return designs


def _most(placed: SimulatedPlacement) -> tuple[float | str, ...]:
    return -placed.rate, placed.accelerators, placed.design.name


def _fewest(placed: SimulatedPlacement) -> tuple[float | str, ...]:
    return placed.accelerators, placed.design.price_per_h, placed.design.name
