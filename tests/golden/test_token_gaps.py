"""TTFT and tail TBT (time between tokens) of each request."""

from pathlib import Path
from runpy import run_path

import pytest

from support.observed import MS, completed, refused, report_run
from support.toy import CATALOG
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.instance import Role
from twofold.performance.registry import performance_model
from twofold.request import Request
from twofold.simulation.observers.base import IterationRun
from twofold.simulation.simulate import simulate

TokenGaps = run_path(str(Path(__file__).parents[2] / "bench" / "mooncake" / "token_gaps.py"))["TokenGaps"]
MODEL = performance_model("roofline", CATALOG.model("llama2-70b"), CATALOG.machine("dgx-a100"), 8)
COLOCATED = ClusterSpec(
    pools=(PoolSpec(machines=1, machine="dgx-a100", role=Role.MIXED, batcher="prefill-first"),),
    model="llama2-70b",
    performance="roofline",
    router="jsq",
)
SPLIT = ClusterSpec(
    pools=(
        PoolSpec(machines=1, machine="dgx-a100", role=Role.PREFILL),
        PoolSpec(machines=1, machine="dgx-a100", role=Role.DECODE),
    ),
    model="llama2-70b",
    performance="roofline",
    router="jsq",
)


def decodes(instance, start, end, iterations):
    return IterationRun(instance, start * MS, end * MS, iterations, 0, 0, 3, 1_000, 100.0)


def test_the_longest_tenth_counts():
    """Tail TBT is the mean of the longest tenth of a request's token gaps."""
    gaps = TokenGaps()
    gaps.run(decodes("decode-0", 500, 875, 4))  # before the arrival of the request
    gaps.run(decodes("decode-1", 0, 2000, 100))  # another instance
    gaps.run(decodes("decode-0", 875, 1250, 4))
    gaps.run(IterationRun("decode-0", 1250 * MS, 1260 * MS, 1, 500, 1, 0, 0, 100.0))  # a prompt, and no decodes
    gaps.ended(completed(), 0.0)
    gaps.ended(refused(), 0.0)
    assert gaps.latencies == [(0.5, pytest.approx(0.21875))]
    assert gaps.share_within(0.5, 0.22) == 1.0
    assert gaps.share_within(0.5, 0.2) == gaps.share_within(0.4, 0.3) == 0.0


def test_share_is_zero_without_requests():
    assert TokenGaps().share_within(1.0, 1.0) == 0.0


def test_rejects_iterations_without_a_token_for_a_request():
    with pytest.raises(RuntimeError, match="5 tokens, but there were 32 iterations"):
        report_run(TokenGaps())


@pytest.mark.parametrize("spec", [COLOCATED, SPLIT])
def test_gaps_show_decodes_delayed_by_prefill(spec):
    arrivals = [("a", 0.0, 100, 31), ("b", 0.5, 4_000, 1)]
    requests = [
        Request(id=name, arrival_s=at, prompt_tokens=prompt, output_tokens=output)
        for name, at, prompt, output in arrivals
    ]
    gaps, single = TokenGaps(), TokenGaps()
    simulate(spec, requests, catalog=CATALOG, observers=[gaps])
    simulate(spec, requests, catalog=CATALOG, observers=[single], max_run=1)
    prefill_s, step_s = MODEL.prefill_s(4_000, 16_000_000), MODEL.uncontended(100, 31)[1]
    (_, alone), (_, first) = sorted(gaps.latencies, key=lambda each: each[1])
    held_up = (prefill_s + 3 * step_s) / 3 if spec is COLOCATED else step_s
    assert (alone, first) == (0.0, pytest.approx(held_up, rel=0.1))
    assert sum(gaps.latencies, ()) == pytest.approx(sum(single.latencies, ()), rel=1e-3)
