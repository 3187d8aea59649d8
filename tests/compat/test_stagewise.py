"""Simulations by the rules of DistServe's simulator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import ToyModel, ToyRun, workloads
from twofold.cluster.spec import ClusterSpec, InstanceFailure, PoolSpec
from twofold.cluster.timing import PS
from twofold.instance import Role
from twofold.performance.instance import Pipeline
from twofold.request import FinishReason, Request
from twofold.timeline import Moment


def play(shape, sizes, *, budget=100, later=None, failures=()):
    """Simulate requests on instances of the given roles and numbers of pipeline stages."""
    stages = {count for _, count in shape}
    assert len(stages) == 1
    model = Pipeline("toy", ToyModel.error, ToyModel(), later or ToyModel(), stages.pop())
    spec = ClusterSpec(
        pools=tuple(
            PoolSpec(machines=count, machine="dgx-h100", role=role, pipeline_parallel=count) for role, count in shape
        ),
        model="llama2-70b",
        router="jsq",
        handoff="serialized",
        max_num_batched_tokens=budget,
        rules="distserve-published",
        failures=failures,
    )
    requests = sizes
    if not isinstance(sizes[0], Request):
        requests = [
            Request(id=str(number), arrival_s=at / 1e3, prompt_tokens=prompt, output_tokens=output)
            for number, (at, prompt, output) in enumerate(sizes)
        ]
    return ToyRun(spec, requests, model=model, capacity=1 << 40)


def split(stages=1):
    return [(Role.PREFILL, stages), (Role.DECODE, stages)]


def times(world, moment):
    ends = sorted(world.ends.timelines, key=lambda t: int(t.request.id))
    return [round(t.moments[moment] * 1e3, 6) for t in ends]


def test_every_output_token_is_decoded():
    """As in DistServe's simulator, a request of three output tokens runs three decode iterations."""
    world = play(split(), [(0, 10, 3)])
    assert times(world, Moment.FIRST_TOKEN) == [14.0]
    assert times(world, Moment.HANDOFF_ENDED) == [14.0]
    assert times(world, Moment.DECODE_STARTED) == [14.0]
    # A prefill of 14 ms and three decode iterations of 5 ms.
    assert times(world, Moment.LAST_TOKEN) == [29.0]
    assert world.statistics.tpot.total == 5 * PS // 1000


def test_one_token_request_is_decoded_and_has_a_tpot():
    world = play(split(), [(0, 10, 1)])
    assert times(world, Moment.LAST_TOKEN) == [19.0]
    assert world.statistics.tpot.total == 5 * PS // 1000


def test_simultaneous_arrivals_are_batched_together():
    # The third prompt arrives 1 µs later.
    world = play(split(), [(0, 10, 1), (0, 10, 1), (0.001, 10, 1)])
    assert times(world, Moment.FIRST_TOKEN) == [24.0, 24.0, 38.0]


def test_prompt_batches_are_limited_by_memory():
    """A prompt that does not fit in the current batch starts the next batch, and later prompts do not overtake it."""
    world = play(split(), [(0, 60, 1), (0, 60, 1), (0, 10, 1)], budget=100)
    assert times(world, Moment.FIRST_TOKEN) == [64.0, 64.0 + 74.0, 64.0 + 74.0]


def test_mixed_stage_runs_prompts_first():
    world = play([(Role.MIXED, 1)], [(0, 10, 2), (16, 20, 1)])
    assert times(world, Moment.FIRST_TOKEN) == [14.0, 19.0 + 24.0]
    assert times(world, Moment.LAST_TOKEN) == [43.0 + 6.0, 43.0 + 6.0]


def test_pipeline_depth_is_unlimited():
    """The first pipeline stage starts further batches even while several batches wait for a slow second stage."""
    world = play(split(2), [(0, 10, 1), (1, 10, 1), (15, 10, 1)], later=ToyModel(base=100))
    assert times(world, Moment.PREFILL_STARTED) == [0.0, 14.0, 28.0]
    assert times(world, Moment.FIRST_TOKEN) == [14.0 + 110, 14.0 + 220, 14.0 + 330]


def test_later_stage_merges_waiting_decodes():
    later = ToyModel(base=100, per_sequence=10)
    world = play(split(2), [(0, 10, 2), (30, 10, 1), (60, 5, 1)], later=later)
    # Prompts leave stage one at 14, 44 and 69 ms, then take 110, 110 and 105 ms on stage two.
    assert times(world, Moment.FIRST_TOKEN) == [124.0, 234.0, 339.0]
    # A single decode takes 5 and 110 ms. The second runs on stage two from 239 to 349 ms; the first waits there from
    # 244 ms and the third from 344 ms, and both then run together for 120 ms.
    assert times(world, Moment.LAST_TOKEN) == [469.0, 349.0, 469.0]


def test_decode_batch_reads_at_most_fifty_thousand_tokens():
    """A decode batch has at most 50,000 context tokens."""
    sizes = [(0, 20_000, 2)] * 3
    world = play(split(), sizes, budget=100_000)
    start = 60_004.0
    assert times(world, Moment.FIRST_TOKEN) == [start] * 3
    # Iterations of two take 6 ms: (0, 1), (2, 0), (1, 2).
    assert times(world, Moment.LAST_TOKEN) == [start + 12, start + 18, start + 18]


@settings(max_examples=200)
@given(workloads(), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_request_ends_once_and_all_blocks_are_freed(requests, stages, colocated, fails):
    shape = [(Role.MIXED, stages)] * 2 if colocated else split(stages)
    failures = (InstanceFailure(instance="mixed-1" if colocated else "decode-0", at_s=0.05, back_s=0.1),)
    world = play(shape, requests, budget=400, later=ToyModel(base=2), failures=failures if fails else ())
    counts = world.statistics
    assert counts.completed + counts.rejected + counts.failed == len(requests) == counts.arrived
    assert not world.cluster.requests
    for instance in world.cluster.instances.values():
        assert instance.scheduler.status().idle
        assert instance.scheduler.empty
    if not fails:
        done = [t for t in world.ends.timelines if t.finish_reason is FinishReason.LENGTH]
        assert sum(counts.itl.counts.values()) == sum(t.output_tokens for t in done)
        decoding = sum(t.span(Moment.FIRST_TOKEN, Moment.LAST_TOKEN) for t in done)
        assert counts.itl.total == pytest.approx(decoding * PS, abs=len(requests))
