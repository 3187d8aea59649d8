"""Invariants of prefix reuse over random workloads and aborts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.virtual_cluster import VirtualCluster
from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import EVICTIONS, create_eviction
from twofold.kvcache.paged import PrefixBlockAllocator
from twofold.request import Request
from twofold.scheduling.routers import ROUTERS
from twofold.scheduling.routers.splitwise import SplitwiseRouter

BLOCK = 4
SPLIT = [("p0", Role.PREFILL, "prefill"), ("d0", Role.DECODE, "decode")]
FIXED = {
    "split": SPLIT,
    "2P+2D": [*SPLIT, ("p1", Role.PREFILL, "prefill-balanced"), ("d1", Role.DECODE, "decode")],
    "mixed": [("m0", Role.MIXED, "mixed")],
    "chunked": [("m0", Role.MIXED, "chunked-prefill"), ("m1", Role.MIXED, "chunked-prefill")],
    "in chunks": [("p0", Role.PREFILL, "prefill-chunks"), ("d0", Role.DECODE, "decode")],
    "preempting": [("m0", Role.MIXED, "splitwise")],
}
MOVING = {"splitwise": [("p0", Role.PREFILL, "splitwise"), ("d0", Role.DECODE, "splitwise")]}
CLUSTERS = FIXED | MOVING
TIGHT, AMPLE = 26, 1300  # blocks: the largest request just fits, or all of them do

worlds = st.fixed_dictionaries(
    {
        "cluster": st.sampled_from(sorted(CLUSTERS)),
        "mode": st.sampled_from([HandoffMode.LAYER_WISE, HandoffMode.PULL]),
        "eviction": st.sampled_from(sorted(EVICTIONS)),
        "swap_blocks": st.sampled_from([0, TIGHT, 1000]),
        "max_num_seqs": st.sampled_from([2, 8]),
        "budget": st.sampled_from([6, 64]),
        "per_token": st.integers(1, 300),
        "transfer": st.integers(1, 300),
    }
)
# Prompt, output, arrival and abort, and how many blocks of which beginning a prompt has.
sizes = st.lists(
    st.tuples(
        st.integers(1, 60) | st.sampled_from([8, 16, 32]),
        st.integers(1, 40),
        st.integers(0, 6000),
        st.none() | st.integers(0, 9000),
        st.integers(0, 12),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=20,
)


def keys_of(number, tokens, shared_blocks, family):
    """Return the keys of the full blocks of `tokens` tokens with a shared prefix."""
    return tuple(
        1000 * family + place if place < shared_blocks else 1_000_000 + 1000 * number + place
        for place in range(tokens // BLOCK)
    )


def run(world, sizes):
    drawn = dict(world)
    cluster, eviction = drawn.pop("cluster"), drawn.pop("eviction")
    per_token, transfer = drawn.pop("per_token"), drawn.pop("transfer")
    moves = cluster in MOVING
    if moves:
        drawn["swap_blocks"] = 0
    requests = [
        Request(
            id=str(number),
            arrival_s=float(arrival),
            prompt_tokens=prompt,
            output_tokens=output,
            prefix_blocks=keys_of(number, prompt, shared, family),
            retain_s=2000.0 * (number % 3 == 0),
        )
        for number, (prompt, output, arrival, _, shared, family) in enumerate(sizes)
    ]
    requests.sort(key=lambda request: request.arrival_s)

    def output_keys(request_id):
        # The answer to a prompt of shared blocks continues them: prompts with more of these blocks are the next turn.
        prompt, output, _, _, shared, family = sizes[int(request_id)]
        shared = 1000 if prompt // BLOCK <= shared else shared
        return keys_of(int(request_id), prompt + output - 1, shared, family)[prompt // BLOCK :]

    aborts = {str(number): float(size[3]) for number, size in enumerate(sizes) if size[3] is not None}
    made = VirtualCluster(
        CLUSTERS[cluster],
        num_blocks=AMPLE if moves else TIGHT,
        router=SplitwiseRouter() if moves else ROUTERS["jsq"](),
        batch_s=lambda prefill, decodes: per_token * (1 + prefill + decodes),
        transfer_s=lambda request: transfer * request.prompt_tokens,
        accounts=lambda blocks, size: PrefixBlockAllocator(size, PrefixCache(blocks, create_eviction(eviction))),
        output_keys=output_keys,
        **drawn,
    )
    made.run(requests, aborts)
    return requests, aborts, made


@settings(max_examples=600)
@given(worlds, sizes)
def test_requests_end_once_with_their_tokens_in_order_and_read_matching_kv(world, sizes):
    requests, aborts, done = run(world, sizes)
    done.check_ended(requests, aborts)


@settings(max_examples=100)
@given(worlds, sizes)
def test_equal_inputs_allocate_equal_blocks(world, sizes):
    _, _, one = run(world, sizes)
    _, _, other = run(world, sizes)
    assert (one.end_s, one.first_token_s) == (other.end_s, other.first_token_s)
    for name, instance in one.instances.items():
        assert instance.shared._cached == other.instances[name].shared._cached


def test_random_clusters_reuse_copy_and_evict():
    """The clusters of the random tests in this file reuse, copy and evict cached KV blocks."""
    world = {"eviction": "lru", "swap_blocks": 0, "max_num_seqs": 8, "budget": 64, "per_token": 1, "transfer": 10}
    world |= {"mode": HandoffMode.LAYER_WISE}
    sizes = [(32, 30, 30 * number, None, 4 + 4 * (number % 2), number % 2) for number in range(40)]
    copies = 0
    for cluster in CLUSTERS:
        _, _, done = run(world | {"cluster": cluster}, sizes)
        assert sum(instance.shared.cache.hits for instance in done.instances.values()) > 40
        copies += sum(contents.shared_copies for contents in done.contents.values())
        if cluster in FIXED:
            assert sum(instance.status().blocks_evicted for instance in done.instances.values()) > 0
    assert copies > 20
