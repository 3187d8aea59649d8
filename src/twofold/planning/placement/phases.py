"""How much one instance takes of one phase: what DistServe's Algorithm 1 (OSDI'24, section 4.1) asks of a degree."""

import asyncio
import math
from collections.abc import Sequence

import msgspec

from twofold.planning.design import Design, Family, MachineKind
from twofold.planning.rates import RateSearch
from twofold.request import Phase

_FED = 1.5  # times what a decode instance could take at best is what others prefill for it


class PhaseGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate, in requests per second, at which one instance keeps the bound of its phase."""

    kind: MachineKind
    phase: Phase
    rate: float

    @property
    def per_accelerator(self) -> float:
        return self.rate / self.kind.accelerators


async def goodputs(
    search: RateSearch, kinds: Sequence[MachineKind], *, shared: bool = False
) -> tuple[list[PhaseGoodput], list[PhaseGoodput]]:
    """(of prefill, of decode), best per accelerator first; kinds that keep the bound at no rate are left out.

    A prefill instance is simulated with requests that end with their first token. A decode instance is fed by as many
    of the best prefill instances as could never hold it up, over the links that it will have: those within a node where
    phases are to share nodes.
    """
    prefills = await _of_phase(search, [_prefill(kind) for kind in kinds])
    if not prefills:
        return [], []
    decodes = await _of_phase(search, [_decode(search, prefills[0], kind, shared=shared) for kind in kinds])
    return prefills, decodes


async def _of_phase(search: RateSearch, designs: Sequence[Design]) -> list[PhaseGoodput]:
    told = await asyncio.gather(*(search.highest(design) for design in designs))
    found = [
        PhaseGoodput(
            kind=_judged_kind(each.design),
            phase=each.design.family.judged or Phase.PREFILL,
            rate=search.grid.rate(each.step),
        )
        for each in told
        if each.step is not None
    ]
    return sorted(found, key=lambda each: (-each.per_accelerator, each.kind.accelerators, each.kind.short))


def _judged_kind(design: Design) -> MachineKind:
    prefill, decode = design.family.kinds
    return prefill if design.family.judged is Phase.PREFILL else decode


def _prefill(kind: MachineKind) -> Design:
    return Design(family=Family(kinds=(kind, kind), judged=Phase.PREFILL), counts=(1, 1))


def _decode(search: RateSearch, feeder: PhaseGoodput, kind: MachineKind, *, shared: bool) -> Design:
    family = Family(kinds=(feeder.kind, kind), judged=Phase.DECODE, shared=shared)
    most = search.bound.upper(Design(family=family, counts=(1, 1)))
    feeders = 1 if math.isinf(most) else math.ceil(_FED * most / feeder.rate)
    return Design(family=family, counts=(max(1, feeders), 1))
