"""What a virtual instance is from its first moment on, whatever kind of instance it is."""

from dataclasses import dataclass

from twofold.cluster.timing import Timing
from twofold.instance import Role
from twofold.simulation.network import MachineLink


@dataclass(frozen=True, slots=True)
class Site:
    """`number` counts the instances of a cluster and `pool` its pools; `link` is its machines' way to the others."""

    name: str
    number: int
    link: MachineLink
    pool: int
    role: Role
    timing: Timing
