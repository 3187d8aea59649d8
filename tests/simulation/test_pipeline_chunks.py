"""Chunked pipelines in the simulator: chunks of one prompt run on several stages at once."""

from collections import defaultdict
from itertools import pairwise
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings

from support.toy import CATALOG, ToyModel, pipelines, run, workloads
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.instance import Pipeline
from twofold.request import Request
from twofold.simulation import instance as instance_module
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.timeline import Moment

SPEC = ClusterSpec(
    pools=(
        PoolSpec(machines=2, machine="dgx-h100", role=Role.PREFILL, pipeline_parallel=2),
        PoolSpec(machines=1, machine="dgx-h100", role=Role.DECODE),
    ),
    model="llama2-70b",
    router="jsq",
    handoff="serialized",
    link_bytes_per_s=1e15,
    pipeline_chunk=1024,
)

# Routers that change roles need batchers for both phases, and this batcher only prefills.
BOTH_PHASES = ("splitwise", "splitwise-sim")


def toy(stages, chunk):
    """Return arguments of `run` for a small pipelined cluster that splits prompts into chunks of `chunk` tokens."""
    model = Pipeline("toy", ToyModel.error, ToyModel(), ToyModel(), stages)
    pools = (
        PoolSpec(machines=stages, machine="dgx-h100", role=Role.PREFILL, pipeline_parallel=stages),
        PoolSpec(machines=stages, machine="dgx-h100", role=Role.DECODE, pipeline_parallel=stages),
    )
    spec = msgspec.structs.replace(SPEC, pools=pools, block_size=1, max_num_batched_tokens=chunk)
    return spec, {Role.PREFILL: "prefill-chunks", Role.DECODE: "decode"}, model, 1 << 20


def requests(*sizes):
    return [
        Request(id=str(number), arrival_s=at / 1e3, prompt_tokens=prompt, output_tokens=1)
        for number, (at, prompt) in enumerate(sizes)
    ]


def first_tokens(world):
    ends = sorted(world.ends.timelines, key=lambda t: int(t.request.id))
    return [round(t.moments[Moment.FIRST_TOKEN] * 1e3, 6) for t in ends]


def test_chunks_of_a_prompt_overlap_on_two_stages():
    """On two stages, a prompt of 100 tokens takes 145 ms in four chunks and 208 ms without chunks."""
    assert first_tokens(run(toy(2, 25), requests((0, 100)))) == [145.0]
    assert first_tokens(run(toy(2, 100), requests((0, 100)))) == [208.0]


def test_short_prompt_is_not_cut():
    assert first_tokens(run(toy(2, 25), requests((0, 20)))) == [48.0]
    assert first_tokens(run(toy(2, 25), requests((0, 100), (1, 20)))) == [145.0, 169.0]


def test_one_stage_computes_chunks_in_sequence():
    """On one stage, four chunks run one after another and take 4 × 29 ms = 116 ms."""
    assert first_tokens(run(toy(1, 25), requests((0, 100)))) == [116.0]


def chunkable(drawn):
    return drawn[0].router not in BOTH_PHASES


@settings(max_examples=150)
@given(pipelines(failures=False).filter(chunkable), workloads())
def test_chunks_pass_every_stage_in_order(cluster, requests):
    passages = defaultdict(list)

    class Recorded(instance_module._Run):
        def happen(self):
            times = self.begins, self.timing.first_ps, self.later_ps
            for part in self.batch.prefills:
                passages[part.sequence.id].append((part.context_tokens, part.num_tokens, times))
            super().happen()

    spec, batchers, model, capacity = cluster
    batchers = {role: "prefill-chunks" if role is Role.PREFILL else name for role, name in batchers.items()}
    with patch.object(instance_module, "_Run", Recorded):
        world = run((spec, batchers, model, capacity), requests)
    ended = {timeline.request.id: timeline.request for timeline in world.ends.timelines}
    for request_id in passages.keys() & ended.keys():
        parts = passages[request_id]
        assert sum(tokens for _, tokens, _ in parts) == ended[request_id].prompt_tokens
        for (context, tokens, one), (then, _, following) in pairwise(parts):
            assert context + tokens == then
            begins, first_ps, later_ps = one
            for stage, (begin, next_begin) in enumerate(zip(begins, following[0], strict=True)):
                assert begin + (later_ps if stage else first_ps) <= next_begin
    if spec.rules == "twofold":  # under the other rules requests may wait for each other's output blocks for ever
        assert len(world.cluster.requests) == 0


def test_chunks_lower_the_ttft_of_long_prompts():
    """Chunks reduce the TTFT of a prompt of 16,000 tokens on two stages by more than 35%."""
    workload = [Request(id="0", arrival_s=0.0, prompt_tokens=16_000, output_tokens=2)]

    def ttft(chunk):
        spec = msgspec.structs.replace(SPEC, pipeline_chunk=chunk)
        return simulate(spec, workload, catalog=CATALOG, slo=Slo(ttft_s=1.0)).ttft_s.mean

    assert ttft(2048) < 0.65 * ttft(None)


def test_prefill_pipelines_get_the_chunk_batcher_and_budget():
    kinds = instance_profiles(SPEC, CATALOG)
    assert [(kind.batcher, kind.max_num_batched_tokens) for kind in kinds] == [
        ("prefill-chunks", 1024),
        ("decode", 2048),
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"router": "splitwise"}, "pipelined prefill pool"),
        ({"pools": (PoolSpec(machines=2, machine="dgx-h100", role=Role.MIXED),)}, "pipelined prefill pool"),
        ({"rules": "distserve-published"}, "does not apply to the rules distserve-published"),
        ({"pipeline_chunk": 0}, "pipeline_chunk must be more than 0, not 0"),
    ],
)
def test_rejects_chunks_without_a_prefill_pipeline(changes, why):
    with pytest.raises(ConfigurationError, match=why):
        instance_profiles(msgspec.structs.replace(SPEC, **changes), CATALOG)
