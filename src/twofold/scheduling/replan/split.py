"""The split of instances between prefill and decode, and the steps from one split to another."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import msgspec

from twofold.instance import InstanceLoad, Role
from twofold.scheduling.cluster.pools import Pools


class RoleSplit(msgspec.Struct, frozen=True, order=True):
    """The number of instances by home role."""

    prefill: int
    decode: int

    @property
    def instances(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"

    @classmethod
    def of(cls, loads: Iterable[InstanceLoad]) -> "RoleSplit":
        """The split of the instances that are not paused."""
        homes = [load.home for load in loads if load.place]
        return cls(homes.count(Role.PREFILL), homes.count(Role.DECODE))


class ReplanAction(StrEnum):
    """Kinds of steps: a role change is free, a start takes time, and a retirement reduces capacity at once."""

    ROLE = "role"
    START = "start"
    RETIRE = "retire"


class ReplanStep(msgspec.Struct, frozen=True):
    """One step; `role` is the new role of the instance, None if it retires."""

    action: ReplanAction
    instance: str
    role: Role | None = None


def steps_to(split: RoleSplit, pools: Pools, retired: Sequence[str]) -> tuple[ReplanStep, ...]:
    """The steps to a split: role changes first, then starts and retirements.

    Instances with the least work change first, because they serve the new role soonest. `retired` can be started.
    """
    leaving_prefill = _leaving(pools, Role.PREFILL, split.prefill, lambda load: load.pending_prefill_tokens)
    leaving_decode = _leaving(pools, Role.DECODE, split.decode, lambda load: load.reserved_tokens)
    running = RoleSplit.of(pools)
    missing = [Role.PREFILL] * (split.prefill - running.prefill) + [Role.DECODE] * (split.decode - running.decode)
    steps: list[ReplanStep] = []
    leaving = leaving_prefill + leaving_decode
    while leaving and missing:
        steps.append(ReplanStep(ReplanAction.ROLE, leaving.pop(0), missing.pop(0)))
    steps += [ReplanStep(ReplanAction.START, name, role) for name, role in zip(retired, missing, strict=False)]
    steps += [ReplanStep(ReplanAction.RETIRE, name) for name in leaving]
    return tuple(steps)


def _leaving(pools: Pools, home: Role, wanted: int, work: Callable[[InstanceLoad], int]) -> list[str]:
    """The surplus instances of a home role, least loaded first."""
    members = [load for load in pools if load.place and load.home is home]
    members.sort(key=work)  # stable: earlier instances first among equals
    return [load.id for load in members[: max(0, len(members) - wanted)]]


def degraded_plan(planned: RoleSplit, left: int, running: RoleSplit) -> RoleSplit | None:
    """The split of `left` instances with the shares nearest to the planned ones; None with fewer than two instances.

    Ties go to the split nearest to the running one. Each phase gets at least one instance.
    """
    splits = (RoleSplit(prefill, left - prefill) for prefill in range(1, left))

    def rank(split: RoleSplit) -> tuple[int, int]:
        # How far prefill's share is from the planned one, as a whole number: equals must be equal.
        distance = abs(split.prefill * planned.instances - planned.prefill * left)
        return distance, abs(split.prefill - running.prefill)

    return min(splits, key=rank, default=None)
