"""Which placements are worth a joint simulation: those that the goodputs of their phases promise most of."""

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from twofold.planning.design import Design, Family
from twofold.planning.placement.affinity import shares_nodes
from twofold.planning.placement.phases import PhaseGoodput


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A placement, and the requests per second that its phases promise: the lesser of what either takes."""

    design: Design
    rate: float

    @property
    def per_accelerator(self) -> float:
        return self.rate / self.design.accelerators


def balanced(
    prefills: Sequence[PhaseGoodput],
    decodes: Sequence[PhaseGoodput],
    most_accelerators: int,
    *,
    node: int | None = None,
) -> list[Candidate]:
    """All pairs of kinds, each with counts whose phases take about the same, most promising first.

    With a `node` of so many accelerators only those whose stages can share nodes, which they then do. Among equals
    those with more instances come first: what one instance cannot take for a moment, another may.
    """
    found = {
        candidate.design: candidate
        for prefill in prefills
        for decode in decodes
        for candidate in _of_pair(prefill, decode, most_accelerators, shared=node is not None)
        if node is None or shares_nodes(candidate.design, node)
    }
    return sorted(
        found.values(),
        key=lambda each: (-round(each.per_accelerator, 9), -each.design.accelerators, each.design.name),
    )


def replicated(
    prefills: Iterable[PhaseGoodput],
    decodes: Sequence[PhaseGoodput],
    rate: float,
    most_accelerators: int,
    *,
    shared: bool = False,
) -> list[Candidate]:
    """All pairs of kinds with ⌈rate / goodput⌉ instances of each phase, the fewest accelerators first."""
    found = []
    for prefill in prefills:
        for decode in decodes:
            counts = math.ceil(rate / prefill.rate), math.ceil(rate / decode.rate)
            family = Family(kinds=(prefill.kind, decode.kind), shared=shared)
            design = Design(family=family, counts=counts)
            if design.accelerators <= most_accelerators:
                promised = min(counts[0] * prefill.rate, counts[1] * decode.rate)
                found.append(Candidate(design=design, rate=promised))
    return sorted(found, key=lambda each: (each.design.accelerators, -each.rate, each.design.name))


def _of_pair(prefill: PhaseGoodput, decode: PhaseGoodput, most: int, *, shared: bool) -> Iterator[Candidate]:
    family = Family(kinds=(prefill.kind, decode.kind), shared=shared)
    for count in range(1, most // prefill.kind.accelerators + 1):
        room = (most - count * prefill.kind.accelerators) // decode.kind.accelerators
        wanted = count * prefill.rate / decode.rate
        # What fits a node may have to be less than what the other phase could make use of.
        fewest = 1 if shared else max(1, math.floor(wanted))
        for others in range(min(fewest, room), min(math.ceil(wanted), room) + 1):
            if others:
                design = Design(family=family, counts=(count, others))
                yield Candidate(design=design, rate=min(count * prefill.rate, others * decode.rate))
