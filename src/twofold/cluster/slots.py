"""Names and machines of a cluster's instances."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twofold.cluster.profiles import InstanceProfile
from twofold.cluster.spec import ClusterSpec
from twofold.hardware.specs import Machine
from twofold.instance import Role


@dataclass(frozen=True, slots=True)
class InstanceSlot:
    """Place of one instance: its name, its index in the cluster, that of its pool, and its machine (several joined by
    `+`)."""

    name: str
    number: int
    pool: int
    machine: str
    profile: InstanceProfile


def instance_slots(profiles: Sequence[InstanceProfile]) -> Iterator[InstanceSlot]:
    """Yield every instance in pool order; names number the instances of a role across pools."""
    numbers: dict[Role, int] = dict.fromkeys(Role, 0)
    for pool, profile in enumerate(profiles):
        role, layout = profile.pool.role, profile.layout
        nodes = str(pool) if profile.pool.nodes is None else f"nodes-{profile.pool.nodes}"
        for number in range(layout.instances):
            machines = "+".join(f"{nodes}/{machine}" for machine in layout.machines_of(number))
            yield InstanceSlot(f"{role.value}-{numbers[role]}", sum(numbers.values()), pool, machines, profile)
            numbers[role] += 1


def cells_of(spec: ClusterSpec, slots: Sequence[InstanceSlot]) -> dict[str, str]:
    """Map instances to cells: each role's instances are divided evenly, in order."""
    if not isinstance(spec.cells, int):
        return {}
    of_role = {role: [slot.name for slot in slots if slot.profile.pool.role is role] for role in Role}
    return {
        name: f"cell-{number * spec.cells // len(names)}"
        for names in of_role.values()
        for number, name in enumerate(names)
    }


def machines_of(profiles: Sequence[InstanceProfile]) -> Iterator[tuple[Machine, int]]:
    """Yield (machine type, count); machines shared by several pools count once."""
    shared: set[str] = set()
    for profile in profiles:
        nodes = profile.pool.nodes
        if nodes is None or nodes not in shared:
            yield profile.machine, profile.pool.machines
        if nodes is not None:
            shared.add(nodes)
