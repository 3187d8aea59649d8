"""The split between prefill and decode when fewer instances than planned are available."""

from hypothesis import given
from hypothesis import strategies as st

from twofold.scheduling.replan.replanner import RoleSplit, degraded_plan

counts = st.integers(1, 20)


def test_keeps_the_planned_shares():
    assert degraded_plan(RoleSplit(2, 6), 4, RoleSplit(2, 2)) == RoleSplit(1, 3)


def test_ties_prefer_the_running_split():
    assert degraded_plan(RoleSplit(2, 2), 3, RoleSplit(1, 2)) == RoleSplit(1, 2)
    assert degraded_plan(RoleSplit(2, 2), 3, RoleSplit(2, 1)) == RoleSplit(2, 1)


def test_one_instance_has_no_split():
    assert degraded_plan(RoleSplit(1, 1), 1, RoleSplit(0, 1)) is None


@given(counts, counts, st.integers(2, 40), st.integers(0, 40))
def test_both_phases_have_instances(prefill, decode, left, running):
    planned = RoleSplit(prefill, decode)
    found = degraded_plan(planned, left, RoleSplit(min(running, left), left - min(running, left)))
    assert found.instances == left
    assert min(found.prefill, found.decode) >= 1
    assert degraded_plan(planned, planned.instances, RoleSplit(0, planned.instances)) == planned
