"""A split of the instances between the phases, and the steps from the one that runs to another."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import msgspec

from twofold.instance import InstanceLoad, Role
from twofold.scheduling.pools import Pools


class Split(msgspec.Struct, frozen=True, order=True):
    """How many instances have which phase for their home."""

    prefill: int
    decode: int

    @property
    def instances(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"

    @classmethod
    def of(cls, loads: Iterable[InstanceLoad]) -> "Split":
        """That of the instances which are given work."""
        homes = [load.home for load in loads if load.place]
        return cls(homes.count(Role.PREFILL), homes.count(Role.DECODE))


class Action(StrEnum):
    """A role costs nothing, an instance that starts takes its time, and one that retires is missed at once."""

    ROLE = "role"
    START = "start"
    RETIRE = "retire"


class Step(msgspec.Struct, frozen=True):
    """`role` is what the instance does from then on; None for one that retires."""

    action: Action
    instance: str
    role: Role | None = None


def steps_to(split: Split, pools: Pools, retired: Sequence[str]) -> tuple[Step, ...]:
    """Roles first, then replicas: what is to be done in this order so that the instances are split so.

    Those that have least to do for their phase go first, because they are soonest of use to the other one. `retired`
    are instances that may be started.
    """
    leaving_prefill = _leaving(pools, Role.PREFILL, split.prefill, lambda load: load.pending_prefill_tokens)
    leaving_decode = _leaving(pools, Role.DECODE, split.decode, lambda load: load.reserved_tokens)
    running = Split.of(pools)
    missing = [Role.PREFILL] * (split.prefill - running.prefill) + [Role.DECODE] * (
        split.decode - running.decode
    )
    steps: list[Step] = []
    leaving = leaving_prefill + leaving_decode
    while leaving and missing:
        steps.append(Step(Action.ROLE, leaving.pop(0), missing.pop(0)))
    steps += [Step(Action.START, name, role) for name, role in zip(retired, missing, strict=False)]
    steps += [Step(Action.RETIRE, name) for name in leaving]
    return tuple(steps)


def _leaving(pools: Pools, home: Role, wanted: int, work: Callable[[InstanceLoad], int]) -> list[str]:
    """The instances of this home that are more than are wanted."""
    members = [load for load in pools if load.place and load.home is home]
    members.sort(key=work)  # stable: among equals those that joined first
    return [load.id for load in members[: max(0, len(members) - wanted)]]
