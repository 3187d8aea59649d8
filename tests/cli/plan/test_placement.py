"""Tests of `twofold plan --objective goodput`."""

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from support.plans import read_deployment
from twofold.cli.plan.command import plan
from twofold.errors import UserError
from twofold.instance import Role

app = typer.Typer()
app.command()(plan)

# The example of DistServe's own search: one node of four A100s, OPT-13B, SLO of 200 and 100 ms.
NODE = (
    *("distserve-chat", "--model", "opt-13b", "--performance", "distserve-published", "--objective", "goodput"),
    *("--slo", "ttft=0.2,tpot=0.1", "--duration", 1, "--max-model-len", 2048),
    *("--draws", 0),
)
ROUGH = ("--tolerance", 0.1, "--min-requests", 200, "--max-pipeline", 2)
FOUR = (*NODE, "--machines", "a100", "--max-gpus", 4)


@pytest.fixture(scope="module")
def invoke(tmp_path_factory):
    """Return a function that runs `twofold plan`."""
    shared = tmp_path_factory.mktemp("store") / "plan.sqlite"

    def run(*arguments):
        words = [str(argument) for argument in (*arguments, "--store", shared)]
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return run


@pytest.fixture(scope="module")
def planned(invoke):
    def run(*arguments):
        result = invoke(*arguments, "--json")
        assert result.exit_code == 0, result.exception
        return msgspec.json.decode(result.stdout)

    return run


def degrees(placed):
    return [(pool["tensor_parallel"], pool.get("pipeline_parallel", 1)) for pool in placed["cluster"]["pools"]]


def test_one_node_of_four_has_prefill_on_two_and_decode_on_one(planned):
    """On four A100s of a node, the best placement is prefill TP2 and decode TP1, as in DistServe's simulator."""
    report = planned(*FOUR, "--tolerance", 0.05, "--max-pipeline", 1)
    assert degrees(report["best"]) == [(2, 1), (1, 1)]
    assert report["best"]["accelerators"] == 3
    assert report["effort"]["simulations"] > 20


def test_output_has_draws_and_comparisons(invoke):
    shown = " ".join(invoke(*FOUR, *ROUGH, "--draws", 3, "--confidence", 0.7).stdout.split())
    for words in (
        "Goodput of one instance",
        "a100@TP2",
        "In 3 of 3 draws that the search did not use, ",
        "× the best colocated design",
        "Algorithm",
        "tokens on 2 accelerators is lowest with tensor parallelism (TP2)",
    ):
        assert words in shown


def test_tighter_slo_bounds_lower_goodput(planned):
    """Halving the bounds of TTFT and TPOT does not increase the goodput."""
    tight, loose = (
        planned(*FOUR, *ROUGH, "--slo", slo)["best"]["per_accelerator"]
        for slo in ("ttft=0.2,tpot=0.1", "ttft=0.4,tpot=0.2")
    )
    assert loose >= tight


def test_a_rate_gives_a_deployment_file(planned, tmp_path):
    file = tmp_path / "placed.yaml"
    report = planned(*NODE, *ROUGH, "--machines", "a100", "--max-gpus", 16, "--rate", 6, "--output", file)
    cluster = read_deployment(file).cluster
    placed = sum(pool.instances * pool.tensor_parallel * pool.pipeline_parallel for pool in cluster.pools)
    assert placed == report["recommended"]["accelerators"] <= 16
    assert report["best"]["rate"] == 6


def test_a_colocated_design_is_recommended_if_splitting_does_not_pay(planned, tmp_path):
    """With loose bounds, a colocated design has more goodput per accelerator: it is recommended first."""
    file, page = tmp_path / "placed.yaml", tmp_path / "placed.html"
    report = planned(
        *("512+64", "--model", "llama-3.1-8b", "--objective", "goodput", "--slo", "ttft=3s,tpot=200ms"),
        *("--machines", "h100", "--max-gpus", 4, "--duration", 1, "--output", file, "--html", page, *ROUGH),
    )
    best, recommended = report["best"], report["recommended"]
    assert best["split"]
    assert not recommended["split"]
    assert recommended["per_accelerator"] > best["per_accelerator"]
    assert report["text"].startswith(f"Do not split: {recommended['name']} has ")
    assert {pool.role for pool in read_deployment(file).cluster.pools} == {Role.MIXED}
    shown = page.read_text()
    places = [shown.index(part) for part in ("Do not split:", 'id="goodput"', 'id="instances"', "<table>")]
    assert places == sorted(places)


def test_a_slow_network_keeps_phases_together(planned):
    """With slow links, prefill and decode share nodes."""
    report = planned(*NODE, *ROUGH, "--machines", "a100", "--max-gpus", 16, "--link-gb-per-s", 0.2, "--rate", 20)
    assert report["algorithm"] == "Algorithm 2"
    best = report["best"]
    assert {pool["nodes"] for pool in best["cluster"]["pools"]} == {"shared"}
    assert best["copies"] * best["rate"] >= 20


def test_unlike_accelerators_are_divided_between_the_phases(invoke, planned):
    """With two A100s and two H100s, the best placement uses both kinds of accelerators."""
    report = planned(
        *("512+64", "--model", "llama-3.1-8b", "--objective", "goodput", "--slo", "ttft=0.3,tpot=0.02"),
        *("--max-gpus", "a100=2,h100=2", "--duration", 1, *ROUGH),
    )
    machines = {pool["machine"] for pool in report["best"]["cluster"]["pools"]}
    assert machines == {"dgx-a100", "dgx-h100"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--max-gpus", 4), "needs one kind of machine"),
        (("--machines", "a100"), "needs --max-gpus"),
        (("--machines", "a100", "--max-gpus", "many"), "not understood"),
        (("--machines", "a100", "--max-gpus", 1), "need 2 at least"),
        (("--machines", "a100", "--max-gpus", 4, "--affinity", "some"), "auto, high, low"),
        (("--machines", "a100", "--max-gpus", 4, "--slo", "ttft=1"), "TTFT and TPOT"),
        (("--machines", "a100", "--max-gpus", 4, "--slo", "ttft=0.001,tpot=0.1"), "TTFT bound"),
        (("--max-gpus", "a100=4,h100=4", "--rate", 3), "leave out --rate"),
        (("--objective", "cost", "--rate", 3, "--max-gpus", 4), "--max-machines"),
    ],
)
def test_mistakes_are_one_sentence(invoke, more, words):
    """Invalid arguments raise a `UserError` with the reason."""
    error = invoke(*NODE, *ROUGH, *more).exception
    assert isinstance(error, UserError)
    assert words in str(error)
