"""Which node of a Ray cluster a worker goes to."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from twofold.instance import Role
from twofold.raycluster.nodes import Bundle, RayNode


class Neighbour(msgspec.Struct, frozen=True):
    """A worker of the same service that has a node already."""

    role: Role
    node: str


def choose(
    role: Role, bundle: Bundle, nodes: Sequence[RayNode], others: Iterable[Neighbour], link_label: str
) -> RayNode | None:
    """The node for one more worker, None where no node has room for it.

    KV caches travel between the phases, so a worker goes where most of the others are within reach of the fast link:
    nodes with the same value of `link_label`; the first goes where such a group has most room. Within it the workers of
    a phase are spread, so that a node that is lost takes no phase with it; then all workers, over those with most room.
    """
    placed = list(others)
    on_node = Counter(each.node for each in placed)
    of_role = Counter(each.node for each in placed if each.role is role)
    near, room = Counter[str | None](), Counter[str | None]()
    for node in nodes:
        group = node.labels.get(link_label)
        near[group] += on_node[node.id]
        room[group] += _room(node, bundle)

    def rank(node: RayNode) -> tuple[int, int, int, int, int, str]:
        group = node.labels.get(link_label)
        spread = -of_role[node.id], -on_node[node.id]
        return near[group], room[group], *spread, _room(node, bundle), node.id

    return max((node for node in nodes if node.has_room(bundle)), key=rank, default=None)


def _room(node: RayNode, bundle: Bundle) -> int:
    """How many such bundles are free on a node."""
    return int(min((node.free.get(name, 0.0) / amount for name, amount in bundle.items()), default=0.0))
