"""What must always hold, over random workloads, clusters, durations and aborts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.virtual_cluster import VirtualCluster
from twofold.instance import Role
from twofold.request import FinishReason, Request

SPLIT = [(f"p{i}", Role.PREFILL, "prefill") for i in range(2)] + [
    (f"d{i}", Role.DECODE, "decode") for i in range(2)
]
CLUSTERS = {
    "split": SPLIT,
    "1P+2D": SPLIT[1:],
    "mixed": [("m0", Role.MIXED, "mixed"), ("m1", Role.MIXED, "mixed")],
    "chunked": [("m0", Role.MIXED, "chunked-prefill")],
}

sizes = st.tuples(st.integers(1, 90), st.integers(1, 12), st.floats(0, 5), st.none() | st.floats(0, 8))
seconds = st.floats(0.001, 1.0)


def build(sizes):
    requests = [
        Request(id=str(i), arrival_s=arrival, prompt_tokens=prompt, output_tokens=output)
        for i, (prompt, output, arrival, _) in enumerate(sizes)
    ]
    return requests, {str(i): abort for i, (_, _, _, abort) in enumerate(sizes) if abort is not None}


def run(cluster, sizes, router, per_token, transfer):
    requests, aborts = build(sizes)
    world = VirtualCluster(
        CLUSTERS[cluster],
        num_blocks=26,  # one request of the largest size just fits, so that memory is short
        router=router,
        batch_s=lambda batch: per_token * (1 + batch.prefill_tokens + batch.decode_sequences),
        transfer_s=lambda request: transfer * request.prompt_tokens,
    )
    world.run(sorted(requests, key=lambda request: request.arrival_s), aborts)
    return requests, aborts, world


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(CLUSTERS)),
    st.lists(sizes, min_size=1, max_size=25),
    st.sampled_from(["jsq", "round-robin"]),
    seconds,
    seconds,
)
def test_every_request_ends_once_with_its_tokens_in_order_and_no_block_is_left(
    cluster, sizes, router, per_token, transfer
):
    """No block leaked, no token lost, repeated or reordered, a request ends exactly once."""
    requests, aborts, world = run(cluster, sizes, router, per_token, transfer)
    for request in requests:
        made = world.tokens[request.id]
        assert made == list(range(len(made)))
        if request.id in aborts and world.ended[request.id] is FinishReason.ABORT:
            assert len(made) < request.output_tokens
        else:
            assert world.ended[request.id] is FinishReason.LENGTH
            assert len(made) == request.output_tokens
    assert len(world.ended) == len(requests)
    assert all(instance.status().idle for instance in world.instances.values())
    assert all(load.requests == 0 for load in world.cluster.loads.values())


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(CLUSTERS)), st.lists(sizes, min_size=1, max_size=25), seconds, seconds)
def test_the_same_input_gives_the_same_result(cluster, sizes, per_token, transfer):
    """Nothing depends on hash order, identity or a clock."""
    first = run(cluster, sizes, "jsq", per_token, transfer)[2]
    second = run(cluster, sizes, "jsq", per_token, transfer)[2]
    assert (first.tokens, first.ended, first.now) == (second.tokens, second.ended, second.now)
