"""Invariants of the simulator over random workloads, clusters, policies and failures."""

from hypothesis import given, settings

from support.toy import clusters, pipelines, run, workloads
from twofold.cluster.timing import PS
from twofold.request import FinishReason
from twofold.timeline import Moment

ORDERED = [
    Moment.ARRIVED,
    Moment.ROUTED,
    Moment.PREFILL_STARTED,
    Moment.FIRST_TOKEN,
    Moment.DECODE_STARTED,
    Moment.LAST_TOKEN,
]


@settings(max_examples=1500)
@given(clusters() | pipelines(), workloads())
def test_every_request_ends_once_and_all_resources_are_freed(cluster, requests):
    """Once every request has completed, failed or been rejected, all blocks are free and no instance has any load."""
    world = run(cluster, requests)
    counts, lives = world.statistics, world.cluster.requests
    assert counts.arrived == len(requests)
    assert counts.arrived == counts.completed + counts.rejected + counts.failed + len(lives)
    ended = [timeline.request.id for timeline in world.ends.timelines]
    assert len(ended) == len(set(ended)) == len(requests) - len(lives)
    if cluster[0].rules == "twofold" and "splitwise-sim" not in cluster[1].values():
        assert not lives, "only SplitwiseSim's ways with memory can wait for ever"
    if lives:
        return
    for instance in world.cluster.instances.values():
        assert instance.scheduler.status().idle or instance.load is None
    for load in world.cluster.scheduler.pools:
        left = (load.pending_prefill_tokens, load.reserved_tokens, load.prefills, load.decodes, load.requests)
        assert left == (0, 0, 0, 0, 0)


@settings(max_examples=700)
@given(clusters() | pipelines(), workloads())
def test_time_never_runs_backwards_in_a_request(cluster, requests):
    """The recorded moments of a request are in order, and a completed request has all of its moments."""
    for timeline in run(cluster, requests).ends.timelines:
        moments = timeline.moments
        times = [moments[moment] for moment in ORDERED if moment in moments]
        assert times == sorted(times)
        if timeline.finish_reason is not FinishReason.LENGTH:
            continue
        assert timeline.output_tokens == timeline.request.output_tokens
        assert (Moment.DECODE_STARTED in moments) == (timeline.output_tokens > 1)
        if timeline.prefill_instance != timeline.decode_instance and timeline.output_tokens > 1:
            assert moments[Moment.HANDOFF_STARTED] <= moments[Moment.HANDOFF_ENDED]
            assert moments[Moment.FIRST_TOKEN] <= moments[Moment.HANDOFF_ENDED] <= moments[Moment.DECODE_STARTED]


@settings(max_examples=500)
@given(clusters() | pipelines(), workloads())
def test_distributions_match_the_timelines(cluster, requests):
    world = run(cluster, requests)
    done = [t for t in world.ends.timelines if t.finish_reason is FinishReason.LENGTH]
    counts = world.statistics
    for histogram, name in ((counts.ttft, "ttft_s"), (counts.e2e, "e2e_s"), (counts.queue, "queue_prefill_s")):
        assert sum(histogram.counts.values()) == len(done)
        assert abs(histogram.total - sum(getattr(t, name) for t in done) * PS) <= len(requests)
    if cluster[0].rules == "twofold":
        several = [t.tpot_s for t in done if t.tpot_s is not None]
        assert abs(counts.tpot.total - sum(several) * PS) <= len(requests)
    if not counts.failed and not world.cluster.requests:
        assert sum(counts.itl.counts.values()) == sum(t.output_tokens - 1 for t in done)
        decoding = sum(t.span(Moment.FIRST_TOKEN, Moment.LAST_TOKEN) for t in done)
        assert abs(counts.itl.total - decoding * PS) <= len(requests)


@settings(max_examples=200)
@given(clusters() | pipelines(), workloads())
def test_equal_inputs_give_equal_results(cluster, requests):
    assert run(cluster, requests).facts() == run(cluster, requests).facts()
