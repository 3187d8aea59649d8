"""Tests of `twofold plan`."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest
import typer
from msgspec.structs import replace
from typer.testing import CliRunner

from support.plans import read_deployment, stored_evaluations
from support.traces import ask
from twofold.cli.plan.command import plan
from twofold.errors import UserError
from twofold.workload.trace import FORMATS, write_trace

app = typer.Typer()
app.command()(plan)

MODEL = ("--model", "bloom-176b")
SMALL = (
    "azure-conv",
    *MODEL,
    "--family",
    "HH",
    "--duration",
    20,
    "--max-machines",
    4,
    "--draws",
    2,
    "--confidence",
    0.6,
)


@pytest.fixture(scope="module")
def invoke(tmp_path_factory):
    """Return a function that runs `twofold plan`."""
    shared = tmp_path_factory.mktemp("store") / "plan.sqlite"

    def run(*arguments):
        where = () if "--store" in arguments else ("--store", shared)
        words = [str(argument) for argument in (*arguments, *where)]
        return CliRunner().invoke(app, words, env={"COLUMNS": "140"})

    return run


@pytest.fixture(scope="module")
def planned(invoke):
    def run(*arguments):
        result = invoke(*arguments, "--json")
        assert result.exit_code == 0, result.exception
        return msgspec.json.decode(result.stdout)

    return run


@pytest.fixture(scope="module")
def fresh(planned, tmp_path_factory):
    """Return a plan computed with an empty evaluation cache, and the path of the cache."""
    store = tmp_path_factory.mktemp("fresh") / "plan.sqlite"
    return planned(*SMALL, "--jobs", 1, "--store", store), store


def test_the_plan_does_not_depend_on_the_number_of_jobs(fresh, planned, tmp_path):
    """Plans with `--jobs 1` and `--jobs 3` are equal except for the reported simulation speed."""
    reports = [dict(fresh[0]), planned(*SMALL, "--jobs", 3, "--store", tmp_path / "plan.sqlite")]
    efforts = [report.pop("effort") for report in reports]
    assert reports[0] == reports[1]
    assert efforts[0]["simulations"] == efforts[1]["simulations"] > 10
    assert efforts[0]["requests_per_cpu_s"] > 0
    names = {choice["design"]["family"] for choice in reports[0]["choices"]}
    assert names >= {"h100+h100", "h100 mixed", "h100 chunked-prefill@512"}


def test_a_second_run_reuses_all(fresh, planned):
    """A second run with the same store simulates nothing."""
    first, second = dict(fresh[0]), planned(*SMALL, "--store", fresh[1])
    effort = second.pop("effort")
    assert (effort["simulations"], effort["reused"]) == (0, first.pop("effort")["simulations"])
    assert first == second


def test_tables_have_designs_margins_and_verdict(invoke):
    shown = " ".join(invoke(*SMALL, "--slo", "ttft=1,tpot=0.06").stdout.split())
    for words in (
        "h100@TP8 prefill",
        "chunked-prefill",
        "draws that the search did not use",
        "off by",
        "Margins",
        "Pareto front",
        "plit",
        "CPU second",
    ):
        assert words in shown, words


def test_cost_at_a_rate_and_its_files(planned, tmp_path):
    """With `--objective cost`, the cheapest design is listed first."""
    deployment, page = tmp_path / "deployment.yaml", tmp_path / "plan.html"
    report = planned(
        *(
            "azure-conv",
            *MODEL,
            "--family",
            "HH",
            "--duration",
            20,
            "--objective",
            "cost",
            "--rate",
            6,
            "--draws",
            4,
            "--confidence",
            0.8,
        ),
        *("--output", deployment, "--html", page),
    )
    best = report["choices"][0]
    assert best["rate"] == 6.0 <= best["highest_rate"]
    assert best["design"]["price_per_h"] == min(each["design"]["price_per_h"] for each in report["choices"])
    read = read_deployment(deployment)
    assert msgspec.to_builtins(read.cluster.pools)[0]["machines"] == best["design"]["machines"][0][1]
    assert read.expected.rate == 6.0
    assert (read.expected.draws, read.expected.draws_kept) == (4, 4)
    assert 'id="curves"' in page.read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".part")]


def test_a_trace_can_be_planned_for(planned, tmp_path):
    trace, deployment = tmp_path / "trace.jsonl", tmp_path / "deployment.yaml"
    write_trace([ask(n, n * 0.1, 500 + n, 20) for n in range(400)], trace, FORMATS["twofold"])
    planned(
        *(trace, *MODEL, "--family", "HH", "--no-colocated", "--max-machines", 2, "--slo", "ttft=2,tpot=0.1"),
        *("--output", deployment, "--draws", 2, "--confidence", 0.6),
    )
    assert len(read_deployment(deployment).provenance.trace_sha256) == 64


def test_caches_raise_the_rate_of_prompts_with_shared_beginnings(planned, tmp_path):
    trace, deployment = tmp_path / "shared.jsonl", tmp_path / "deployment.yaml"
    asked = [replace(ask(n, n * 0.1, 3600, 20), prefix_blocks=(1, 2, 3, 4, 5, 6, 100 + n)) for n in range(400)]
    write_trace(asked, trace, FORMATS["twofold"])
    flags = (trace, *MODEL, "--family", "HH", "--max-machines", 2, "--slo", "ttft=2s,tpot=200ms", "--draws", 0)
    cache = ("--kv-cache", "100000 tokens", "--output", deployment)
    without, cached = (max(each["rate"] for each in planned(*flags, *more)["choices"]) for more in ((), cache))
    assert cached > 2 * without
    cluster = read_deployment(deployment).cluster
    assert cluster.kv_cache.dram == "100000 tokens"
    assert cluster.router == ("conductor" if len(cluster.pools) == 2 else "local-prefix")


def test_split_designs_have_the_better_router_and_batcher(planned, tmp_path):
    """Long prompts wait too long in the prefill queues of Splitwise's router, and whole they take longer per token."""
    code = (
        "azure-code",
        "--model",
        "llama2-70b",
        "--machines",
        "h100",
        "--tp",
        8,
        "--max-machines",
        3,
        "--no-colocated",
    )
    flags = (*code, "--slo", "ttft=1s,tpot=50ms", "--duration", 20, "--draws", 0, "--output", tmp_path / "plan.yaml")
    (searched,) = planned(*flags)["choices"]
    assert searched["design"]["name"].endswith("decode, jsq, chunked-prefill")
    assert read_deployment(tmp_path / "plan.yaml").cluster.router == "jsq"
    rates = {router: planned(*flags, "--router", router)["choices"][0]["rate"] for router in ("splitwise", "jsq")}
    assert rates["splitwise"] < rates["jsq"] == searched["rate"]


