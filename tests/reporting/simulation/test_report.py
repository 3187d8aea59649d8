"""The JSON report of a simulation."""

import msgspec

from support.simulated import histogram, result
from twofold.cluster.spec import ClusterSpec
from twofold.performance.cost import ModelAccuracy
from twofold.reporting.simulation.report import SimulationReport
from twofold.simulation.result import verdict
from twofold.slo import SPLITWISE


def test_json_holds_everything():
    run = result(tpot_slowdown=None)
    whole = result()
    report = SimulationReport.of(
        run, workload={"workload": "azure-conv", "rate": 70.0}, seed=7, reference="dgx-a100", slo=SPLITWISE,
        judged=verdict(whole, SPLITWISE),
    )  # fmt: skip
    read = msgspec.json.decode(report.json())
    assert (read["seed"], read["workload"]["rate"], read["reference"]) == (7, 70.0, "dgx-a100")
    assert set(read["latencies_s"]["ttft_s"]) == {"count", "mean", "min", "p50", "p90", "p95", "p99", "max"}
    assert read["latencies_s"]["ttft_s"]["p50"] == run.ttft_s.percentile(50)
    assert (read["slowdowns"]["tpot_slowdown"], read["slowdowns"]["e2e_slowdown"]["count"]) == (None, 101)
    assert read["rates"] == {
        "arrivals_per_s": 0.396,
        "requests_per_s": 98 / 300,
        "output_tokens_per_s": 20_000 / 300,
        "goodput_per_s": 0.3,
        "steady": None,
    }
    assert (read["energy_j"], read["mean_power_w"], read["price_per_h"], read["tdp_w"]) == (7.2e6, 24e3, 114, 30600)
    assert read["pools"][0]["error"] == {
        "prefill": 0.1,
        "decode": 0.02,
        "basis": "fitted to 19 measured points",
        "estimated": False,
        "measured": None,
    }
    assert read["slo"]["ttft"] == {"50": 2.0, "90": 3.0, "99": 6.0}
    assert not read["verdict"]["met"]
    assert read["counts"]["preemptions"] == 3
    assert read["series"]["pool/prefill"] == {"mean": 1.5, "max": 2.0}
    assert msgspec.convert(read["spec"], ClusterSpec) == run.spec


def test_nothing_measured_is_null():
    """Latencies without values, and rates over zero seconds, are null."""
    empty = result(ttft_s=histogram(), duration_s=0.0, slo_met=None)
    report = SimulationReport.of(empty, workload={}, seed=0)
    assert report.latencies_s["ttft_s"] is None
    assert (report.rates.requests_per_s, report.rates.goodput_per_s) == (None, None)


def test_every_figure_has_its_error():
    """Each metric is reported with the relative error of the performance model's predictions."""
    guess = ModelAccuracy(prefill=0.5, decode=None, basis="a guess", estimated=True)
    report = SimulationReport.of(result(), workload={}, seed=0, reference_error=guess)
    errors = report.model_errors
    assert (errors["ttft_s"].prefill, errors["ttft_s"].decode) == (0.1, None)
    assert (errors["ttft_slowdown"].prefill, errors["ttft_slowdown"].estimated) == (0.5, True)
    assert (errors["energy_j"].prefill, errors["energy_j"].estimated) == (0.1, False)


def test_series_are_sorted():
    run = result()
    turned = result(series=dict(reversed(run.series.items())))
    assert (
        SimulationReport.of(run, workload={}, seed=0).json() == SimulationReport.of(turned, workload={}, seed=0).json()
    )
