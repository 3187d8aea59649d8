"""The nodes of a Ray cluster and what they have."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

_ACCELERATOR: Final = "accelerator_type:"  # how Ray writes an accelerator's type among the resources
Bundle = Mapping[str, float]  # of each resource so much, always together and on one node


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node that lives: its labels, and of each resource how much it has and how much of that is `free`."""

    id: str
    address: str
    labels: dict[str, str] = {}
    total: dict[str, float] = {}
    free: dict[str, float] = {}

    @property
    def accelerator(self) -> str | None:
        """The type of its accelerators as Ray calls it, such as H100; None where it knows none."""
        named = (name.removeprefix(_ACCELERATOR) for name in self.total if name.startswith(_ACCELERATOR))
        return next(named, None)

    @property
    def accelerators(self) -> int:
        return int(self.total.get("GPU", 0))

    def has_room(self, bundle: Bundle) -> bool:
        return all(self.free.get(name, 0.0) >= amount for name, amount in bundle.items())


def nodes_of(ray: Any, *, with_room: bool = False) -> tuple[RayNode, ...]:  # noqa: ANN401  (the module, which has no types)
    """The nodes that live, in the order of their ids; what of them is free only `with_room`."""
    free: dict[str, dict[str, float]] = {}
    if with_room:
        from ray._private.state import available_resources_per_node  # noqa: PLC0415  (an extra)

        free = available_resources_per_node()
    nodes = (
        RayNode(
            id=each["NodeID"],
            address=each["NodeManagerAddress"],
            labels=dict(each.get("Labels") or {}),
            total=dict(each["Resources"]),
            free=dict(free.get(each["NodeID"], {})),
        )
        for each in ray.nodes()
        if each["Alive"]
    )
    return tuple(sorted(nodes, key=lambda node: node.id))
