"""Routers and the cluster accounts they decide by."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.handoff import HandoffMode
from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.handoffs import FixedHandoff
from twofold.scheduling.router import Route
from twofold.scheduling.routers import ROUTERS


def request(name="a", prompt=100, output=10):
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)


def cluster(roles, router="jsq"):
    made = ClusterScheduler(ROUTERS[router](), FixedHandoff(HandoffMode.LAYER_WISE))
    for i, role in enumerate(roles):
        made.add_instance(f"{role.value}-{i}", role)
    return made


def test_jsq_joins_the_shortest_queue_of_each_phase():
    """Fewest pending prompt tokens for prefill, least memory reserved for decode."""
    loads = [
        InstanceLoad("p0", Role.PREFILL, pending_prefill_tokens=50),
        InstanceLoad("p1", Role.PREFILL, pending_prefill_tokens=20),
        InstanceLoad("d0", Role.DECODE, reserved_tokens=10),
        InstanceLoad("d1", Role.DECODE, reserved_tokens=30),
    ]
    assert ROUTERS["jsq"]().route(request(), loads, 0.0) == Route("p1", "d0")


def test_a_mixed_instance_keeps_both_phases():
    """Nothing travels where nothing has to."""
    placement = cluster([Role.MIXED, Role.MIXED]).arrive(request(), 0.0)
    assert placement is not None
    assert not placement.route.splits
    assert placement.mode is None


def test_no_route_without_both_phases():
    """A service without a decode instance cannot take requests."""
    assert cluster([Role.PREFILL]).arrive(request(), 0.0) is None
    assert cluster([Role.DECODE], "round-robin").arrive(request(), 0.0) is None


def test_a_lost_instance_gives_back_the_requests_it_held():
    """Those whose prefill is over are lost with their decode instance only."""
    made = cluster([Role.PREFILL, Role.DECODE])
    made.arrive(request("a"), 0.0)
    made.arrive(request("b"), 0.0)
    made.prefilled("a")
    assert made.remove_instance("prefill-0") == ["b"]
    assert made.remove_instance("decode-1") == ["a", "b"]


@given(
    st.sampled_from(sorted(ROUTERS)),
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 50), st.booleans())),
)
def test_loads_return_to_zero_when_all_requests_end(router, sizes):
    """Whatever is placed and however it ends, the accounts balance."""
    made = cluster([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE], router)
    for i, (prompt, output, prefilled) in enumerate(sizes):
        made.arrive(request(str(i), prompt, output), 0.0)
        if prefilled:
            made.prefilled(str(i))
    for i in range(len(sizes)):
        made.ended(str(i))
    for load in made.loads.values():
        assert (load.pending_prefill_tokens, load.reserved_tokens, load.requests) == (0, 0, 0)
