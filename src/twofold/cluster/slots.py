"""Where the instances of a cluster are, and what they are called."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twofold.cluster.profiles import InstanceProfile
from twofold.cluster.spec import ClusterSpec
from twofold.hardware.specs import Machine
from twofold.instance import Role


@dataclass(frozen=True, slots=True)
class InstanceSlot:
    """An instance to be: its name, the pool (`place`) that it is in, and the machine, or machines, that it is on."""

    name: str
    place: int
    machine: str
    kind: InstanceProfile


def instance_slots(kinds: Sequence[InstanceProfile]) -> Iterator[InstanceSlot]:
    """Every instance of a cluster, in order. Names count the instances of a role over all its pools."""
    numbers: dict[Role, int] = dict.fromkeys(Role, 0)
    for place, kind in enumerate(kinds):
        role, layout = kind.pool.role, kind.layout
        nodes = str(place) if kind.pool.nodes is None else f"nodes-{kind.pool.nodes}"
        for number in range(layout.instances):
            machines = "+".join(f"{nodes}/{machine}" for machine in layout.machines_of(number))
            yield InstanceSlot(f"{role.value}-{numbers[role]}", place, machines, kind)
            numbers[role] += 1


def cells_of(spec: ClusterSpec, seats: Sequence[InstanceSlot]) -> dict[str, str]:
    """The cell of each instance: those of each role are dealt out in order, the first ones to the first cell."""
    if not isinstance(spec.cells, int):
        return {}
    of_role = {role: [seat.name for seat in seats if seat.kind.pool.role is role] for role in Role}
    return {
        name: f"cell-{number * spec.cells // len(names)}"
        for names in of_role.values()
        for number, name in enumerate(names)
    }


def machines_of(kinds: Sequence[InstanceProfile]) -> Iterator[tuple[Machine, int]]:
    """Every kind of machine of a cluster and how many there are of it, those that pools share once."""
    shared: set[str] = set()
    for kind in kinds:
        nodes = kind.pool.nodes
        if nodes is None or nodes not in shared:
            yield kind.machine, kind.pool.machines
        if nodes is not None:
            shared.add(nodes)
