"""DistServe's placement search (OSDI'24, section 4): simulates each phase alone, then combinations of both."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.planning.design import Allows, Design, Family, MachineKind
from twofold.planning.placement.candidates import PhaseGoodput, balanced, divided, goodputs, replicated
from twofold.planning.plan import DesignChoice, at_capacity
from twofold.planning.promise import Draws, Rank, promised_rate, promised_size, resized
from twofold.planning.rates import RateSearch
from twofold.planning.search import by_accelerators, cheapest

BREADTH = 6  # placements and colocated designs simulated jointly


class PlacementResults(msgspec.Struct, frozen=True, kw_only=True):
    """Placements that meet the SLO, best first, and the goodputs of single prefill and decode instances."""

    prefills: tuple[PhaseGoodput, ...]
    decodes: tuple[PhaseGoodput, ...]
    split: tuple[DesignChoice, ...]
    colocated: tuple[DesignChoice, ...]


async def most_goodput(
    search: RateSearch, kinds: Sequence[MachineKind], most_accelerators: int, *, node: int | None = None
) -> PlacementResults:
    """Find the placements with the highest goodput per accelerator, by Algorithm 1 of DistServe.

    If `node`, the number of accelerators per node, is given, use Algorithm 2: prefill and decode instances share nodes.
    """
    prefills, decodes = await goodputs(search, kinds, shared=node is not None)
    candidates = balanced(prefills, decodes, most_accelerators, node=node)
    split = await _highest(search, [each.design for each in candidates[:BREADTH]])
    colocated = await _colocated(search, kinds, split[0].design.accelerators if split else most_accelerators)
    return PlacementResults(prefills=prefills, decodes=decodes, split=split, colocated=colocated)


async def for_rate(
    search: RateSearch, kinds: Sequence[MachineKind], rate: float, most_accelerators: int, *, shared: bool = False
) -> PlacementResults:
    """Find the placements with the fewest accelerators that meet the SLO at `rate`; with `shared`, on shared nodes."""
    prefills, decodes = await goodputs(search, kinds, shared=shared)
    # The search starts with ⌈rate / goodput⌉ instances per phase. The optimum may have more, because a request must
    # meet the bounds of both phases, or fewer, because several instances balance load.
    found = replicated(prefills, decodes, rate, most_accelerators, shared=shared)
    families = [each.design.family for each in found[:BREADTH]]

    allows = _within(most_accelerators)

    async def fewest(families: Sequence[Family]) -> tuple[DesignChoice, ...]:
        designs = await asyncio.gather(
            *(cheapest(search, [family], rate, allows, by_accelerators) for family in families)
        )
        placed = await asyncio.gather(*(_at(search, design, rate) for design in designs if design is not None))
        return tuple(sorted(placed, key=fewest_accelerators))

    return PlacementResults(
        prefills=prefills,
        decodes=decodes,
        split=await fewest(families),
        colocated=await fewest(await _best_colocated(search, kinds)),
    )


async def whole_stock(search: RateSearch, kinds: Sequence[MachineKind], stock: Mapping[str, int]) -> PlacementResults:
    """Find the placements with the highest request rate on the accelerators in `stock` (counts by machine)."""
    prefills, decodes = await goodputs(search, kinds)
    candidates = divided(stock, prefills, decodes, BREADTH)
    split = await _highest(search, [each.design for each in candidates])
    colocated = await _highest(search, await _all_colocated(search, kinds, stock))
    return PlacementResults(
        prefills=prefills,
        decodes=decodes,
        split=tuple(sorted(split, key=most_requests)),
        colocated=tuple(sorted(colocated, key=most_requests)),
    )


def best_of(placement: PlacementResults) -> DesignChoice:
    """Return the best split placement. Raises ConfigurationError if there is none."""
    if placement.split:
        return placement.split[0]
    if not placement.prefills:
        raise ConfigurationError("no instance meets the TTFT bound at any rate: relax it, or allow more accelerators")
    if not placement.decodes:
        raise ConfigurationError("no instance meets the TPOT bound at any rate: relax it, or allow more accelerators")
    raise ConfigurationError(
        "each phase can meet its bound, but no placement within the limits meets both: allow more accelerators"
    )


async def _highest(search: RateSearch, designs: Sequence[Design]) -> tuple[DesignChoice, ...]:
    """Find the goodput of each design; return the designs by goodput per accelerator, highest first."""
    placed = map(at_capacity, await search.highest_of(designs))
    return tuple(sorted(filter(None, placed), key=most_per_accelerator))


async def _at(search: RateSearch, design: Design, rate: float) -> DesignChoice:
    evaluation = await search.at_rate(design, rate)
    return DesignChoice(design=design, rate=rate, highest_rate=rate, evaluation=evaluation)


async def _colocated(search: RateSearch, kinds: Sequence[MachineKind], accelerators: int) -> tuple[DesignChoice, ...]:
    designs = [
        Design(family=family, counts=(max(1, accelerators // family.kinds[0].accelerators),))
        for family in await _best_colocated(search, kinds)
    ]
    return await _highest(search, designs)


async def _best_colocated(search: RateSearch, kinds: Sequence[MachineKind]) -> list[Family]:
    """Simulate all pairs of instance type and batcher; return the `BREADTH` best in goodput per accelerator."""
    # Single instances are compared.
    alone = [_alone(kind, batcher, budget) for kind in kinds for batcher, budget in search.colocated_batching]
    return [each.design.family for each in (await _highest(search, alone))[:BREADTH]]


def _alone(kind: MachineKind, batcher: str, budget: int | None) -> Design:
    return Family(kinds=(kind,), batcher=batcher, max_num_batched_tokens=budget).smallest


async def _all_colocated(search: RateSearch, kinds: Sequence[MachineKind], stock: Mapping[str, int]) -> list[Design]:
    """Return a colocated design on all accelerators in `stock` for each pair of batcher and token budget."""
    designs = []
    for batcher, budget in search.colocated_batching:
        best: dict[str, MachineKind] = {}  # instance kind of each machine type
        for placed in await _highest(search, [_alone(kind, batcher, budget) for kind in kinds]):
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


async def promised(
    search: RateSearch,
    placement: PlacementResults,
    rank: Callable[[DesignChoice], Rank],
    draws: Draws,
    *,
    most_accelerators: int | None = None,
) -> PlacementResults:
    """Change the best split and colocated placements so that enough draws meet the SLO.

    If `most_accelerators` is given, their sizes change up to this limit; otherwise, their rates change.
    """

    def ranked(placed: DesignChoice) -> Rank:
        return placed.broken, *rank(placed)

    async def resize(placed: DesignChoice) -> DesignChoice:
        design, rate = placed.design, placed.rate
        if most_accelerators is None:
            rate, promise = await promised_rate(search, design, rate, draws)
        else:
            allows = _within(most_accelerators)
            design, promise = await promised_size(search, design, rate, draws, allows, by_accelerators)
        return replace(await _at(search, design, rate), promise=promise)

    split, colocated = await asyncio.gather(
        *(resized(each, resize, ranked) for each in (placement.split, placement.colocated))
    )
    return replace(placement, split=tuple(split), colocated=tuple(colocated))


def _within(most_accelerators: int) -> Allows:
    return lambda design: design.accelerators <= most_accelerators


def most_per_accelerator(placed: DesignChoice) -> Rank:
    return -placed.per_accelerator, placed.accelerators, placed.design.name


def most_requests(placed: DesignChoice) -> Rank:
    return -placed.rate, placed.accelerators, placed.design.name


def fewest_accelerators(placed: DesignChoice) -> Rank:
    return placed.accelerators, placed.design.price_per_h, placed.design.name
