"""The machines of a Ray cluster, as what a plan may use."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from twofold.hardware.catalog import Catalog
from twofold.hardware.machine import Machine
from twofold.raycluster.nodes import RayNode

_MAKERS = ("nvidia-", "tesla-", "amd-", "instinct-")


class RayStock(msgspec.Struct, frozen=True, kw_only=True):
    """Whole machines of the catalog and their accelerators, by machine; `left_out` says which nodes are not in it."""

    machines: dict[str, int]
    accelerators: dict[str, int]
    left_out: tuple[str, ...]


def stock_of(nodes: Iterable[RayNode], catalog: Catalog) -> RayStock:
    """What the nodes with accelerators are in the catalog; nodes without are for other things."""
    machines, accelerators, left_out = Counter[str](), Counter[str](), []
    for node in nodes:
        if not node.accelerators:
            continue
        machine = _machine_of(node, catalog)
        if machine is None:
            kind = node.accelerator or "a type that Ray does not know"
            left_out.append(f"{node.address} has {node.accelerators} x {kind}, which is not in the catalog")
            continue
        accelerators[machine.name] += node.accelerators
        whole = node.accelerators // machine.count
        if whole:
            machines[machine.name] += whole
    return RayStock(machines=dict(machines), accelerators=dict(accelerators), left_out=tuple(left_out))


def _machine_of(node: RayNode, catalog: Catalog) -> Machine | None:
    """Of several with the accelerator the one that has as many of them as the node; none that is capped, which Ray
    cannot know."""
    if node.accelerator is None:
        return None
    fits = [
        machine
        for machine in catalog.machines.values()
        if machine.power_cap == 1.0 and _is(node.accelerator, machine.accelerator.name)
    ]
    return min(fits, key=lambda machine: machine.count != node.accelerators, default=None)


def _is(ray_type: str, name: str) -> bool:
    """Whether Ray's word, as in H100, A100-80G or AMD-Instinct-MI300X-OAM, means an accelerator, as in h100-80gb."""
    word = ray_type.lower().removesuffix("-oam")
    for maker in _MAKERS:
        word = word.removeprefix(maker)
    return name in {word, f"{word}b"} or name.startswith(f"{word}-")
