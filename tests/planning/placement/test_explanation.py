"""The parallelism that queueing theory prefers for prefill."""

import pytest
from msgspec.structs import replace

from support.plans import evaluation
from twofold.instance import Role
from twofold.performance.queueing import crossing_rate, mean_ttft_s, stage_times
from twofold.planning.design import Design, Family
from twofold.planning.placement.plan import PlacementPlan, PlacementQuery, preference, prepare
from twofold.planning.placement.search import PlacementResults
from twofold.planning.plan import DesignChoice


@pytest.fixture
def explain(make_problem):
    """Return a function that plans a placement of OPT-13B and explains its prefill parallelism."""

    def explained(tensor, pipeline, count=1, rate=4.0, workload="512+64", stock=None, kinds=1):
        problem = make_problem("ttft=0.2,tpot=0.1", "jsq", model="opt-13b", workload=workload)
        problem = replace(problem, template=replace(problem.template, performance="distserve-published"))
        prepared = prepare(problem, PlacementQuery(stock=stock or {"dgx-a100": 4}))
        prefill = problem.instance("a100", tensor, pipeline)
        decode = problem.instance("a100", 1)
        family = Family(kinds=(*[prefill] * kinds, decode), roles=(*[Role.PREFILL] * kinds, Role.DECODE))
        design = Design(family=family, counts=(count,) * kinds + (1,))
        placed = DesignChoice(design=design, rate=rate, highest_rate=rate, evaluation=evaluation(rate))
        found = PlacementResults(prefills=(), decodes=(), split=(placed,), colocated=())
        return problem, preference(PlacementPlan(prepared=prepared, placement=found, best=placed))

    return explained


def test_prefers_tensor_parallelism_at_low_and_pipelines_at_high_rates(explain):
    problem, found = explain(2, 1, count=2)
    (start, first), (crossing, second) = found.best
    assert (start, first, second) == (0.0, "tensor parallelism (TP2)", "a pipeline (PP2)")
    tensor, pipeline = (
        stage_times(problem.performance(problem.instance("a100", *degrees)), 512) for degrees in ((2, 1), (1, 2))
    )
    assert mean_ttft_s(crossing, *tensor) == pytest.approx(mean_ttft_s(crossing, *pipeline))
    assert found.text == (
        "By queueing theory, mean TTFT of prompts of 512 tokens on 2 accelerators is lowest with "
        f"tensor parallelism (TP2) "
        f"up to {crossing:.3g} requests/s, above with a pipeline (PP2); each instance serves 2 requests/s here."
    )


def test_the_crossover_is_close_to_the_papers(explain):
    problem, found = explain(2, 1)
    alone_s, quick_s = (
        problem.performance(problem.instance("a100", tensor)).prefill_s(512, 512**2) for tensor in (1, 2)
    )
    assert found.best[1][0] == pytest.approx(crossing_rate((quick_s, quick_s), (alone_s, alone_s / 2)), rel=0.2)


def test_longer_prompts_lower_the_crossover(explain):
    short, long = (explain(2, 1, workload=workload)[1] for workload in ("256+16", "1024+16"))
    assert (short.prompt_tokens, long.prompt_tokens) == (256, 1024)
    assert short.best[1][0] > long.best[1][0]


def test_orders_more_than_two_degrees(explain):
    problem, found = explain(4, 1)
    rates = [rate for rate, _ in found.best]
    assert rates == sorted(rates)
    assert found.best[0][1] == "tensor parallelism (TP4)"
    means = {
        degrees: mean_ttft_s(
            1.001 * rates[-1], *stage_times(problem.performance(problem.instance("a100", *degrees)), 512)
        )
        for degrees in ((4, 1), (2, 2), (1, 4))
    }
    tensor, pipeline = min(means, key=means.__getitem__)
    assert f"P{tensor}" in found.best[-1][1] or f"P{pipeline}" in found.best[-1][1]


def test_is_none_without_alternatives(explain):
    assert explain(1, 1)[1] is None
    assert explain(2, 1, kinds=2)[1] is None
