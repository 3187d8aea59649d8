"""Tests of the steps by which a cluster reaches requested numbers of prefill and decode instances:
role changes, starts and retirements.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.routed import cluster, request
from twofold.instance import Role
from twofold.scheduling.replan.replanner import ReplanAction, ReplanStep, RoleSplit, steps_to


def split_of(prefill, decode, router="jsq-planned"):
    return cluster([Role.PREFILL] * prefill + [Role.DECODE] * decode, router)


def take(made, steps, retired):
    for step in steps:
        if step.action is ReplanAction.RETIRE:
            made.pause(step.instance)
            continue
        if step.action is ReplanAction.START:
            assert step.instance in retired
            made.resume(step.instance)
        made.set_role(step.instance, step.role)


def test_role_changes_come_before_starts():
    made = split_of(3, 2)
    steps = steps_to(RoleSplit(1, 5), made.pools, ["spare-0", "spare-1"])
    assert [step.action for step in steps] == [ReplanAction.ROLE, ReplanAction.ROLE, ReplanAction.START]
    assert steps[2] == ReplanStep(ReplanAction.START, "spare-0", Role.DECODE)
    steps = steps_to(RoleSplit(1, 3), made.pools, [])
    assert [step.action for step in steps] == [ReplanAction.ROLE, ReplanAction.RETIRE]


def test_least_loaded_instances_move_first():
    made = split_of(3, 1)
    made.place(request("a"), 0.0)  # to prefill-0
    assert [step.instance for step in steps_to(RoleSplit(2, 2), made.pools, [])] == ["prefill-1"]
    assert [step.instance for step in steps_to(RoleSplit(1, 3), made.pools, [])] == ["prefill-1", "prefill-2"]


def test_running_split_needs_no_steps():
    made = split_of(2, 2)
    assert steps_to(RoleSplit(2, 2), made.pools, []) == ()
    assert steps_to(RoleSplit(3, 2), made.pools, []) == ()


def test_a_split_reads_well():
    assert str(RoleSplit(3, 1)) == "3P+1D"


@pytest.mark.parametrize("router", ["jsq-planned", "splitwise"])
@given(
    running=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    wanted=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    spare=st.integers(0, 4),
)
def test_steps_reach_the_split(router, running, wanted, spare):
    made = split_of(*running, router=router)
    retired = [f"spare-{number}" for number in range(spare)]
    for name in retired:
        made.add_instance(name, Role.DECODE)
        made.pause(name)
    target = RoleSplit(*wanted)
    steps = steps_to(target, made.pools, retired)
    assert len({step.instance for step in steps}) == len(steps)
    take(made, steps, retired)
    reached = RoleSplit.of(made.pools)
    if sum(wanted) <= sum(running) + spare:
        assert reached == target
    assert reached.instances <= sum(running) + spare
