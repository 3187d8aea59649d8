"""Tests of `twofold simulate --overload`."""

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from twofold.cli.simulate.command import simulate
from twofold.errors import ConfigurationError

app = typer.Typer()
app.command()(simulate)
RUN = (
    *("azure-conv", "--rate", 30, "--duration", 10, "--cluster", "1xh100:prefill,1xh100:decode"),
    *("--model", "llama2-70b", "--router", "jsq"),
)
SLO = ("--slo", "ttft=1,tpot=0.05")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def test_refusals_are_in_the_json_and_nowhere_without_the_flag():
    """With `--overload`, the JSON report counts rejected requests."""
    report = msgspec.json.decode(invoke(*RUN, *SLO, "--overload", "early", "--json").stdout)
    overload = report["overload"]
    assert overload["rule"] == "early"
    assert sum(overload["refusals"].values()) == report["counts"]["rejected"] > 0
    assert -1.0 <= overload["load_correlation"] <= 1.0
    assert {"load/prefill", "load/decode"} <= report["series"].keys()
    assert "overload" not in msgspec.json.decode(invoke(*RUN, *SLO, "--json").stdout)


def test_refusals_are_printed():
    """With `--overload`, the table shows rejected requests."""
    shown = invoke(*RUN, *SLO, "--overload", "baseline").stdout
    assert "Overload control" in shown
    assert "Wasted prefill" in shown
    assert "correlation" in shown


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--overload", "early"), "needs both bounds"),
        (("--overload", "early", "--slo", "splitwise"), "needs both bounds"),
        (("--overload", "late", *SLO), "--overload 'late' is unknown"),
    ],
)
def test_mistakes_are_one_sentence(flags, reason):
    """Invalid arguments raise a `UserError` with the reason."""
    error = invoke(*RUN, *flags).exception
    assert isinstance(error, ConfigurationError)
    assert reason in str(error)
