"""Routing in two levels."""

from hypothesis import given
from hypothesis import strategies as st

from support.routed import request
from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.scheduling.cluster.cells import CellLoad
from twofold.scheduling.cluster.handoff_policy import FixedHandoff
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.routers import ROUTERS
from twofold.scheduling.routers.cells import CellSelector

BY_LAYER = FixedHandoff(HandoffMode.LAYER_WISE)


def cluster(cells, prefill=2, decode=2, router="cells:jsq"):
    """Instances named after their cell, role and number."""
    made = ClusterScheduler(ROUTERS[router](), BY_LAYER)
    for cell in cells:
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for number in range(count):
                made.add_instance(f"{cell}-{role.value}-{number}", role, cell=cell)
    return made


def cell_of(instance):
    return instance.partition("-")[0]


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 500)), min_size=1, max_size=60))
def test_both_instances_of_a_request_are_in_one_cell(sizes):
    """Whatever is on them."""
    made = cluster("abc")
    for number, (prompt, output) in enumerate(sizes):
        route = made.place(request(str(number), prompt, output), 0.0).route
        assert cell_of(route.prefill) == cell_of(route.decode)


def test_of_two_cells_the_lighter_one_and_in_it_the_shortest_queue():
    """Equal requests go to two cells of two in turns, and to the instances of each in turns."""
    made = cluster("ab")
    routes = [made.place(request(str(number)), 0.0).route for number in range(8)]
    used = [route.prefill for route in routes]
    assert sorted(used) == sorted(2 * [f"{cell}-prefill-{number}" for cell in "ab" for number in (0, 1)])
    assert all(cell_of(one) != cell_of(two) for one, two in zip(used[::2], used[1::2], strict=True))


def test_one_cell_is_routed_as_by_the_router_within():
    """Cells cost nothing where there is only one."""
    flat, one = cluster("a", router="jsq"), cluster("a")
    for number in range(20):
        asked = request(str(number), 100 + 37 * number % 11, 10)
        assert one.place(asked, 0.0).route == flat.place(asked, 0.0).route


def test_a_cell_without_one_of_the_phases_is_passed_over():
    """As long as another has both; then requests go from cell to cell rather than nowhere."""
    made = cluster("ab", prefill=1, decode=1)
    made.pause("a-decode-0")
    assert {cell_of(made.place(request(str(n)), 0.0).route.prefill) for n in range(6)} == {"b"}
    made.pause("b-prefill-0")
    assert made.place(request("across"), 0.0).route.prefill == "a-prefill-0"
    made.resume("a-decode-0")
    made.resume("b-prefill-0")
    assert {cell_of(made.place(request(f"again{n}"), 0.0).route.prefill) for n in range(20)} == {"a", "b"}


def upper(*cells):
    pools = Pools()
    for name, prefilling, decoding, pending, reserved in cells:
        load = CellLoad(name, prefilling, decoding)
        load.pending_prefill_tokens, load.reserved_tokens = pending, reserved
        pools.add(load)
    return CellSelector().route(request(), 109, pools, 0.0)


def test_cells_are_compared_by_what_there_is_for_each_of_their_instances():
    """A cell of ten with more work in all has less for each."""
    assert upper(("small", 1, 1, 100, 1000), ("large", 10, 10, 500, 5000)).prefill == "large"


def test_both_phases_of_a_cell_count():
    """Twice the prompts outweigh a tenth less memory, and nothing is lighter than a little."""
    assert upper(("a", 1, 1, 200, 900), ("b", 1, 1, 100, 1000)).prefill == "b"
    assert upper(("a", 1, 1, 100, 900), ("b", 1, 1, 110, 9000)).prefill == "a"
    assert upper(("a", 1, 1, 0, 0), ("b", 1, 1, 0, 1)).prefill == "a"


def test_no_cell_no_route():
    """None, as wherever nobody can take a request."""
    assert upper() is None
    assert cluster("ab", decode=0).place(request(), 0.0) is None
