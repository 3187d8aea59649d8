"""Which node a worker goes to; it needs no Ray."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from twofold.instance import Role
from twofold.raycluster.cluster import RayNode
from twofold.serving.launch.ray.driver import PlacedNeighbour, choose_node

CPU = {"CPU": 1.0}
LINK = "rack"


def node(name, cpus, rack=None):
    labels = {} if rack is None else {LINK: rack}
    return RayNode(id=name, address="10.0.0.1", labels=labels, total={"CPU": cpus}, free={"CPU": cpus})


def placed(roles, nodes, bundle=CPU):
    """Where workers go that come one after the other, with what each takes of its node."""
    free, found = {each.id: dict(each.free) for each in nodes}, []
    for role in roles:
        now = [RayNode(id=each.id, address="", labels=each.labels, free=free[each.id]) for each in nodes]
        chosen = choose_node(role, bundle, now, found, LINK)
        if chosen is None:
            break
        for name, amount in bundle.items():
            free[chosen.id][name] -= amount
        found.append(PlacedNeighbour(role, chosen.id))
    return found


P, D = Role.PREFILL, Role.DECODE


def test_workers_stay_within_the_reach_of_the_fast_link():
    """All go where there is room for all, although other nodes have room too."""
    nodes = [node("a", 3, "slow"), node("b", 2, "fast"), node("c", 2, "fast")]
    assert {each.node for each in placed([P, P, D, D], nodes)} == {"b", "c"}


def test_they_go_on_elsewhere_where_it_has_no_more_room():
    """A worker that is far is better than none."""
    nodes = [node("a", 1, "slow"), node("b", 2, "fast")]
    assert Counter(each.node for each in placed([P, D, D], nodes)) == {"b": 2, "a": 1}


def test_a_lost_node_takes_no_phase_with_it():
    """Each of two nodes has one worker of each phase."""
    nodes = [node("a", 2, "fast"), node("b", 2, "fast")]
    found = placed([P, P, D, D], nodes)
    assert all({each.node for each in found if each.role is role} == {"a", "b"} for role in (P, D))


def test_a_bundle_is_on_one_node():
    """Two halves on two nodes are no room."""
    halves = [node("a", 1), node("b", 1)]
    assert choose_node(P, {"CPU": 2.0}, halves, [], LINK) is None
    gpus = RayNode(id="c", address="", free={"CPU": 8.0, "GPU": 1.0})
    assert choose_node(P, {"CPU": 1.0, "GPU": 1.0}, [*halves, gpus], [], LINK) is gpus


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, "x", "y"])), max_size=6),
    st.lists(st.sampled_from([P, D]), max_size=12),
)
def test_room_is_used_and_never_twice(cpus, roles):
    """As many are placed as fit, and no node has more than it has room for."""
    nodes = [node(f"n{i}", count, rack) for i, (count, rack) in enumerate(cpus)]
    found = placed(roles, nodes)
    assert len(found) == min(len(roles), sum(count for count, _ in cpus))
    on_node = Counter(each.node for each in found)
    assert all(on_node[each.id] <= each.total["CPU"] for each in nodes)
