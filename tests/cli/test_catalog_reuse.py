"""Tests of `twofold catalog reuse`: bandwidths above which loading a prefix is faster than computing it."""

import json

import pytest
from typer.testing import CliRunner

from twofold.cli.catalog import app
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("TWOFOLD_CATALOG", raising=False)


def run(*arguments):
    return CliRunner().invoke(app, ["reuse", *map(str, arguments)])


def test_the_published_figure_is_shown():
    """`twofold catalog reuse` shows the Mooncake paper's example: 8,192 tokens of LLaMA-70B on 8 A800."""
    shown = run().stdout
    catalog = load_catalog()
    for name in (*catalog.machines, *catalog.links, "its network", "its dram", "its nvme"):
        assert name in shown, name


def test_json_has_each_machine():
    facts = json.loads(run("a100", "h100", "--performance", "roofline", "--json").stdout)
    assert list(facts) == ["dgx-a100", "dgx-h100"]
    a100, h100 = facts.values()
    assert a100["peak"] == pytest.approx(5.1e9, rel=0.02)
    assert 1e9 < a100["predicted"] < a100["peak"]
    assert h100["predicted"] > a100["predicted"]
    shortest = a100["shortest"]
    assert shortest["infiniband-ndr"] == 1 < shortest["ethernet-25g"] < shortest["ethernet-10g"]


def test_an_instance_of_some_accelerators():
    """With TP 4, half the bandwidth of TP 8 is enough to load a prefix as fast as computing the prefix."""
    whole, half = (
        json.loads(run("a100", "--performance", "roofline", "--tp", degree, "--json").stdout) for degree in (8, 4)
    )
    assert half["dgx-a100"]["peak"] == pytest.approx(whole["dgx-a100"]["peak"] / 2)
    assert half["dgx-a100"]["accelerators"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("h10",), "did you mean h100?"),
        (("--model", "llama"), "unknown model"),
        (("--performance", "guess"), "--performance 'guess' is unknown"),
        (("a100", "--tp", 16), "has 8 accelerators"),
        (("--tp", 16), "no machine has 16 accelerators"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words):
    """Invalid arguments raise a `UserError` with the reason."""
    error = run(*arguments).exception
    assert isinstance(error, ConfigurationError)
    assert words in str(error)