def test_an_unknown_price_is_left_out(invoke):
    result = invoke("azure-conv", *MODEL, "--machines", "b300", "--max-machines", 2, "--duration", 10, "--draws", 0)
    assert result.exit_code == 0, result.exception
    assert "$0.00" not in result.stdout


def test_machines_and_money_bound_the_plan(planned):
    """The best design respects `--max-machines`, `--max-cost` and `--max-power` at the same time."""
    report = planned(
        *("azure-conv", *MODEL, "--machines", "h100", "--no-colocated", "--duration", 10, "--draws", 0),
        *("--max-machines", "9,h100=6", "--max-cost", 200, "--max-power", 45),
    )
    (choice,) = report["choices"]
    assert sum(count for _, count in choice["design"]["machines"]) == 4


# Stops its own process after storing the third result, so that signals arrive in the middle of a plan.
STOPS_HALFWAY = """
import os, signal, typer
from twofold.cli.plan.command import plan
from twofold.planning.evaluator import EvaluationStore

put, stored = EvaluationStore.put, []
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored

def put_and_stop(store, *result):
    put(store, *result)
    stored.append(result)
    if len(stored) == 3:
        os.kill(os.getpid(), signal.SIGSTOP)

EvaluationStore.put = put_and_stop
app = typer.Typer()
app.command()(plan)
app()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_plan_is_taken_up(fresh, planned, tmp_path, how):
    """After SIGINT or SIGKILL, a second run completes the same plan."""
    whole, store = fresh[0], tmp_path / "plan.sqlite"
    words = [str(flag) for flag in (*SMALL, "--store", store, "--jobs", 1)]
    process = subprocess.Popen([sys.executable, "-c", STOPS_HALFWAY, *words], start_new_session=True)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    for each in (how, signal.SIGCONT):
        os.kill(process.pid, each)
    assert process.wait(600) != 0
    before = stored_evaluations(store)
    resumed = planned(*SMALL, "--store", store)
    assert resumed["effort"]["reused"] == before >= 3
    assert resumed["effort"]["simulations"] + before == whole["effort"]["simulations"]
    assert {**resumed, "effort": None} == {**whole, "effort": None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SMALL, "--slo", "ttft=0.001,tpot=0.06"), "nearly idle, has a TTFT P90 of"),
        ((*SMALL, "--slo", "fast"), "fast"),
        ((*SMALL, "--attainment", "90"), "--attainment 90 is out of range"),
        ((*SMALL, "--max-machines", "0"), "--max-machines must be more than 0"),
        ((*SMALL, "--max-machines", "few"), "few"),
        ((*SMALL, "--max-machines", "1", "--no-colocated"), "one machine per phase"),
        ((*SMALL, "--max-cost", "5"), "too small"),
        ((*SMALL, "--rate", "5"), "leave it out"),
        ((*SMALL, "--objective", "cost"), "needs --rate"),
        ((*SMALL, "--objective", "cost", "--rate", "-5"), "--rate -5"),
        ((*SMALL, "--objective", "cost", "--rate", "500"), "meets it up to"),
        ((*SMALL, "--objective", "speed"), "throughput, cost, power"),
        ((*SMALL, "--family", "h100+b400"), "b400"),
        ((*SMALL, "--model", "bloom-1"), "bloom-1"),
        ((*SMALL, "--reference", "abacus"), "abacus"),
        ((*SMALL, "--router", "nowhere"), "nowhere"),
        ((*SMALL, "--performance", "guess"), "guess"),
        ((*SMALL, "--tp", "1"), "use more accelerators"),
        ((*SMALL, "--tolerance", "0"), "--tolerance 0"),
        ((*SMALL, "--duration", "0"), "--duration must be more than 0"),
        ((*SMALL, "--output", "no/where/plan.yaml"), "no/where/plan.yaml"),
        ((*SMALL, "--ray", "auto", "--jobs", "2"), "--jobs"),
        ((*SMALL, "--output", "x", "--html", "x"), "--output and --html both write x"),
        ((*SMALL, "--output", "x.sqlite", "--store", "x.sqlite"), "--output x.sqlite is an input file"),
        ((*SMALL, "--max-machines", "a100=2,dgx-a100=3"), "gives dgx-a100 twice"),
        ((*SMALL, "--max-machines", "9" * 20), "--max-machines must be at most"),
        ((*SMALL, "--objective", "cost", "--rate", "1e300"), "--rate 1e+300 is out of range"),
        ((*SMALL, "--duration", "1e300"), "--duration 1e+300 is out of range"),
        ((*SMALL, "--length-scale", "1e300"), "--length-scale 1e+300 is out of range"),
        ((*SMALL, "--arrival", "gamma", "--burstiness", "1e-300"), "--burstiness 1e-300 is out of range"),
        (("azure-conv", *MODEL, "--machines", "b300", "--max-cost", "50"), "the price of dgx-b300 is unknown"),
        (("azure-cond", *SMALL[1:]), "did you mean azure-conv"),
        (("azure-conv", *MODEL), "needs a budget"),
        (("azure-conv", "--model", "deepseek-v3", "--machines", "a100", "--max-machines", "4"), "deepseek-v3 needs"),
    ],
)
def test_mistakes_are_one_sentence(invoke, arguments, words):
    """Invalid arguments raise a `UserError` with the reason."""
    error = invoke(*arguments).exception
    assert isinstance(error, UserError), repr(error)
    assert words in str(error)
    assert "\n" not in str(error)


def test_the_command_starts_light():
    """Importing `twofold plan` does not import plotly, numpy or sqlite3."""
    modules = ("plotly", "numpy", "sqlite3")
    code = f"import sys, twofold.cli.plan.command; print([m for m in {modules} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
