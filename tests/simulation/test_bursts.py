"""With pull hand-offs, KV stays in prefill memory until the decode instance has room (DistServe, section 4.3)."""

import msgspec

from support.toy import CATALOG
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.instance import Role
from twofold.request import Request
from twofold.simulation.simulate import build_cluster
from twofold.simulation.statistics import RunStatistics

PROMPT, OUTPUT, BURST = 400, 100, 80
PULL = ClusterSpec(
    pools=(
        PoolSpec(machines=1, machine="dgx-h100", role=Role.PREFILL),
        PoolSpec(machines=1, machine="dgx-h100", role=Role.DECODE),
    ),
    model="llama2-70b",
    router="jsq",
    handoff="pull",
    kv_capacity_tokens=10_000,
)


def watched(spec, output=OUTPUT):
    """Simulate a burst of requests; return the instance states before each event, and the statistics."""
    statistics = RunStatistics(None, None, over_all_tokens=False)
    cluster = build_cluster(spec, CATALOG, instance_profiles(spec, CATALOG), statistics, [], 1 << 60)
    seen = []

    def look(_):
        seen.append(tuple(instance.scheduler.status() for instance in cluster.instances.values()))
        return -1  # every event

    cluster.kernel.before_step = look
    requests = [
        Request(id=str(i), arrival_s=0.001 * i, prompt_tokens=PROMPT, output_tokens=output) for i in range(BURST)
    ]
    cluster.feed(requests)
    cluster.kernel.run(until_events=1 << 60)
    look(0)
    return seen, statistics


def test_prefill_buffer_fills_and_drains_without_loss():
    """Prefill memory fills with KV that waits for decode memory, but no request is lost."""
    seen, statistics = watched(PULL)
    assert statistics.completed == BURST
    held = [prefill.handing_off for prefill, _ in seen]
    assert max(held) == 10_000 // PROMPT, "as many as its memory holds"
    assert any(prefill.waiting and prefill.blocks_free < PROMPT // 16 for prefill, _ in seen)
    assert all(0 <= status.blocks_free <= status.blocks_total for pair in seen for status in pair)
    assert max(d.blocks_total - d.blocks_free for _, d in seen) > 0.9 * seen[0][1].blocks_total
    assert all(status.idle for status in seen[-1])


def test_decode_blocks_are_reserved_when_a_prompt_starts():
    """With pull hand-offs, decode memory is requested when prefill starts; with layer-wise hand-offs, when
    a request arrives.
    """
    for handoff, waits in (("pull", True), ("layer-wise", False)):
        seen, _ = watched(msgspec.structs.replace(PULL, handoff=handoff))
        ahead = [
            decode.arriving + decode.lease_queue > prefill.handing_off for prefill, decode in seen if prefill.waiting
        ]
        assert any(ahead) != waits


def test_burst_completes_with_swap_preemption():
    growing = msgspec.structs.replace(PULL, swap_space_bytes=10**11)
    seen, statistics = watched(growing, output=400)
    assert statistics.completed == BURST
    assert max(decode.swapped for _, decode in seen) > 0
    assert all(status.idle and not status.swapped for status in seen[-1])
    at_once = watched(PULL, output=400)[0]
    assert max(decode.running for _, decode in seen) > max(decode.running for _, decode in at_once)
