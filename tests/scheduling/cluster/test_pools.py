"""Sets of instances by role, and the least loaded instance of each set."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.instance import InstanceLoad, Role
from twofold.scheduling.cluster.pools import Pools, pending_tokens, requests, reserved_tokens

MEASURES = (pending_tokens, reserved_tokens, requests)
steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "move", "change", "change", "change", "ask"]),
        st.integers(0, 200),
        st.sampled_from(list(Role)),
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)),
    ),
    max_size=150,
)


class Everybody:
    """Reference implementation of pools, with plain lists."""

    def __init__(self):
        self.pools = {role: [] for role in Role}

    @property
    def all(self):
        return [load for pool in self.pools.values() for load in pool]

    def move(self, load, role):
        for pool in self.pools.values():
            if load in pool:
                pool.remove(load)
        if role is not None:
            self.pools[role].append(load)


def check(pools, everybody, measures):
    for role in Role:
        members = everybody.pools[role]
        assert list(pools[role]) == members
        assert len(pools[role]) == len(members)
        assert all(load.role is role and load in pools[role] for load in members)
        for measure in measures:
            assert pools[role].least(measure) is min(members, key=measure.of, default=None)
        for number in range(3):
            assert pools[role].nth(number) is (members[number % len(members)] if members else None)
    assert {load.id for load in pools} == {load.id for load in everybody.all}


@settings(max_examples=800)
@given(steps, st.booleans())
def test_least_agrees_with_a_linear_search(steps, often):
    pools, everybody = Pools(), Everybody()
    for number, (action, which, role, numbers) in enumerate(steps):
        loads = everybody.all
        if action == "add":
            load = InstanceLoad(str(number), role)
            pools.add(load)
            everybody.move(load, role)
        elif loads:
            load = loads[which % len(loads)]
            if action == "remove":
                pools.remove(load.id)
                everybody.move(load, None)
            elif action == "move":
                pools.move(load, role)
                everybody.move(load, role)
            elif action == "change":
                load.pending_prefill_tokens, load.reserved_tokens, load.decodes, load.requests = numbers
                pools.changed(load)
        if often or action == "ask":
            check(pools, everybody, MEASURES if often else MEASURES[which % 3 :])
    check(pools, everybody, MEASURES)


def test_a_returning_instance_has_no_old_load():
    pools = Pools()
    first, other = (InstanceLoad(name, Role.PREFILL) for name in ("a", "b"))
    first.requests = other.requests = 1
    pools.add(first)
    pools.add(other)
    assert pools.prefill.least(requests) is first
    pools.remove("a")
    again = InstanceLoad("a", Role.PREFILL)
    pools.add(again)
    assert pools.get("a") is again
    assert pools.prefill.least(requests) is again
    again.requests = 1
    pools.changed(again)
    assert pools.prefill.least(requests) is other, "it joined later"


def test_pending_tokens_count_prompts_and_decodes():
    load = InstanceLoad("a", Role.MIXED)
    load.pending_prefill_tokens, load.decodes = 100, 3
    assert pending_tokens.of(load) == 103


def test_unknown_instances_are_not_in_the_pools():
    pools = Pools()
    assert pools.get("a") is None
    assert pools.prefill.least(requests) is None
    with pytest.raises(KeyError):
        pools.remove("a")
