"""Designs: which machines run which phase, how many of each, and what that costs before anything runs.

What a design may cost: machines, dollars per hour and watts.
"""

from collections.abc import Callable, Iterator

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.request import Phase

_FAMILY = "dgx-"
_SPLIT = (Role.PREFILL, Role.DECODE)


class MachineKind(msgspec.Struct, frozen=True, kw_only=True):
    """What a design counts: a machine, or one instance on some of a machine's accelerators.

    An instance has its parallelism with it: `tensor_parallel` accelerators for each of `pipeline_parallel` stages.
    Without, it is a machine. US dollars per hour, the watts that must be provisioned and `accelerators` are those of
    what is counted.
    """

    name: str
    price_per_h: float
    tdp_w: float
    accelerators: int = 1
    tensor_parallel: int | None = None
    pipeline_parallel: int = 1

    @property
    def short(self) -> str:
        """`h100` for `dgx-h100`; `a100@2x4` for an instance of four stages on two accelerators each."""
        name = self.name.removeprefix(_FAMILY)
        if self.tensor_parallel is None:
            return name
        stages = f"x{self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        return f"{name}@{self.tensor_parallel}{stages}"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Designs that differ only in how many of each kind they have.

    `kinds` are the prefill kind and the decode kind of a split family, or the one kind of a colocated
    family, which has a `batcher` and may have a `max_num_batched_tokens` of its own. A fleet of unlike
    accelerators has several
    kinds for a phase, and `roles` says which are for which. Where one phase is `judged`, only its bound of the SLO
    counts: the instances of the other are there to feed it. `shared` says that each stage of prefill lies on one node
    with the same stage of decode.
    """

    kinds: tuple[MachineKind, ...]
    batcher: str | None = None
    max_num_batched_tokens: int | None = None
    roles: tuple[Role, ...] = ()
    judged: Phase | None = None
    shared: bool = False

    @property
    def role_of(self) -> tuple[Role, ...]:
        """What each kind does."""
        if self.roles:
            return self.roles
        return _SPLIT if len(self.kinds) == len(_SPLIT) else (Role.MIXED,)

    @property
    def split(self) -> bool:
        return any(role is not Role.MIXED for role in self.role_of)

    @property
    def name(self) -> str:
        """`h100+a100` for prefill on h100 and decode on a100; `h100 mixed` for a colocated family."""
        machines = "+".join(kind.short for kind in self.kinds)
        budget = f"@{self.max_num_batched_tokens}" if self.max_num_batched_tokens else ""
        if not self.split:
            return f"{machines} {self.batcher}{budget}"
        if self.roles:
            each = zip(self.kinds, self.roles, strict=True)
            return "+".join(f"{kind.short}:{role}" for kind, role in each)
        together = " on shared nodes" if self.shared else ""
        return f"{machines}{together}" if self.judged is None else f"{self.judged} of {machines}"


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """A family and how many there are of each of its kinds."""

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
    def accelerators(self) -> int:
        return sum(count * kind.accelerators for kind, count in self.parts())

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

    def parts_of(self, role: Role) -> Iterator[tuple[MachineKind, int]]:
        """Those that play this role."""
        return (part for part, plays in zip(self.parts(), self.family.role_of, strict=True) if plays is role)


Allows = Callable[[Design], bool]
_SLACK = 1.0 + 1e-9  # sums of prices are not exact
# More is a slip of the keyboard, or a search that no number of machines can end.
MAX_MACHINES = 100_000


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds, all of which hold; None and an empty `of_kind` bound nothing.

    `of_kind` maps the name of a machine to how many of it there may be.
    """

    machines: int | None = None
    price_per_h: float | None = None
    tdp_w: float | None = None
    of_kind: dict[str, int] = {}

    @property
    def bounded(self) -> bool:
        return any((self.machines is not None, self.price_per_h is not None, self.tdp_w is not None))

    def bounds(self, family: Family) -> bool:
        """Whether the family cannot grow without end."""
        return self.bounded or all(kind.name in self.of_kind for kind in family.kinds)

    def allows(self, design: Design) -> bool:
        within = (
            (design.machines, self.machines),
            (design.price_per_h, self.price_per_h),
            (design.tdp_w, self.tdp_w),
        )
        if any(bound is not None and value > bound * _SLACK for value, bound in within):
            return False
        return all(self._used(design, name) <= most for name, most in self.of_kind.items())

    def require_sensible(self) -> None:
        """Raise ConfigurationError for a bound that lets nothing through."""
        for flag, value in (
            ("--max-machines", self.machines),
            ("--max-cost", self.price_per_h),
            ("--max-power", None if self.tdp_w is None else self.tdp_w / 1e3),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(f"{flag} {value:g} leaves no machine to plan with: give more than 0")
        for most in filter(None, (self.machines, *self.of_kind.values())):
            if most > MAX_MACHINES:
                raise ConfigurationError(
                    f"--max-machines {most} is more than a plan can look at: give at most {MAX_MACHINES}"
                )
        for name, most in self.of_kind.items():
            if most < 1:
                raise ConfigurationError(
                    f"--max-machines {name}={most} leaves none of it: give at least 1, or plan without {name}"
                )

    @staticmethod
    def _used(design: Design, name: str) -> int:
        return sum(count for kind, count in design.parts() if kind.name == name)


def frontier(family: Family, allows: Allows) -> list[Design]:
    """The largest designs that `allows` lets through: none of them has more of one kind at no less of the other.

    By rising count of the first kind. `allows` is monotone: what it refuses, it refuses with more machines too.
    Empty where not even one machine of each kind is allowed.
    """
    if not family.split:
        most = _most(lambda count: allows(Design(family=family, counts=(count,))))
        return [Design(family=family, counts=(most,))] if most else []
    designs: list[Design] = []
    for first in range(1, MAX_MACHINES):
        second = _most(lambda count, first=first: allows(Design(family=family, counts=(first, count))))  # type: ignore[misc]
        if not second:
            break
        if designs and designs[-1].counts[1] == second:
            designs.pop()
        designs.append(Design(family=family, counts=(first, second)))
    return designs


def _most(allowed: Callable[[int], bool]) -> int:
    """The greatest count from 0 on that is allowed; 0 is."""
    low, high = 0, 1
    while allowed(high):
        low, high = high, high * 2
        if high > MAX_MACHINES:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
