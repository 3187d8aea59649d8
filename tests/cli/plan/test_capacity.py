"""Tests of `twofold plan --kv-capacity`."""

from html import escape

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from support.traces import ask, public_trace
from twofold.cli.plan.command import plan
from twofold.errors import UserError
from twofold.workload.trace import FORMATS, write_trace

app = typer.Typer()
app.command()(plan)

FLAGS = ("--model", "llama2-70b", "--kv-capacity", "--machines", "a100")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(word) for word in arguments], env={"COLUMNS": "200"})


def planned(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return msgspec.json.decode(result.stdout)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Return the path of a trace in which each of ten long documents is the prefix of ten prompts."""
    path = tmp_path_factory.mktemp("traces") / "documents.jsonl"
    requests = [
        ask(n, n * 0.5, 17 * 512, 20, prefix_blocks=[*range(100 * (n % 10), 100 * (n % 10) + 16), 10_000 + n])
        for n in range(100)
    ]
    write_trace(requests, path, FORMATS["mooncake"])
    return path


def test_tables_have_hits_savings_and_prices(trace):
    shown = invoke(trace, *FLAGS, "--nodes", 2).stdout
    for words in (
        "DRAM, 2 nodes",
        "NVMe behind",
        "local: hit rate",
        "pool: hit rate",
        "accelerators freed",
        "s/h per added GB",
        "return",
        "pays up to",
        "are repeated",
        "the hits",
    ):
        assert words in shown, words


def test_the_whole_working_set_is_found_where_it_fits(trace):
    """A large enough shared cache has the highest possible hit rate."""
    report = planned(trace, *FLAGS, "--nodes", 2)
    pool = report["tiers"][0]["pool"]
    assert report["highest_reuse"] == pytest.approx(0.9 * 16 / 17)
    assert pool["points"][-1]["point"]["hit_rate"] == pytest.approx(0.9 * 16 / 17)
    # Between two uses of a document are those of nine others, each with a block that is never used again.
    assert pool["full_gb_per_node"] == pytest.approx(170 * report["block_bytes"] / 1e9 / 2)
    assert [tier["tier"] for tier in report["tiers"]] == ["dram", "nvme"]


def test_one_node_has_no_pool(trace):
    """With `--nodes 1`, the report omits the cache shared by all nodes."""
    report = planned(trace, *FLAGS, "--nodes", 1)
    assert all(tier["pool"] is None for tier in report["tiers"])
    assert "local: hit rate" in invoke(trace, *FLAGS, "--nodes", 1).stdout


def test_the_page_has_the_verdict_then_charts_then_tables(trace, tmp_path):
    page = tmp_path / "page.html"
    report = planned(trace, *FLAGS, "--nodes", 2, "--html", page)
    text = page.read_text()
    places = [text.index(each) for each in (escape(report["text"]), 'id="dram"', 'id="nvme"', "<table>")]
    assert places == sorted(places)
    for tier in report["tiers"]:
        best = tier["pool"]["best"]
        assert f'"x":[{best["gb_per_node"]}],"y":[{100 * best["hit_rate"]}]' in text
    assert len(text) < 2_000_000


def test_prices_decide_what_pays(trace):
    """DRAM pays off with `--dram-price 0`, but not with `--dram-price 100`."""
    free, gold = (planned(trace, *FLAGS, "--nodes", 2, "--dram-price", price) for price in (0, 100))
    for report, expected in ((free, True), (gold, False)):
        best = report["tiers"][0]["pool"]["best"]
        assert (best["gb_per_node"] > 0) is expected
    assert "DRAM does not pay" in gold["text"]
    assert free["tiers"][0]["pool"]["points"][-1]["added"]["returns"] is None


def test_dram_in_front_of_the_disk(trace):
    """The flag `--dram-gb` sets the size of the DRAM tier above the NVMe tier."""
    report = planned(trace, *FLAGS, "--nodes", 2, "--dram-gb", 5)
    assert [tier["behind_gb"] for tier in report["tiers"]] == [0.0, 5.0]


def test_hit_rates_of_the_mooncake_conversation_trace():
    """Larger caches and shared caches never have lower hit rates."""
    report = planned(public_trace("mooncake-conversation.jsonl"), *FLAGS, "--nodes", 8)
    dram = report["tiers"][0]
    assert report["blocks"] == 288_500
    assert report["highest_reuse"] == pytest.approx(0.3664, abs=5e-5)
    for arrangement in ("local", "pool"):
        rates = [each["point"]["hit_rate"] for each in dram[arrangement]["points"]]
        assert rates == sorted(rates)
        assert rates[-1] <= report["highest_reuse"] + 1e-9
    for local, pool in zip(dram["local"]["points"], dram["pool"]["points"], strict=True):
        assert pool["point"]["hit_rate"] >= local["point"]["hit_rate"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("azure-conv", *FLAGS), "is generated without"),
        (("TRACE", "--model", "llama2-70b", "--kv-capacity"), "needs one kind of machine"),
        (("TRACE", *FLAGS[:-1], "a100,h100"), "needs one kind of machine"),
        (("TRACE", *FLAGS, "--dram-price", "-1"), "--dram-price -1 is out of range"),
        (("TRACE", *FLAGS, "--dram-gb", "-1"), "--dram-gb -1 is out of range"),
        (("TRACE", *FLAGS, "--output", "plan.yaml"), "leave out --output"),
        (("TRACE", *FLAGS, "--tp", 1), "needs 138 GB for weights"),
        (("TRACE", "--model", "llama2-70b", "--max-machines", 4, "--nodes", 4), "--nodes needs --kv-capacity"),
    ],
)
def test_mistakes_are_one_sentence(trace, words, message):
    """Invalid arguments raise a `UserError` with the reason."""
    error = invoke(*(trace if word == "TRACE" else word for word in words)).exception
    assert isinstance(error, UserError)
    assert message in str(error)
