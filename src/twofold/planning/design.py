"""Designs: which machines run which phase, how many of each, and what that costs before anything runs."""

from collections.abc import Iterator

import msgspec

_FAMILY = "dgx-"
_COLOCATED = 1


class MachineKind(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as a budget sees it: US dollars per hour and the watts that must be provisioned."""

    name: str
    price_per_h: float
    tdp_w: float

    @property
    def short(self) -> str:
        """`h100` for `dgx-h100`."""
        return self.name.removeprefix(_FAMILY)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Designs that differ only in how many machines they have.

    `kinds` are the prefill machine and the decode machine of a split family, or the one machine of a colocated
    family, which has a `batcher` and may have a `token_budget` of its own.
    """

    kinds: tuple[MachineKind, ...]
    batcher: str | None = None
    token_budget: int | None = None

    @property
    def split(self) -> bool:
        return len(self.kinds) > _COLOCATED

    @property
    def name(self) -> str:
        """`h100+a100` for prefill on h100 and decode on a100; `h100 mixed` for a colocated family."""
        machines = "+".join(kind.short for kind in self.kinds)
        budget = f"@{self.token_budget}" if self.token_budget else ""
        return machines if self.split else f"{machines} {self.batcher}{budget}"


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """A family and how many machines of each of its kinds."""

    family: Family
    counts: tuple[int, ...]

    @property
    def name(self) -> str:
        """`25+15 h100+h100`."""
        return f"{'+'.join(map(str, self.counts))} {self.family.name}"

    @property
    def machines(self) -> int:
        return sum(self.counts)

    @property
    def price_per_h(self) -> float:
        """US dollars per hour."""
        return round(sum(count * kind.price_per_h for kind, count in self.parts()), 6)

    @property
    def tdp_w(self) -> float:
        """Watts to provision."""
        return round(sum(count * kind.tdp_w for kind, count in self.parts()), 6)

    def parts(self) -> Iterator[tuple[MachineKind, int]]:
        """Each kind with its count."""
        return zip(self.family.kinds, self.counts, strict=True)
