"""Routing in two steps: to a cell (a group of instances), then to instances of the cell."""

from hypothesis import given
from hypothesis import strategies as st

from support.routed import request
from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.routers import ROUTERS
from twofold.scheduling.routers.cells import CellLoad, CellSelector

BY_LAYER = FixedHandoff(HandoffMode.LAYER_WISE)


def cluster(cells, prefill=2, decode=2, router="cells:jsq"):
    """Return a cluster scheduler with instances named CELL-ROLE-NUMBER."""
    made = ClusterScheduler(ROUTERS[router](), BY_LAYER)
    for cell in cells:
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for number in range(count):
                made.add_instance(f"{cell}-{role.value}-{number}", role, cell=cell)
    return made


def cell_of(instance):
    return instance.partition("-")[0]


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 500)), min_size=1, max_size=60))
def test_both_instances_are_in_one_cell(sizes):
    made = cluster("abc")
    for number, (prompt, output) in enumerate(sizes):
        route = made.place(request(str(number), prompt, output), 0.0).route
        assert cell_of(route.prefill) == cell_of(route.decode)


def test_picks_the_less_loaded_cell_and_its_shortest_queue():
    made = cluster("ab")
    routes = [made.place(request(str(number)), 0.0).route for number in range(8)]
    used = [route.prefill for route in routes]
    assert sorted(used) == sorted(2 * [f"{cell}-prefill-{number}" for cell in "ab" for number in (0, 1)])
    assert all(cell_of(one) != cell_of(two) for one, two in zip(used[::2], used[1::2], strict=True))


def test_a_single_cell_routes_like_its_router():
    flat, one = cluster("a", router="jsq"), cluster("a")
    for number in range(20):
        asked = request(str(number), 100 + 37 * number % 11, 10)
        assert one.place(asked, 0.0).route == flat.place(asked, 0.0).route


def test_skips_cells_without_both_phases():
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


def test_cells_are_compared_per_instance():
    assert upper(("small", 1, 1, 100, 1000), ("large", 10, 10, 500, 5000)).prefill == "large"


def test_both_phases_count():
    assert upper(("a", 1, 1, 200, 900), ("b", 1, 1, 100, 1000)).prefill == "b"
    assert upper(("a", 1, 1, 100, 900), ("b", 1, 1, 110, 9000)).prefill == "a"
    assert upper(("a", 1, 1, 0, 0), ("b", 1, 1, 0, 1)).prefill == "a"


def test_no_route_without_a_cell():
    assert upper() is None
    assert cluster("ab", decode=0).place(request(), 0.0) is None
