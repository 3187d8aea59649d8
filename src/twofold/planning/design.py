"""Cluster designs with their price and power, and budgets that limit designs."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import msgspec

from twofold.errors import ConfigurationError, require
from twofold.instance import Role
from twofold.request import Phase

_FAMILY = "dgx-"
_SPLIT = (Role.PREFILL, Role.DECODE)


class MachineKind(msgspec.Struct, frozen=True, kw_only=True):
    """Machine with the parallelism of its instances, or the part of a machine that one instance uses."""

    name: str
    price_per_h: float
    tdp_w: float
    accelerators: int = 1
    tensor_parallel: int | None = None  # None for all accelerators of a machine
    pipeline_parallel: int = 1
    expert_parallel: int | None = None  # accelerators that share the experts; None: each expert is divided
    machines: int = 1  # machines that a pipeline spans; 0 for a part of a machine

    @property
    def instances(self) -> int:
        """Number of LLM instances on the accelerators of this kind."""
        if self.tensor_parallel is None:
            return 1
        return self.accelerators // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def machine(self) -> str:
        """Short name of the machine, such as `h100` for `dgx-h100`."""
        return self.name.removeprefix(_FAMILY)

    @property
    def short(self) -> str:
        """Short name with the parallelism, such as `h100@4×TP2` for four instances on a machine, or `h100@TP2×PP4`, or
        `h100@8×TP1-EP8` with the experts spread over eight accelerators.
        """
        if self.tensor_parallel is None:
            return self.machine
        each = f"{self.instances}×" if self.instances > 1 else ""
        stages = f"×PP{self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        experts = "" if self.expert_parallel is None else f"-EP{self.expert_parallel}"
        return f"{self.machine}@{each}TP{self.tensor_parallel}{stages}{experts}"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Set of designs that differ only in the number of machines or instances of each kind."""

    kinds: tuple[MachineKind, ...]  # without `roles`: prefill and decode of a split family, or one colocated
    batcher: str | None = None  # None in a split family: the default of each role
    max_num_batched_tokens: int | None = None
    roles: tuple[Role, ...] = ()  # of the kinds, if a phase has several
    judged: Phase | None = None  # if set, only the SLO bound of this phase counts
    shared: bool = False  # stage i of prefill and stage i of decode are on the same node
    router: str | None = None  # of a split family; None for that of the problem

    @property
    def role_of(self) -> tuple[Role, ...]:
        """Roles (prefill, decode or mixed) of the machine types in `kinds`."""
        if self.roles:
            return self.roles
        return _SPLIT if len(self.kinds) == len(_SPLIT) else (Role.MIXED,)

    @property
    def smallest(self) -> "Design":
        """Smallest design of this family, with a count of 1 for each machine type."""
        return Design(family=self, counts=(1,) * len(self.kinds))

    @property
    def split(self) -> bool:
        return any(role is not Role.MIXED for role in self.role_of)

    @property
    def group(self) -> str:
        """Name without parallelism, such as `h100+a100` for H100 prefill and A100 decode machines."""
        machines = "+".join(kind.machine for kind in self.kinds)
        return machines if self.split else f"{machines} {self.batching}"

    @property
    def batching(self) -> str:
        """Batcher of this family, with its token budget."""
        return f"{self.batcher}@{self.max_num_batched_tokens}" if self.max_num_batched_tokens else f"{self.batcher}"

    def named(self, words: Sequence[str]) -> str:
        """Return the display name of a design, given a phrase for each kind."""
        if not self.split:
            return f"{' + '.join(words)} {self.batching}"
        phases = " + ".join(f"{word} {role}" for word, role in zip(words, self.role_of, strict=True))
        together = " on shared nodes" if self.shared else ""
        policies = "".join(f", {name}" for name in (self.router, self.batcher) if name)
        judged = "" if self.judged is None else f"{self.judged} of "
        return f"{judged}{phases}{together}{policies}"


