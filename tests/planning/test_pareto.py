"""The Pareto front: exactly the points that no other point dominates."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from support.analytic_cluster import COLOCATED, SPLIT, AnalyticCluster, design
from twofold.planning.design import RatedDesign
from twofold.planning.evaluation import Trial
from twofold.planning.pareto import covers, front_of, pareto_front
from twofold.planning.plan import DesignChoice

points = st.lists(
    st.builds(
        lambda counts, rate: RatedDesign(design=design(*counts), rate=float(rate)),
        st.tuples(st.integers(1, 4), st.integers(1, 4)),
        st.integers(1, 5),
    ),
    max_size=20,
)


@given(points)
def test_the_front_covers_every_point_and_no_member_another(some):
    front = pareto_front(some)
    assert all(any(covers(kept, point) for kept in front) for point in some)
    assert not any(covers(one, other) for one in front for other in front if one is not other)
    assert [point.rate for point in front] == sorted(point.rate for point in front)


@given(points)
def test_the_front_does_not_depend_on_the_order(some):
    assert pareto_front(some) == pareto_front(reversed(some))


def test_front_has_smaller_clusters_at_their_highest_rates():
    cluster = AnalyticCluster(6.0, 3.0, 4.0)
    search = cluster.search()
    best = [design(8, 16), design(20, family=COLOCATED)]
    choices = [asyncio.run(chosen(search, cluster, one)) for one in best]
    front = asyncio.run(front_of(search, choices, [RatedDesign(design=design(1, 1), rate=0.5)]))
    assert front[-1].design == best[1]
    assert any(point.design == design(1, 1) for point in front)
    for point in front:
        assert point.rate == search.grid.rate(search.grid.step(cluster.capacity(point.design)))
    assert {point.design.family for point in front} == {SPLIT, COLOCATED}


async def chosen(search, cluster, one):
    rate = search.grid.rate(search.grid.step(cluster.capacity(one)))
    return DesignChoice(design=one, rate=rate, highest_rate=rate, evaluation=await cluster(Trial(one, rate)))
