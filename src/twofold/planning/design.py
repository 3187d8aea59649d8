"""Designs: which machines run which phase, how many of each, and what that costs before anything runs."""

from collections.abc import Iterator

import msgspec

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
    family, which has a `batcher` and may have a `max_num_batched_tokens` of its own. A fleet of unlike accelerators has several
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
