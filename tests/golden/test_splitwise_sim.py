"""Every request of SplitwiseSim's reference runs, and the verdict of the paper's nine SLOs on them."""

import csv

import numpy as np
import pytest

from twofold.demo.real_data import find_data
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.performance.registry import performance_model
from twofold.simulation.observer import QuietObserver
from twofold.simulation.presets import splitwise_sim
from twofold.simulation.simulate import simulate
from twofold.simulation.spec import PoolSpec
from twofold.simulation.verdict import verdict
from twofold.slo import SPLITWISE
from twofold.workload.named import workload

CATALOG = load_catalog()
REFERENCE = performance_model(
    "splitwise-published", CATALOG.model("bloom-176b"), CATALOG.machine("dgx-a100"), 8
)


def h100(prefill=0, decode=0, mixed=0):
    roles = ((prefill, Role.PREFILL), (decode, Role.DECODE), (mixed, Role.MIXED))
    return [PoolSpec(machines=n, machine="dgx-h100", role=role) for n, role in roles if n]


# golden file, trace, pools, whether the nine SLOs are met
RUNS = [
    ("code-70rps-2min-baseline-h100-40", "code", h100(mixed=40), False),
    ("code-70rps-2min-hh-35p5t", "code", h100(prefill=35, decode=5), True),
    ("conv-70rps-2min-hh-25p15t", "conv", h100(prefill=25, decode=15), True),
]


class Ended(QuietObserver):
    """Keeps the timeline of every request."""

    def __init__(self):
        self.timelines = {}

    def ended(self, timeline):
        self.timelines[timeline.request.id] = timeline


@pytest.fixture(scope="module", params=RUNS, ids=[run[0] for run in RUNS])
def run(request):
    """(what SplitwiseSim printed per request, our timelines, our result, the expected verdict)."""
    name, trace, pools, met = request.param
    golden = find_data(f"golden/splitwise/{name}.csv")
    requests = find_data(f"traces/splitwise-{trace}-70rps-2min.csv")
    if golden is None or requests is None:
        pytest.skip(
            "the reference runs are absent; set TWOFOLD_DATA to the folder that holds golden/ and traces/"
        )
    observer = Ended()
    result = simulate(
        splitwise_sim(pools, catalog=CATALOG),
        workload(str(requests)),
        catalog=CATALOG,
        reference=REFERENCE,
        observers=[observer],
    )
    with golden.open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return rows, observer.timelines, result, met


def test_every_request_takes_what_it_took_there(run):
    """TTFT, end-to-end time, queueing and the wait for the second token of each request, to 1e-6."""
    rows, timelines, result, _ = run
    assert len(rows) == len(timelines) == result.completed == result.arrived
    for row in rows:
        ours = timelines[str(int(row["request_ids"]))]
        assert ours.ttft_s == pytest.approx(row["ttft_times"], rel=1e-6)
        assert ours.e2e_s == pytest.approx(row["response_times"], rel=1e-6)
        assert ours.queue_prefill_s == pytest.approx(row["queue_times"], rel=1e-6, abs=1e-9)
        second = ours.span("first_token", "decode_started")
        assert second == pytest.approx(row["nth_token_overheads"], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("percentile", [50, 90, 99])
@pytest.mark.parametrize(
    ("column", "histogram"), [("ttft_times", "ttft_s"), ("tbt_times", "tpot_s"), ("response_times", "e2e_s")]
)
def test_percentiles_are_those_of_the_reference(run, column, histogram, percentile):
    """P50, P90 and P99 of TTFT, TBT and E2E to 0.1%, of which the histogram's buckets take half."""
    rows, _, result, _ = run
    theirs = np.percentile([row[column] for row in rows], percentile)
    assert getattr(result, histogram).percentile(percentile) == pytest.approx(theirs, rel=1e-3)


def test_the_nine_slos_say_the_same(run):
    """The verdict, bound by bound, is that of slow-downs computed from SplitwiseSim's own output."""
    rows, _, result, met = run
    judged = verdict(result, SPLITWISE)
    assert judged.met is met
    theirs = {}
    for row in rows:
        ttft, tbt = REFERENCE.uncontended(int(row["prompt_sizes"]), int(row["token_sizes"]))
        alone = ttft + tbt * (row["token_sizes"] - 1)
        for name, slowdown in (
            ("TTFT", row["ttft_times"] / ttft),
            ("TPOT", row["tbt_times"] / tbt),
            ("E2E", row["response_times"] / alone),
        ):
            theirs.setdefault(name, []).append(slowdown)
    checks = {check.name: check for check in judged.checks}
    for name, bounds in (("TTFT", SPLITWISE.ttft), ("TPOT", SPLITWISE.tpot), ("E2E", SPLITWISE.e2e)):
        for percentile, bound in bounds.items():
            check = checks[f"{name} slowdown P{percentile}"]
            expected = np.percentile(theirs[name], percentile)
            assert check.value == pytest.approx(expected, rel=1e-3)
            assert check.met is bool(expected <= bound)
