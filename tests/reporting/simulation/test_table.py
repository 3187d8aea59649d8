"""Terminal tables of simulations."""

from io import StringIO

import pytest
from rich.console import Console

from support.simulated import ESTIMATED, FITTED, histogram, pool, result
from twofold.performance.cost import ModelAccuracy
from twofold.reporting.simulation.statistics import accuracy, describe
from twofold.reporting.simulation.table import latency_rows, simulation_tables
from twofold.request import Phase
from twofold.simulation.result import verdict
from twofold.slo import SPLITWISE, Slo

BOTH = (Phase.PREFILL, Phase.DECODE)


def printed(*arguments):
    console = Console(width=200, record=True)
    with console.capture() as capture:
        console.print(simulation_tables(*arguments))
    return capture.get()


def test_tables_have_all_results():
    run = result()
    text = printed(run, "azure-code [70/s]", verdict(run, SPLITWISE))
    for expected in (
        "azure-code [70/s]",
        "TTFT slowdown",
        "1.50×",
        "0.33 requests/s",
        "2.000 kWh",
        "360.00 J",
        "24.0 kW mean",
        "30.6 kW",
        "$114.00 per hour",
        "$475.00",
        "90.00% of requests",
        "±10% prefill, ±2% decode: fitted to 19 measured points",
        "98.00%",
        "missed",
    ):
        assert expected in text


def test_every_latency_shows_its_model_error():
    errors = {label: error for label, _, error in latency_rows(result())}
    assert errors["TTFT"] == errors["TTFT slowdown"] == "±10%"
    assert errors["TPOT"] == errors["ITL"] == "±2%"
    assert errors["E2E"] == errors["Queue"] == "±10% prefill, ±2% decode"
    assert errors["KV transfer"] == ""


def test_missing_values_are_dashes():
    rows = {label: texts for label, texts, _ in latency_rows(result(transfer_s=histogram(), e2e_slowdown=None))}
    assert set(rows["KV transfer"]) == {"-"}
    assert "E2E slowdown" not in rows


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FITTED, "±10% prefill, ±2% decode: fitted to 19 measured points"),
        (ESTIMATED, "estimated (±25% prefill, ±20% decode on pairs that were measured): roofline"),
        (ModelAccuracy(prefill=None, decode=0.004, basis="b"), "±0.4% decode: b"),
        (ModelAccuracy(prefill=None, decode=None, basis="b"), "error unknown: b"),
        (ModelAccuracy(prefill=None, decode=None, basis="b", estimated=True), "estimated: b"),
    ],
)
def test_describes_performance_models(error, text):
    assert describe(error) == text


def test_accuracy_is_that_of_the_worst_pool():
    pools = (pool("prefill", 1), pool("mixed", 1, ESTIMATED), pool("decode", 1))
    assert accuracy(pools, BOTH) == "estimated, ±25% prefill, ±20% decode"
    assert accuracy((pool("prefill", 1), pool("decode", 1, ESTIMATED)), (Phase.PREFILL,)) == "±10%"
    unknown = ModelAccuracy(prefill=None, decode=None, basis="b")
    assert accuracy((pool("mixed", 1, unknown), pool("mixed", 1)), (Phase.PREFILL,)) == "error unknown"
    assert accuracy(pools, ()) == ""


def test_an_empty_run_has_no_rates():
    empty = result(arrived=0, completed=0, output_tokens=0, duration_s=0.0, arrival_s=0.0, cpu_s=0.0, slo_met=0)
    assert "requests/s" not in printed(empty, "t", verdict(empty, Slo(ttft_s=1.0)))


def test_a_mixed_pool_rests_on_both_phases():
    """For a mixed pool, the table shows the errors of predicted prefill times and predicted decode times."""
    assert accuracy((pool("mixed", 1),), (Phase.PREFILL,)) == "±10% prefill, ±2% decode"


def test_slowdowns_carry_the_error_of_their_reference():
    """A slowdown is marked as estimated if its reference latency is an estimate."""
    errors = {label: error for label, _, error in latency_rows(result(), ESTIMATED)}
    assert "estimated" in errors["TTFT slowdown"]
    assert "estimated" not in errors["TTFT"]


def test_a_narrow_terminal_cuts_nothing():
    console = Console(width=80, record=True, file=StringIO())
    console.print(simulation_tables(result(), "t"))
    text = console.export_text()
    assert "…" not in text
    assert "TPOT slowdown" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(line[-1] in "┓┃┩│┘" for line in text.splitlines() if line[:1] in "┏┃┡│└")
