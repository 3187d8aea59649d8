"""A stock of unlike accelerators divided between the phases: beyond DistServe, whose clusters are of one kind.

Each machine's accelerators may be split between prefill and decode in any way. What a phase gets out of so many of them
is a knapsack over the kinds of instances that they can make up; what remains is to choose a split for each machine so
that the weaker phase of the whole is as strong as can be. Only splits that no other betters in both phases matter, and
those of several machines are combined one machine after the other.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from twofold.instance import Role
from twofold.planning.design import Design, Family, MachineKind
from twofold.planning.placement.candidates import Candidate
from twofold.planning.placement.phases import PhaseGoodput

Counts = tuple[tuple[MachineKind, int], ...]


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second that a division gives each phase, and the instances that it is made of."""

    prefill: float = 0.0
    decode: float = 0.0
    prefills: Counts = ()
    decodes: Counts = ()

    @property
    def rate(self) -> float:
        """What the whole takes."""
        return min(self.prefill, self.decode)

    @property
    def accelerators(self) -> int:
        return sum(kind.accelerators * count for kind, count in (*self.prefills, *self.decodes))

    def beside(self, other: "Split") -> "Split":
        """Both together."""
        return Split(
            prefill=self.prefill + other.prefill,
            decode=self.decode + other.decode,
            prefills=self.prefills + other.prefills,
            decodes=self.decodes + other.decodes,
        )

    def design(self) -> Design:
        parts = [(kind, count, Role.PREFILL) for kind, count in self.prefills]
        parts += [(kind, count, Role.DECODE) for kind, count in self.decodes]
        kinds, counts, roles = zip(*parts, strict=True)
        return Design(family=Family(kinds=kinds, roles=roles), counts=counts)


def divided(
    stock: Mapping[str, int], prefills: Sequence[PhaseGoodput], decodes: Sequence[PhaseGoodput], most: int
) -> list[Candidate]:
    """The `most` promising divisions of a stock (accelerators by machine), best first; of equals the smaller."""
    whole = [Split()]
    for machine, accelerators in sorted(stock.items()):
        options = _splits(
            accelerators,
            [each for each in prefills if each.kind.name == machine],
            [each for each in decodes if each.kind.name == machine],
        )
        whole = _unbettered(one.beside(other) for one in whole for other in options)
    useful = sorted(
        (split for split in whole if split.rate > 0),
        key=lambda split: (-round(split.rate, 9), split.accelerators, split.design().name),
    )
    return [Candidate(design=split.design(), rate=split.rate) for split in useful[:most]]


def _splits(
    accelerators: int, prefills: Sequence[PhaseGoodput], decodes: Sequence[PhaseGoodput]
) -> list[Split]:
    """Of one machine's accelerators: all ways to divide them that no other betters in both phases."""
    first, second = _packed(accelerators, prefills), _packed(accelerators, decodes)
    return _unbettered(
        Split(
            prefill=first[given][0],
            prefills=first[given][1],
            decode=second[accelerators - given][0],
            decodes=second[accelerators - given][1],
        )
        for given in range(accelerators + 1)
    )


def _packed(accelerators: int, goodputs: Sequence[PhaseGoodput]) -> list[tuple[float, Counts]]:
    """For 0, 1, … accelerators the most that instances on them take, and which those are (an unbounded knapsack)."""
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


def _unbettered(splits: Iterable[Split]) -> list[Split]:
    """Those that no other equals in one phase and betters in the other; of equals the one with fewest accelerators."""
    kept: list[Split] = []
    for split in sorted(splits, key=lambda each: (-each.prefill, -each.decode, each.accelerators)):
        if not kept or split.decode > kept[-1].decode:
            kept.append(split)
    return kept
