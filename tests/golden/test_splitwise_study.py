"""Ratios of docs/reproduction-splitwise.md for the corrected timing, and the baselines that they compare with."""

import sys
from pathlib import Path

import pytest

from twofold.hardware.catalog import load_catalog
from twofold.planning.design import Design
from twofold.planning.evaluation import Trial
from twofold.planning.problem import COLOCATED
from twofold.planning.rates import RateGrid
from twofold.planning.trials import simulate_trial

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench" / "splitwise"
CATALOG = load_catalog()
# Best design of equal power for code, and its highest rate within the nine SLOs.
BEST = {
    "Baseline-H100": ((40,), 89.6),
    "Splitwise-AA": ((57, 13), 72.1),
    "Splitwise-HH": ((34, 6), 95.1),
    "Splitwise-HA": ((31, 15), 82.8),
    "Splitwise-HHcap": ((35, 7), 95.1),
}


@pytest.fixture(scope="module")
def bench():
    """Return the modules `study` and `designs` of bench/splitwise."""
    sys.path.insert(0, str(BENCH))
    try:
        import designs
        import study

        yield study, designs
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def keeps(bench):
    """Return a function that simulates a design and returns the batchers with which it meets the nine SLOs."""
    study, designs = bench
    settings = study.Settings()
    timing = study.timings(settings, CATALOG)["corrected"]
    problem = study.problem_of(timing, "code", settings, CATALOG)

    def meets(name, rate):
        kind = next(each for each in designs.KINDS if each.name == name)
        families = designs.families(kind, CATALOG, timing.batching)
        designed = [Design(family=family, counts=BEST[name][0]) for family in families]
        return [each.family.batching for each in designed if simulate_trial(problem, Trial(each, rate)).evaluation.met]

    return meets


def test_study_and_planner_have_the_same_baselines(bench):
    study, _ = bench
    assert study.timings(study.Settings(), CATALOG)["corrected"].batching is COLOCATED
    assert set(COLOCATED) >= {("mixed", None), ("chunked-prefill", 512), ("chunked-prefill", 2048)}


@pytest.mark.parametrize("name", BEST)
def test_each_design_keeps_the_slo_up_to_the_documented_rate(name, keeps):
    grid, rate = RateGrid(), BEST[name][1]
    step = grid.step(rate * 1.001)
    assert grid.rate(step) == pytest.approx(rate, abs=0.05)
    kept = keeps(name, grid.rate(step))
    assert kept
    assert not keeps(name, grid.rate(step + 2))
    if name == "Baseline-H100":
        assert kept == ["chunked-prefill@512"]


def test_the_documented_ratios_are_those_rates():
    text = (ROOT / "docs" / "reproduction-splitwise.md").read_text()
    section = text.partition("**iso-power, code**")[2].partition("**iso-cost, conv**")[0]
    rows = {
        cells[0]: cells for line in section.splitlines() if (cells := [*map(str.strip, line.strip("|").split("|"))])
    }
    for name, (_, rate) in BEST.items():
        assert float(rows[name][11]) == rate
        assert rows[name][12] == f"{rate / BEST['Baseline-H100'][1]:.2f}×"
