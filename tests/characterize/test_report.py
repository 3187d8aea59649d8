"""Tests of the report about measured instances."""

import re

import msgspec
import pytest

from support.hosts import profile
from support.paced import TIMES
from twofold.characterize.analysis import Characterization, cached_speedup, measured_power
from twofold.characterize.report.activity import LOADS, activities
from twofold.characterize.report.charts import charts
from twofold.characterize.report.insights import Finding, insights
from twofold.characterize.report.page import html_report
from twofold.characterize.report.tables import findings
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.performance.fitting.profile import ProfileRow
from twofold.performance.profile import KvLink, MachineCosts, MeasuredPower
from twofold.reporting.page import dark_changes, write_plots
from twofold.workload.source import workload

SENT = {name: list(workload(name, rate=1.0, num_requests=80)) for name in ("azure-conv", "azure-code")}


def instance(machine="fast", factor=1.0, **changes):
    """Return the measurements of an instance, with iteration times multiplied by `factor`."""
    made = msgspec.structs.replace(
        profile(),
        times=changes.pop("times", TIMES).slower(factor),
        machine=machine,
        host=None,
        engine="",
        kv_capacity_tokens=40_000,
        max_num_batched_tokens=None,
        **changes,
    )
    return Characterization(profile=made)


def rows(*fields):
    return [ProfileRow(model="m", hardware="h", tensor_parallel=1, token_size=10, **each) for each in fields]


def judged(found, *others, activity=()):
    return {each.number: each for each in insights(found, SENT, activity, others)}


def test_the_knee_is_where_throughput_ends_to_grow():
    found = instance()
    assert 256 <= found.prefill_knee() <= 512
    assert found.prefill_rate(2048) < found.prefill_rate(512)
    assert found.decode_knee() is None, "throughput grows up to the largest batch"
    slow = msgspec.structs.replace(TIMES, large=8, large_s=10 * TIMES.base_s)
    assert 4 <= instance(times=slow).decode_knee() <= 8


def test_a_long_prompt_is_computed_in_chunks():
    chunked = instance()
    chunked = msgspec.structs.replace(
        chunked, profile=msgspec.structs.replace(chunked.profile, max_num_batched_tokens=512, request_s=0.01)
    )
    seconds = TIMES.seconds(512, 512**2, 0, 0) + TIMES.seconds(488, 1000**2 - 512**2, 0, 0)
    assert chunked.ttft_s(1000) == pytest.approx(0.01 + seconds)


def test_insights_that_one_profile_can_judge():
    """One profile suffices to check Splitwise's insights 1 to 4."""
    catalog = instance().profile.extend(load_catalog())
    activity = [
        run for name, requests in SENT.items() for run in activities(instance().profile, catalog, name, requests)
    ]
    assert [run.load for run in activity] == [*LOADS, *LOADS]
    found = judged(instance(), activity=activity)
    assert (found[1].verdict, found[3].verdict, found[4].verdict) == (Finding.HOLDS, Finding.FAILS, Finding.HOLDS)
    assert found[2].verdict is not Finding.UNKNOWN
    assert (found[6].verdict, found[7].verdict) == (Finding.UNKNOWN, Finding.UNKNOWN)


def test_active_tokens_grow_with_the_load():
    found = instance().profile
    low, _, high = activities(found, found.extend(load_catalog()), "azure-conv", SENT["azure-conv"])
    assert low.share(8) > high.share(8)
    assert low.steps()[-1][1] == pytest.approx(1.0)
    assert low.rate < high.rate


def test_power_that_decode_does_not_use():
    power = MeasuredPower(tdp_w=700, prefill_share=0.95, decode_share=0.5, source="NVML")
    assert judged(instance(power=power))[6].verdict is Finding.HOLDS
    hungry = msgspec.structs.replace(power, decode_share=0.94)
    assert judged(instance(power=hungry))[6].verdict is Finding.FAILS
    capped = instance("fast-350w", 1.3)
    capped = msgspec.structs.replace(
        capped, profile=msgspec.structs.replace(capped.profile, times=TIMES.slower(1.3, 1.0))
    )
    assert judged(instance(), capped)[6].verdict is Finding.HOLDS
    assert "1.30 times the TTFT and 1.00 times the TBT" in judged(instance(), capped)[6].evidence
    assert judged(instance(), instance("fast-350w", 1.3))[6].verdict is Finding.FAILS


