"""Load totals of cells (groups of instances), and the least loaded instances of cells."""

from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.instance import InstanceLoad, Role
from twofold.scheduling.cluster.pools import pending_tokens, reserved_tokens
from twofold.scheduling.routers.cells import CellPools

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "remove", "pause", "resume", "move", "change", "change"]),
        st.integers(0, 200),
        st.sampled_from(list(Role)),
        st.sampled_from(["a", "b", "c"]),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=80,
)


def check(pools, everybody):
    active = [load for load in everybody if load.place]
    for role in Role:
        members = [load for load in active if load.role is role]
        pool = pools[role]
        assert len(pool) == len(members)
        assert {load.id for load in pool} == {load.id for load in members}
        for measure in (pending_tokens, reserved_tokens):
            least = pool.least(measure)
            assert (least is None) == (not members)
            assert least is None or measure.of(least) == min(map(measure.of, members))
        if members:
            assert {pool.nth(number).id for number in range(len(members))} == {load.id for load in members}
        else:
            assert pool.nth(3) is None
    for name, cell in pools.cells.items():
        inside = [load for load in active if load.cell == name]
        assert cell.load.pending_prefill_tokens == sum(load.pending_prefill_tokens for load in inside)
        assert cell.load.reserved_tokens == sum(load.reserved_tokens for load in inside)
        assert cell.load.prefilling == sum(load.role.prefills for load in inside)
        assert cell.load.decoding == sum(load.role.decodes for load in inside)
        whole = cell.load.prefilling > 0 and cell.load.decoding > 0
        assert (cell.load in pools.whole.mixed) == whole


@settings(max_examples=300)
@given(steps)
def test_cell_load_sums_its_instances(steps):
    pools, everybody = CellPools(), []
    for number, (action, which, role, cell, amounts) in enumerate(steps):
        if action == "add" or not everybody:
            everybody.append(InstanceLoad(f"i{number}", role, cell=cell))
            everybody[-1].reserved_tokens = amounts[1]
            pools.add(everybody[-1])
        else:
            load = everybody[which % len(everybody)]
            if action == "remove":
                everybody.remove(load)
                pools.remove(load.id)
            elif action == "change" and load.place:
                load.pending_prefill_tokens, load.reserved_tokens = amounts
                pools.changed(load)
            elif action == "move":
                pools.move(load, role)
            elif action in {"pause", "resume"}:
                (pools.pause if action == "pause" else pools.resume)(load)
        check(pools, everybody)
    assert {load.id for load in pools} == {load.id for load in everybody}


def test_cell_pools_rank_their_members():
    pools = CellPools()
    for name, cell, pending in (("p0", "a", 9), ("p1", "a", 5), ("p2", "b", 1)):
        load = InstanceLoad(name, Role.PREFILL, cell=cell)
        load.pending_prefill_tokens = pending
        pools.add(load)
    least = pools.cells["a"].pools.prefill.least(pending_tokens)
    assert least is not None
    assert least.id == "p1"
    assert pools.prefill.least(pending_tokens).id == "p2"