FamilyGroup = tuple[Family, ...]  # families that differ only in parallelism, router and batcher


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster design: a number of machines or instances of each type."""

    family: Family
    counts: tuple[int, ...]

    @property
    def name(self) -> str:
        """Display name, such as `4×h100@TP8 prefill + 6×h100@2×TP4 decode` for 4 prefill and 6 decode machines."""
        return self.family.named([f"{count}×{kind.short}" for kind, count in self.parts()])

    @property
    def machines(self) -> int:
        """Number of machines, or of instances if these use parts of machines."""
        return sum(count for _, count in self.machines_by_kind())

    @property
    def accelerators(self) -> int:
        return sum(count * kind.accelerators for kind, count in self.parts())

    @property
    def price_per_h(self) -> float:
        return round(sum(count * kind.price_per_h for kind, count in self.parts()), 6)

    @property
    def tdp_w(self) -> float:
        return round(sum(count * kind.tdp_w for kind, count in self.parts()), 6)

    def parts(self) -> Iterator[tuple[MachineKind, int]]:
        """Return the machine types of the design with their counts."""
        return zip(self.family.kinds, self.counts, strict=True)

    def machines_by_kind(self) -> Iterator[tuple[MachineKind, int]]:
        """Return the machine types with their numbers of machines, or of instances that use parts of machines."""
        return ((kind, count * max(1, kind.machines)) for kind, count in self.parts())

    def parts_of(self, role: Role) -> Iterator[tuple[MachineKind, int]]:
        """Return the machine types that have the role `role`, with their counts."""
        return (part for part, plays in zip(self.parts(), self.family.role_of, strict=True) if plays is role)


class RatedDesign(msgspec.Struct, frozen=True, kw_only=True):
    """A design and a rate (requests/s) that it serves within the SLO, by simulation or by prediction."""

    design: Design
    rate: float

    @property
    def per_accelerator(self) -> float:
        """Goodput per accelerator in requests/s, DistServe's criterion for placements."""
        return self.rate / self.design.accelerators


Allows = Callable[[Design], bool]
_SLACK = 1.0 + 1e-9  # for rounding errors in sums of prices
# A larger number is probably a typing error, and would make the search endless.
MAX_MACHINES = 100_000


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Upper limits on the machines, price and power of a design; None means no limit."""

    machines: int | None = None
    price_per_h: float | None = None
    tdp_w: float | None = None
    of_kind: dict[str, int] = {}  # limits on machines by machine type

    def bounds(self, family: Family) -> bool:
        """Return whether the budget limits the number of machines in designs of `family`."""
        bounded = any(limit is not None for limit in (self.machines, self.price_per_h, self.tdp_w))
        return bounded or all(kind.name in self.of_kind for kind in family.kinds)

    def allows(self, design: Design) -> bool:
        within = ((design.machines, self.machines), (design.price_per_h, self.price_per_h), (design.tdp_w, self.tdp_w))
        if any(bound is not None and value > bound * _SLACK for value, bound in within):
            return False
        used = tuple(design.machines_by_kind())
        return all(sum(n for kind, n in used if kind.name == name) <= most for name, most in self.of_kind.items())

    def require_sensible(self) -> None:
        """Raise ConfigurationError if a limit is out of range or allows no machine."""
        for flag, value in (
            ("--max-machines", self.machines),
            ("--max-cost", self.price_per_h),
            ("--max-power", None if self.tdp_w is None else self.tdp_w / 1e3),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(f"{flag} must be more than 0, not {value:g}")
        for most in filter(None, (self.machines, *self.of_kind.values())):
            require(most <= MAX_MACHINES, f"--max-machines must be at most {MAX_MACHINES}, not {most}")
        for name, most in self.of_kind.items():
            require(most >= 1, f"--max-machines {name}={most} admits none: give at least 1, or plan without {name}")

    @property
    def description(self) -> str:
        """Short description of the limits, such as `power budget`."""
        bounds = (("machine", self.machines), ("cost", self.price_per_h), ("power", self.tdp_w))
        names = [name for name, bound in bounds if bound is not None]
        return f"{names[0]} budget" if len(names) == 1 else "budget"


def frontier(family: Family, allows: Allows) -> list[Design]:
    """Return the designs that `allows` accepts, but would reject with one more machine of any kind.

    The function `allows` must reject every design that is larger than a rejected design.
    """
    # Largest: `allows` refuses one more machine. In ascending order of machines of the first kind.
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
    """Return the highest number that `allowed` accepts; 0 if there is none."""
    return bisect_left(range(1, MAX_MACHINES + 1), True, key=lambda count: not allowed(count))
