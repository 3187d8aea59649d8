"""Tests of `twofold simulate --replan`."""

import random

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from twofold.cli.simulate.command import simulate
from twofold.errors import ConfigurationError
from twofold.request import Request
from twofold.workload.trace import FORMATS, write_trace

app = typer.Typer()
app.command()(simulate)
CLUSTER = ("--cluster", "3xh100:prefill,1xh100:decode", "--model", "llama2-70b", "--router", "jsq-planned")
SLO = ("--slo", "ttft=1,tpot=0.05")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Return a trace with long prompts in the first 90 s and long outputs afterwards."""
    draw, now, requests = random.Random(0), 0.0, []
    while (now := now + draw.expovariate(8.0 if now < 90 else 14.0)) < 150.0:
        mean = (1500, 40) if now < 90 else (400, 200)
        prompt, output = (round(draw.gammavariate(2, each / 2)) + 1 for each in mean)
        requests.append(Request(id=str(len(requests)), arrival_s=now, prompt_tokens=prompt, output_tokens=output))
    path = tmp_path_factory.mktemp("traces") / "step.jsonl"
    write_trace(requests, path, FORMATS["twofold"])
    return path


def test_the_log_is_in_the_json_and_nowhere_without_the_flag(step):
    """With `--replan`, the JSON report contains the re-planning decisions."""
    report = msgspec.json.decode(invoke(step, *CLUSTER, *SLO, "--replan", "--json").stdout)
    (entry,) = report["replanning"]
    assert entry["decision"]["outcome"] == "move"
    assert [one["action"] for one in entry["decision"]["steps"]] == ["role"] * len(entry["decision"]["steps"])
    assert "running" in entry["text"]
    assert "replanning" not in msgspec.json.decode(invoke(step, *CLUSTER, *SLO, "--json").stdout)


def test_the_log_is_printed(step):
    """With `--replan`, the output lists the re-planning decisions."""
    shown = invoke(step, *CLUSTER, *SLO, "--replan", "--search-time", 1).stdout
    assert "Re-planning" in shown
    assert "becomes decode" in shown
    quiet = invoke("azure-conv", "--rate", 2, "--duration", 30, *CLUSTER, *SLO, "--replan").stdout
    assert "no change of traffic detected" in quiet


def test_spare_machines_are_pools_of_their_own(step):
    """`--spare 2` adds a pool of two idle machines."""
    report = msgspec.json.decode(invoke(step, *CLUSTER, *SLO, "--replan", "--spare", 2, "--json").stdout)
    assert [pool["machines"] for pool in report["pools"]] == [3, 1, 2]
    assert report["replanning"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--replan",), "--replan needs an SLO in seconds"),
        (("--replan", "--slo", "splitwise"), "--replan needs an SLO in seconds"),
        (("--replan", *SLO, "--router", "jsq"), "never moves an instance"),
        (("--spare", 1), "--spare 1 needs --replan"),
        (("--replan", *SLO, "--search-time", -1), "--search-time -1 is out of range"),
        (("--replan", *SLO, "--min-gain", 2), "--min-gain 2 is out of range"),
        (("--replan", *SLO, "--min-between", "nan"), "--min-between nan is out of range"),
    ],
)
def test_mistakes_are_one_sentence(flags, says):
    """Invalid flags raise a `UserError` with the reason."""
    result = invoke("azure-conv", "--rate", 2, "--duration", 5, *CLUSTER, *flags)
    assert isinstance(result.exception, ConfigurationError)
    assert says in str(result.exception)
