"""Choice of a Ray node for each worker, tested without a Ray cluster."""

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
    """Place workers of the given roles one by one on Ray nodes; return the placements."""
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


def test_workers_stay_within_one_link_domain():
    nodes = [node("a", 3, "slow"), node("b", 2, "fast"), node("c", 2, "fast")]
    assert {each.node for each in placed([P, P, D, D], nodes)} == {"b", "c"}


def test_workers_overflow_to_another_link_domain():
    nodes = [node("a", 1, "slow"), node("b", 2, "fast")]
    assert Counter(each.node for each in placed([P, D, D], nodes)) == {"b": 2, "a": 1}


def test_each_node_gets_both_phases():
    nodes = [node("a", 2, "fast"), node("b", 2, "fast")]
    found = placed([P, P, D, D], nodes)
    assert all({each.node for each in found if each.role is role} == {"a", "b"} for role in (P, D))


def test_a_bundle_is_not_divided_between_nodes():
    halves = [node("a", 1), node("b", 1)]
    assert choose_node(P, {"CPU": 2.0}, halves, [], LINK) is None
    gpus = RayNode(id="c", address="", free={"CPU": 8.0, "GPU": 1.0})
    assert choose_node(P, {"CPU": 1.0, "GPU": 1.0}, [*halves, gpus], [], LINK) is gpus


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, "x", "y"])), max_size=6),
    st.lists(st.sampled_from([P, D]), max_size=12),
)
def test_nodes_are_filled_and_never_overcommitted(cpus, roles):
    nodes = [node(f"n{i}", count, rack) for i, (count, rack) in enumerate(cpus)]
    found = placed(roles, nodes)
    assert len(found) == min(len(roles), sum(count for count, _ in cpus))
    on_node = Counter(each.node for each in found)
    assert all(on_node[each.id] <= each.total["CPU"] for each in nodes)
