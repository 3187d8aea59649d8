"""Plan reports: tables, JSON and HTML page."""

import io

import msgspec
import pytest
from rich.console import Console

from support.analytic_cluster import COLOCATED, design
from support.plans import choice, evaluation, plan, split_and_colocated
from support.simulated import ESTIMATED, FITTED
from twofold.cluster.spec import ClusterSpec
from twofold.hardware.catalog import load_catalog
from twofold.performance.cost import MeasuredSizes
from twofold.planning.advice import advise
from twofold.planning.design import Design, Family, RatedDesign
from twofold.planning.evaluator import Effort
from twofold.planning.problem import Problem
from twofold.planning.workload import WorkloadArguments
from twofold.reporting.plan.html import plan_page
from twofold.reporting.plan.report import PlanReport
from twofold.reporting.plan.table import plan_tables, thinned
from twofold.slo import Slo

EFFORT = Effort(simulations=40, reused=3, requests=50_000, cpu_s=5.0)
FRONT = (RatedDesign(design=design(1, 1), rate=3.0), RatedDesign(design=design(5, 5), rate=20.0))


def shown(made, front=FRONT, width=120):
    console = Console(width=width, file=io.StringIO())
    console.print(plan_tables(made, advise(made, 0.02), front, EFFORT, "Most requests"))
    return console.file.getvalue()


def test_tables_have_designs_margins_front_and_verdict():
    text = shown(split_and_colocated(break_even=9.0, without=("slow mixed",)))
    for words in (
        "5×fast prefill + 5×slow decode",
        "10×fast mixed",
        "278.00",
        "83.5",
        "prefill off by 10.0%, decode off by 2.0%",
        "Cannot meet the SLO: slow mixed.",
        "TTFT P90",
        "≤ 1.00 s",
        "50.0%",
        "Pareto front",
        "Split: 2.00×",
        "40 simulations, 3 reused; 50,000 requests in 5.0 CPU s: 10,000 requests per CPU second",
    ):
        assert words in text, words
    guessed = plan(choice(design(5, 5), 12.0, error=ESTIMATED))
    assert "estimated; prefill off by 25.0%, decode off by 20.0%" in shown(guessed, width=160)


def test_names_fit_a_narrow_terminal():
    assert "5×fast prefill + 5×slow decode" in shown(split_and_colocated(), width=80)


def test_families_without_room_in_the_budget_are_named():
    text = shown(plan(choice(design(10, family=COLOCATED), 10.0), no_room=("fast+slow",)))
    assert "No room in the budget: fast+slow." in text
    assert "each phase needs a machine of its own" in " ".join(text.split())


@pytest.mark.parametrize("count", [1, 13, 14, 15, 200])
def test_a_long_front_is_thinned_between_its_ends(count):
    """A Pareto front of more than 14 points is reduced to 14, including the first and the last."""
    points = [RatedDesign(design=design(1, 1), rate=float(rate)) for rate in range(1, count + 1)]
    some = thinned(points)
    assert len(some) == min(count, 14)
    assert (some[0], some[-1]) == (points[0], points[-1])
    assert len({point.rate for point in some}) == len(some)


@pytest.fixture(scope="module")
def problem():
    return Problem(
        template=ClusterSpec(pools=(), model="bloom-176b"),
        workload=WorkloadArguments(workload="azure-conv"),
        slo=Slo(ttft_s=1.0, tpot_s=0.06),
        catalog=load_catalog(),
    )


def test_the_json_is_everything(problem):
    fast = problem.kind("h100")
    split = choice(Design(family=Family(kinds=(fast, fast)), counts=(3, 2)), 20.0)
    made = plan(split)
    report = msgspec.json.decode(PlanReport.of(problem, made, advise(made, 0.02), FRONT, EFFORT).json())
    (told,) = report["choices"]
    assert told["design"]["machines"] == [["dgx-h100", 3], ["dgx-h100", 2]]
    assert [pool["role"] for pool in told["cluster"]["pools"]] == ["prefill", "decode"]
    assert told["margins"][1] == {"check": "TTFT P90", "bound": 1.0, "value": 0.5, "headroom": 0.5}
    assert told["evaluation"]["pools"][0]["error"]["decode"] == 0.02
    assert (report["slo"], report["workload"]["workload"]) == ("ttft=1s,tpot=0.06s", "azure-conv")
    assert [point["rate"] for point in report["pareto"]] == [3.0, 20.0]
    assert report["effort"]["requests_per_cpu_s"] == 10_000.0
    assert report["advice"]["split"]


def test_the_page_has_both_pictures_and_escapes_names():
    made = split_and_colocated(break_even=9.0)
    curves = {each.design.name: {5.0: evaluation(5.0), 10.0: evaluation(10.0)} for each in made.choices}
    page = plan_page(made, advise(made, 0.02), FRONT, curves, slo=Slo(ttft_s=1.0, tpot_s=0.06), title="<b>plan</b>")
    for words in (
        'id="pareto"',
        'id="curves"',
        "&lt;b&gt;plan",
        "5×fast prefill + 5×slow decode",
        "Split: 2.00×",
        "TTFT ≤ 1.00 s",
    ):
        assert words in page, words
    assert "<b>plan" not in page
    assert page.index("Split: 2.00×") < page.index('id="pareto"') < page.index("<h2>The best of each family")
    assert "https://cdn" not in page.split("<h2>Pareto front")[0].split("<script")[0]


def test_equal_best_families_of_one_plan_are_all_shown():
    """The Pareto chart marks the best split design and the best colocated design."""
    from twofold.reporting.plan.html import pareto_chart

    picture = pareto_chart(split_and_colocated(), FRONT)
    names = {trace["name"] for trace in picture.traces}
    assert {"fast+slow", "best fast+slow", f"best {COLOCATED.group}"} <= names


def test_sizes_beyond_those_measured_are_named():
    """The warning is about the prompts that the planned design completed."""
    measured = msgspec.structs.replace(FITTED, measured=MeasuredSizes(prompt_tokens=4096, sequences=64))
    made = plan(choice(design(5, 5), 12.0, error=measured))
    assert "Extrapolated" not in shown(made)
    (best,) = made.choices
    longer = msgspec.structs.replace(best.evaluation, longest_prompt=9000)
    text = shown(plan(msgspec.structs.replace(best, evaluation=longer)), width=160)
    assert (
        "Extrapolated for 5×fast prefill + 5×slow decode: prompts of up to 9,000 tokens; measured up to 4,096" in text
    )
