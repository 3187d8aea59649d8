"""Pipelines in the simulator: stages, queues between stages, and invariants."""

from collections import defaultdict
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.toy import CATALOG, ToyModel, ToyRun, pipelines, run, workloads
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.cluster.timing import PS
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.instance import LayersStage, Pipeline
from twofold.request import Request
from twofold.simulation.instance import pass_through
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.timeline import Moment

MS = PS // 1000


def toy(stages, batcher="prefill", **how):
    model = Pipeline("toy", ToyModel.error, ToyModel(), ToyModel(), stages)
    spec = ClusterSpec(
        pools=(
            PoolSpec(machines=stages, machine="dgx-h100", role=Role.PREFILL, pipeline_parallel=stages),
            PoolSpec(machines=stages, machine="dgx-h100", role=Role.DECODE, pipeline_parallel=stages),
        ),
        model="llama2-70b",
        router="jsq",
        handoff="serialized",
        link_bytes_per_s=1e15,
        block_size=1,
        **how,
    )
    return spec, {Role.PREFILL: batcher, Role.DECODE: "decode"}, model, 1 << 20


def requests(*sizes):
    return [
        Request(id=str(number), arrival_s=at / 1e3, prompt_tokens=prompt, output_tokens=output)
        for number, (at, prompt, output) in enumerate(sizes)
    ]


def moments(world, moment):
    return [round(t.moments[moment] * 1e3, 6) for t in sorted(world.ends.timelines, key=lambda t: int(t.request.id))]


def test_prompt_passes_every_stage():
    """A prompt that takes 14 ms per stage has its first token after 28 ms on two stages."""
    assert moments(run(toy(2), requests((0, 10, 1))), Moment.FIRST_TOKEN) == [28.0]


def test_next_prompt_starts_when_the_first_stage_is_free():
    """The second prompt starts at 14 ms, when the first prompt moves to the second stage."""
    world = run(toy(2), requests((0, 10, 1), (1, 10, 1)))
    assert moments(world, Moment.PREFILL_STARTED) == [0.0, 14.0]
    assert moments(world, Moment.FIRST_TOKEN) == [28.0, 42.0]


def test_short_iteration_waits_behind_a_long_one():
    """A short iteration that follows a long one waits for the second stage."""
    world = run(toy(2, max_num_batched_tokens=50), requests((0, 50, 1), (1, 1, 1)))
    assert moments(world, Moment.FIRST_TOKEN) == [108.0, 113.0]


def test_decodes_in_two_lanes_overlap():
    world = run(toy(2), requests((0, 10, 6), (0, 10, 6)))
    first, last = moments(world, Moment.DECODE_STARTED), moments(world, Moment.LAST_TOKEN)
    assert first[1] - first[0] == pytest.approx(15.0)
    assert [end - begin for begin, end in zip(first, last, strict=True)] == pytest.approx([50.0, 50.0])
    decode = world.cluster.instances["decode-0"]
    assert decode.iterations == 10
    assert decode.busy == 10 * 5 * MS


def test_idle_stages_are_not_busy():
    """A single sequence keeps each of two stages busy for half of the time."""
    world = run(toy(2), requests((0, 10, 6)))
    begun, ended = moments(world, Moment.DECODE_STARTED)[0], moments(world, Moment.LAST_TOKEN)[0]
    assert ended - begun == pytest.approx(50.0)
    assert world.cluster.instances["decode-0"].busy == 25 * MS


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 90), st.integers(1, 50), st.integers(1, 50)), max_size=30))
def test_stages_compute_one_iteration_at_a_time(stages, iterations):
    free_at, now = [0] * stages, 0
    for gap, first, later in iterations:
        before = list(free_at)
        now = max(now + gap, free_at[0])
        begins = pass_through(now, first, later, free_at)
        ends = [begin + (later if stage else first) for stage, begin in enumerate(begins)]
        assert free_at == ends
        arrives = [now, *ends[:-1]]
        assert begins == [max(free, at) for free, at in zip(before, arrives, strict=True)]


class Runs(Observer):
    """Observer that collects the iterations of each instance."""

    def __init__(self):
        self.by_instance = defaultdict(list)

    def run(self, run):
        self.by_instance[run.instance].append(run)


@settings(max_examples=200)
@given(pipelines(failures=False), workloads())
def test_observers_see_iterations_of_the_last_stage_in_order(cluster, requests):
    runs = Runs()
    run(cluster, requests, observers=[runs])
    for of_one in runs.by_instance.values():
        for one, following in pairwise(of_one):
            assert one.start_ps < one.end_ps <= following.start_ps


def test_two_stages_double_prefill_throughput():
    """Two stages, each with half of the layers, prefill a full queue of prompts in half the time."""
    many = requests(*[(0, 60, 1)] * 200)

    def duration(stages):
        spec, batchers, _, capacity = toy(stages, max_num_batched_tokens=60)
        stage = LayersStage(ToyModel(), 1 / stages, 0.0)
        model = Pipeline("toy", ToyModel.error, stage, stage, stages)
        return ToyRun(spec, many, model=model, capacity=capacity, batchers=batchers).statistics.last_end

    assert duration(1) / duration(2) == pytest.approx(2.0, rel=0.01)


def test_simulates_a_pipeline_of_the_catalog():
    """OPT-66B with prefill TP4 PP1 and decode TP2 PP2 completes all requests."""
    spec = ClusterSpec(
        pools=(
            PoolSpec(machines=1, machine="dgx-a100", role=Role.PREFILL, tensor_parallel=4, instances=1),
            PoolSpec(machines=1, machine="dgx-a100", role=Role.DECODE, tensor_parallel=2, pipeline_parallel=2),
        ),
        model="opt-66b",
        router="jsq",
    )
    workload = [Request(id=str(n), arrival_s=n / 4, prompt_tokens=500, output_tokens=100) for n in range(100)]
    result = simulate(spec, workload, catalog=CATALOG, slo=Slo(ttft_s=1.0, tpot_s=0.2))
    assert (result.completed, result.pools[0].instances, result.pools[1].instances) == (100, 1, 2)
    assert 0 < result.pools[1].utilization < 1
    assert result.itl_s.count == 100 * 99


def test_rejects_pipelines_with_an_unpipelined_batcher():
    """Pipelines with SplitwiseSim's batcher are rejected."""
    pool = PoolSpec(machines=2, machine="dgx-h100", role=Role.MIXED, pipeline_parallel=2)
    for change, more in (({"batcher": "splitwise-sim"}, {}), ({}, {"rules": "splitwise-sim"})):
        spec = ClusterSpec(pools=(msgspec.structs.replace(pool, **change),), model="llama2-70b", router="jsq", **more)
        with pytest.raises(ConfigurationError, match="does not support pipelines"):
            instance_profiles(spec, CATALOG)
