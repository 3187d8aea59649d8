"""Invariants of instance scheduling over random workloads, clusters, iteration times and aborts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.virtual_cluster import VirtualCluster
from twofold.instance import Role
from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.paged import PagedBlockAllocator
from twofold.request import Request
from twofold.scheduling.instance.sequence import FULL_RESERVATION, KvReservation
from twofold.scheduling.routers import ROUTERS
from twofold.scheduling.routers.splitwise import SplitwiseRouter, SplitwiseSimRouter


class ShortQueues(SplitwiseRouter):
    MAX_PENDING_TOKENS = 60


class ShortIdleQueues(SplitwiseSimRouter):
    MAX_PENDING_TOKENS = 60


def pools(batcher, prefill=2, decode=2):
    named = (("p", Role.PREFILL, prefill, batcher or "prefill"), ("d", Role.DECODE, decode, batcher or "decode"))
    return [(f"{name}{i}", role, made) for name, role, count, made in named for i in range(count)]


FIXED = {
    "split": pools(None),
    "1P+2D": pools(None, prefill=1),
    "mixed": [("m0", Role.MIXED, "mixed"), ("m1", Role.MIXED, "mixed")],
    "chunked": [("m0", Role.MIXED, "chunked-prefill")],
    "chunked split": pools("chunked-prefill"),
    "preempting": [("m0", Role.MIXED, "splitwise")],
}
# Under SplitwiseSim's rules a prompt without blocks delays decodes that have theirs, so blocks suffice here too.
ROOMY = {"sim": [("m0", Role.MIXED, "splitwise-sim")], "sim split": pools("splitwise-sim", prefill=1)}
MOVING = {
    "splitwise": pools("splitwise"),
    "splitwise 1P+1D": pools("splitwise", prefill=1, decode=1),
    "splitwise-sim": pools("splitwise-sim", decode=1),
    "chunked 1P+1D": pools("chunked-prefill", prefill=1, decode=1),
}
CLUSTERS = FIXED | ROOMY | MOVING
MOVERS = {"splitwise": ShortQueues, "returns when idle": ShortIdleQueues}
# Blocks of an instance and the KV reservation. With fixed roles the largest request just fits. With hand-offs in both
# directions, or output reserved late, requests could deadlock, so blocks suffice for all.
TIGHT, AMPLE, LATE = (
    (26, FULL_RESERVATION),
    (1300, FULL_RESERVATION),
    (1300, KvReservation(output_at_decode_start=True, extra=1)),
)
# Capacity that routers assume: sometimes an instance is too full for a request.
CAPACITY_TOKENS = 160

# Cluster, router and blocks. Routers that move instances between pools need batchers for both phases.
FIXED_ROUTERS = st.sampled_from(["jsq", "round-robin"])
worlds = st.one_of(
    st.tuples(st.sampled_from(sorted(FIXED)), FIXED_ROUTERS, st.sampled_from([TIGHT, TIGHT, LATE])),
    st.tuples(st.sampled_from(sorted(ROOMY)), FIXED_ROUTERS, st.sampled_from([AMPLE, LATE])),
    st.tuples(st.sampled_from(sorted(MOVING)), st.sampled_from(sorted(MOVERS)), st.sampled_from([AMPLE, LATE])),
)

sizes = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 12), st.integers(0, 3000), st.none() | st.integers(0, 5000)),
    min_size=1,
    max_size=25,
)
# Few tokens per iteration, or many, so that prompts pause decodes.
budgets = st.sampled_from([6, 64])
milliseconds = st.integers(1, 300)


def build(sizes):
    requests = [
        Request(id=str(i), arrival_s=float(arrival), prompt_tokens=prompt, output_tokens=output)
        for i, (prompt, output, arrival, _) in enumerate(sizes)
    ]
    requests.sort(key=lambda request: request.arrival_s)
    return requests, {str(i): float(abort) for i, (_, _, _, abort) in enumerate(sizes) if abort is not None}


def run(world, sizes, per_token, transfer, *, budget=64, capacity=CAPACITY_TOKENS, **how):
    cluster, router, (num_blocks, rule) = world
    requests, aborts = build(sizes)
    made = VirtualCluster(
        CLUSTERS[cluster],
        num_blocks=num_blocks,
        router=(ROUTERS | MOVERS)[router](),
        batch_s=lambda prefill, decodes: per_token * (1 + prefill + decodes),
        transfer_s=lambda request: transfer * request.prompt_tokens,
        budget=budget,
        memory=rule,
        capacity_tokens=capacity,
        **how,
    )
    made.run(requests, aborts)
    return requests, aborts, made


def story(world):
    return world.ended, world.first_token_s, world.end_s, world.moves, world.now


def preemptions(world):
    return {name: instance.preemptions for name, instance in world.instances.items()}


@settings(max_examples=600)
@given(worlds, sizes, milliseconds, milliseconds, budgets, st.sampled_from([PagedBlockAllocator, BlockAllocator]))
def test_requests_end_once_with_their_tokens_in_order_and_blocks_freed(
    world, sizes, per_token, transfer, budget, accounts
):
    requests, aborts, done = run(world, sizes, per_token, transfer, budget=budget, accounts=accounts)
    done.check_ended(requests, aborts)
    for load in done.cluster.pools:
        counted = (load.pending_prefill_tokens, load.reserved_tokens, load.prefills, load.decodes)
        assert (*counted, load.requests) == (0, 0, 0, 0, 0)


@settings(max_examples=150)
@given(worlds, sizes, milliseconds, milliseconds, budgets)
def test_equal_inputs_give_equal_results(world, sizes, per_token, transfer, budget):
    how = {"budget": budget}
    first = run(world, sizes, per_token, transfer, **how)[2]
    second = run(world, sizes, per_token, transfer, **how)[2]
    counted = run(world, sizes, per_token, transfer, accounts=BlockAllocator, **how)[2]
    assert first.tokens == second.tokens == counted.tokens
    assert story(first) == story(second) == story(counted)


@settings(max_examples=300)
@given(worlds, sizes, milliseconds, milliseconds, budgets)
def test_runs_end_requests_when_single_iterations_do(world, sizes, per_token, transfer, budget):
    """Running a batch for several iterations at once gives the same results as scheduling each iteration."""
    how = {"budget": budget}
    single = run(world, sizes, per_token, transfer, **how)[2]
    together = run(world, sizes, per_token, transfer, runs=True, accounts=BlockAllocator, **how)[2]
    assert story(single)[:-1] == story(together)[:-1]  # the last event may be the obsolete end of a shortened run
    assert preemptions(single) == preemptions(together)


def test_random_clusters_preempt_and_change_pools():
    """The random clusters of these tests do preempt sequences and change roles."""
    sizes = [(40, 12, 1000 * i, None) for i in range(20)]
    alone = run(("preempting", "jsq", TIGHT), sizes, 20, 1, budget=6)[2]
    assert sum(preemptions(alone).values()) > 10
    for cluster in MOVING:
        for router in MOVERS:
            busy = [(60, 6, 40 * i, None) for i in range(20)]
            moved = run((cluster, router, AMPLE), busy, 20, 1)[2]
            assert Role.MIXED in {role for _, role in moved.moves}
            assert all(load.role is load.home for load in moved.cluster.pools)


def test_mutual_handoffs_do_not_deadlock():
    sizes = [(1, 1, 0, None), (34, 12, 0, None), (58, 12, 0, None)]
    requests, _, done = run(("splitwise 1P+1D", "splitwise", TIGHT), sizes, 1, 1, capacity=104)
    assert len(done.ended) == len(requests)