def test_cheaper_decode_needs_prices():
    """Splitwise's insight 7 (cheaper hardware for decode) can be checked only with prices."""
    fast = instance(costs=MachineCosts(price_per_h=38, tdp_w=10_000))
    slow = instance("slow", 1.5, costs=MachineCosts(price_per_h=17, tdp_w=6_000))
    dear = instance("slow", 1.5, costs=MachineCosts(price_per_h=30, tdp_w=9_000))
    assert judged(fast, slow)[7].verdict is Finding.HOLDS
    assert judged(fast, dear)[7].verdict is Finding.FAILS
    assert judged(fast, instance("slow", 1.5))[7].verdict is Finding.UNKNOWN


def test_memory_that_no_batch_fills_is_not_judged():
    found = instance()
    wide = msgspec.structs.replace(found, profile=msgspec.structs.replace(found.profile, kv_capacity_tokens=10_000_000))
    assert judged(wide)[5].verdict is Finding.UNKNOWN
    assert judged(found)[5].verdict in (Finding.HOLDS, Finding.FAILS)


def test_measured_power_of_both_phases():
    of_both = rows(
        {
            "prompt_size": 512,
            "batch_size": 1,
            "prompt_time": 9,
            "token_time": 5,
            "average_power": 0.5,
            "peak_power": 0.9,
        }
    )
    assert measured_power(of_both, 700, "csv").prefill_share == 0.9
    apart = rows(
        {"prompt_size": 512, "batch_size": 1, "prompt_time": 9, "average_power": 0.8},
        {"prompt_size": 512, "batch_size": 4, "token_time": 5, "average_power": 0.4},
    )
    assert measured_power(apart, 700, "NVML").decode_share == 0.4
    assert measured_power(rows({"prompt_size": 1, "batch_size": 1, "prompt_time": 9}), 700, "NVML") is None


def test_a_repeated_prompt_is_faster():
    assert cached_speedup(rows({"prompt_size": 9, "batch_size": 1, "prompt_time": 30, "cached_time": 10})) == 3.0
    assert cached_speedup(()) is None


def test_a_page_has_every_figure_and_verdict():
    link = KvLink(bytes_per_s=1e9, latency_s=0.0, sync_s=0.005)
    found = [
        instance(link=link, costs=MachineCosts(price_per_h=2)),
        instance("slow", 2.0, costs=MachineCosts(price_per_h=1)),
    ]
    catalog = load_catalog()
    activity = {
        each.name: activities(each.profile, each.profile.extend(catalog), "azure-conv", SENT["azure-conv"])
        for each in found
    }
    drawn = charts(found, activity, SENT)
    assert {chart.id for chart in drawn} == {"latency", "throughput", "workloads", "active", "memory", "transfer"}
    for chart in drawn:
        titles = [value["title"]["text"] for name, value in chart.layout.items() if name[1:].startswith("axis")]
        assert titles
        assert all(titles)
        assert set(dark_changes(chart.layout)) > {"paper_bgcolor", "plot_bgcolor", "font.color", "xaxis.gridcolor"}
    page = html_report(
        found, {found[0].name: list(judged(found[0], found[1]).values())}, drawn, title="Characterization"
    )
    places = [page.index(part) for part in ("Insights of", *(f'id="{chart.id}"' for chart in drawn), "<h2>Instances<")]
    assert places == sorted(places)
    assert Finding.HOLDS in page
    assert "2.00x" in page  # the slower instance's TTFT
    assert "0.50x" in page  # its price
    assert "prefers-color-scheme: dark" in page


def test_single_figures_are_listed():
    labels = dict(findings(instance()))
    assert labels["KV capacity"] == "40,000 tokens"
    assert re.match(r"\d+ tokens", labels["prefill throughput saturates at"])


def test_plots_without_a_browser_are_one_sentence(tmp_path, monkeypatch):
    """If kaleido or Chrome is missing, the error message names the package to install."""
    import plotly.io

    def fails(*_args, **_kwargs):
        raise RuntimeError("Kaleido requires Google Chrome to be installed.\nmore")

    monkeypatch.setattr(plotly.io, "write_images", fails)
    with pytest.raises(ConfigurationError, match=r"pip install kaleido.*requires Google Chrome to be installed\.$"):
        write_plots(charts([instance()], {}, SENT), tmp_path / "plots")
