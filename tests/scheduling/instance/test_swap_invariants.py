"""Invariants of swap preemption under random workloads and aborts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.virtual_cluster import VirtualCluster
from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.paged import PagedBlockAllocator
from twofold.request import Request
from twofold.scheduling.routers import ROUTERS

SPLIT = [("p0", Role.PREFILL, "prefill"), ("d0", Role.DECODE, "decode")]
CLUSTERS = {
    "split": SPLIT,
    "2P+2D": [*SPLIT, ("p1", Role.PREFILL, "prefill"), ("d1", Role.DECODE, "decode")],
    "mixed": [("m0", Role.MIXED, "mixed")],
    "chunked": [("m0", Role.MIXED, "chunked-prefill"), ("m1", Role.MIXED, "chunked-prefill")],
}
NUM_BLOCKS = 26  # of 4 tokens: the largest request just fits

worlds = st.fixed_dictionaries(
    {
        "cluster": st.sampled_from(sorted(CLUSTERS)),
        "router": st.sampled_from(["jsq", "round-robin"]),
        "mode": st.sampled_from([HandoffMode.LAYER_WISE, HandoffMode.PULL]),
        "step_tokens": st.sampled_from([1, 3, 8, 64]),
        "swap_blocks": st.sampled_from([NUM_BLOCKS, 60, 1000]),
        "max_num_seqs": st.sampled_from([2, 8]),
        "budget": st.sampled_from([6, 64]),
        "per_token": st.integers(1, 300),
        "transfer": st.integers(1, 300),
    }
)
sizes = st.lists(
    st.tuples(st.integers(1, 45), st.integers(1, 60), st.integers(0, 3000), st.none() | st.integers(0, 9000)),
    min_size=1,
    max_size=20,
)


def run(world, sizes, **how):
    drawn = dict(world)
    per_token, transfer = drawn.pop("per_token"), drawn.pop("transfer")
    requests = [
        Request(id=str(i), arrival_s=float(arrival), prompt_tokens=prompt, output_tokens=output)
        for i, (prompt, output, arrival, _) in enumerate(sizes)
    ]
    requests.sort(key=lambda request: request.arrival_s)
    aborts = {str(i): float(abort) for i, (_, _, _, abort) in enumerate(sizes) if abort is not None}
    made = VirtualCluster(
        CLUSTERS[drawn.pop("cluster")],
        num_blocks=NUM_BLOCKS,
        router=ROUTERS[drawn.pop("router")](),
        batch_s=lambda prefill, decodes: per_token * (1 + prefill + decodes),
        transfer_s=lambda request: transfer * request.prompt_tokens,
        **drawn,
        **how,
    )
    made.run(requests, aborts)
    return requests, aborts, made


def story(world):
    return world.ended, world.first_token_s, world.end_s


def swaps(world):
    return {
        name: (instance.preemptions, instance.status().swaps, instance.status().swap_blocks_moved)
        for name, instance in world.instances.items()
    }


@settings(max_examples=600)
@given(worlds, sizes)
def test_requests_end_once_with_their_tokens_in_order_and_read_their_own_kv(world, sizes):
    requests, aborts, done = run(world, sizes)
    done.check_ended(requests, aborts)
    for instance in done.instances.values():
        status = instance.status()
        assert (status.swapped, status.swap_blocks_free) == (0, status.swap_blocks_total)
        assert instance.swap is None or instance.swap._promised == 0


@settings(max_examples=200)
@given(worlds, sizes)
def test_runs_end_when_blocks_run_out(world, sizes):
    """Simulating many iterations of a batch in one step gives the same end times and swaps as simulating
    the iterations one by one.
    """
    _, _, single = run(world, sizes)
    _, _, together = run(world, sizes, runs=True, accounts=BlockAllocator)
    assert story(single) == story(together)
    assert swaps(single) == swaps(together)


def test_random_clusters_do_swap():
    """The random clusters of these tests do swap sequences."""
    world = {"cluster": "split", "router": "jsq", "mode": HandoffMode.PULL, "step_tokens": 3, "swap_blocks": 1000}
    world |= {"max_num_seqs": 8, "budget": 64, "per_token": 1, "transfer": 1}
    sizes = [(8, 60, 10 * i, None) for i in range(20)]
    _, _, done = run(world, sizes, accounts=PagedBlockAllocator)
    preemptions, swapped, _ = swaps(done)["d0"]
    assert preemptions >= swapped > 10
