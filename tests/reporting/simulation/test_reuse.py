"""Prefix reuse in the tables and JSON report of a simulation."""

import msgspec

from support.simulated import multiples, result
from twofold.reporting.simulation.facts import ReuseReport, reuse_lines
from twofold.reporting.simulation.report import SimulationReport
from twofold.simulation.reuse import HotBlock, ReuseResult

REUSE = ReuseResult(
    caches=4,
    blocks=200,
    hits={"dram": 50, "disk": 10},
    fetched=20,
    prompt_tokens=100_000,
    reused_tokens=40_000,
    requests={"prefill-0": 30, "prefill-1": 10},
    hottest=(HotBlock(40, 4), HotBlock(20, 2)),
    ttft_error=multiples(0.1, 0.2, 0.3),
)


def test_reuse_report_has_hit_rates_and_spread():
    report = ReuseReport.of(REUSE)
    assert (report.hits, report.fetched, report.hit_rate) == ({"dram": 0.25, "disk": 0.05}, 0.1, 0.4)
    assert (report.largest_share, REUSE.spread, report.hottest) == (0.75, 0.75, [(40, 4), (20, 2)])
    assert dict(reuse_lines(REUSE)) == {
        "Prefix hit rate": "40.0%: 25.0% in dram, 5.0% in disk, 10.0% from other caches",
        "Prompt tokens reused": "40,000 (40.0%)",
        "Largest instance share of prompts": "75.0% (2 instances)",
        "Caches with the hottest blocks": "3.0 of 4",
        "TTFT prediction error": "20.0% (median)",
    }


def test_where_nothing_was_reused_it_says_so():
    """Without reuse, the hit rate is 0.0%."""
    none = msgspec.structs.replace(
        REUSE, blocks=0, hits={"dram": 0}, fetched=0, prompt_tokens=0, reused_tokens=0,
        requests={"prefill-0": 0}, hottest=(), ttft_error=None,
    )  # fmt: skip
    assert (none.hit_rate, none.largest_share, none.spread) == (0.0, 0.0, 0.0)
    assert dict(reuse_lines(none))["Prefix hit rate"] == "0.0%: 0.0% in dram, 0.0% from other caches"
    assert "TTFT prediction error" not in dict(reuse_lines(none))


def test_json_has_it_where_there_are_caches():
    """The JSON has a `reuse` section only if there are prefix caches."""
    given = {"workload": {}, "seed": 0}
    assert "reuse" not in msgspec.json.decode(SimulationReport.of(result(), **given).json())
    read = msgspec.json.decode(SimulationReport.of(result(reuse=REUSE), **given).json())
    assert read["reuse"]["requests"] == {"prefill-0": 30, "prefill-1": 10}
    assert read["reuse"]["ttft_error"]["count"] == 3
