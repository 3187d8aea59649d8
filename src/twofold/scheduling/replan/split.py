"""A split of the instances between the phases, and the steps from the one that runs to another.

A smaller plan: how fewer instances than were planned are split.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import msgspec

from twofold.instance import InstanceLoad, Role
from twofold.scheduling.cluster.pools import Pools


class RoleSplit(msgspec.Struct, frozen=True, order=True):
    """How many instances have which phase for their home."""

    prefill: int
    decode: int

    @property
    def instances(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"

    @classmethod
    def of(cls, loads: Iterable[InstanceLoad]) -> "RoleSplit":
        """That of the instances which are given work."""
        homes = [load.home for load in loads if load.place]
        return cls(homes.count(Role.PREFILL), homes.count(Role.DECODE))


class ReplanAction(StrEnum):
    """A role costs nothing, an instance that starts takes its time, and one that retires is missed at once."""

    ROLE = "role"
    START = "start"
    RETIRE = "retire"


class ReplanStep(msgspec.Struct, frozen=True):
    """`role` is what the instance does from then on; None for one that retires."""

    action: ReplanAction
    instance: str
    role: Role | None = None


def steps_to(split: RoleSplit, pools: Pools, retired: Sequence[str]) -> tuple[ReplanStep, ...]:
    """Roles first, then replicas: what is to be done in this order so that the instances are split so.

    Those that have least to do for their phase go first, because they are soonest of use to the other one. `retired`
    are instances that may be started.
    """
    leaving_prefill = _leaving(pools, Role.PREFILL, split.prefill, lambda load: load.pending_prefill_tokens)
    leaving_decode = _leaving(pools, Role.DECODE, split.decode, lambda load: load.reserved_tokens)
    running = RoleSplit.of(pools)
    missing = [Role.PREFILL] * (split.prefill - running.prefill) + [Role.DECODE] * (
        split.decode - running.decode
    )
    steps: list[ReplanStep] = []
    leaving = leaving_prefill + leaving_decode
    while leaving and missing:
        steps.append(ReplanStep(ReplanAction.ROLE, leaving.pop(0), missing.pop(0)))
    steps += [
        ReplanStep(ReplanAction.START, name, role) for name, role in zip(retired, missing, strict=False)
    ]
    steps += [ReplanStep(ReplanAction.RETIRE, name) for name in leaving]
    return tuple(steps)


def _leaving(pools: Pools, home: Role, wanted: int, work: Callable[[InstanceLoad], int]) -> list[str]:
    """The instances of this home that are more than are wanted."""
    members = [load for load in pools if load.place and load.home is home]
    members.sort(key=work)  # stable: among equals those that joined first
    return [load.id for load in members[: max(0, len(members) - wanted)]]


def degraded_plan(planned: RoleSplit, left: int, running: RoleSplit) -> RoleSplit | None:
    """The split of `left` instances whose shares are nearest to the planned ones, with some for both phases.

    Of equals the one that is nearest to what runs, which moves least. None where there is not one for each phase.
    """
    splits = (RoleSplit(prefill, left - prefill) for prefill in range(1, left))

    def rank(split: RoleSplit) -> tuple[int, int]:
        # How far prefill's share is from the planned one, as a whole number: equals must be equal.
        distance = abs(split.prefill * planned.instances - planned.prefill * left)
        return distance, abs(split.prefill - running.prefill)

    return min(splits, key=rank, default=None)
