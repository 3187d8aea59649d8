"""Tests of `twofold catalog`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twofold.cli.catalog import app
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog

KINDS = ("accelerators", "machines", "models", "links", "tiers")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("TWOFOLD_CATALOG", raising=False)


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_is_shown(kind):
    table, sources = run(kind), run(kind, "--sources")
    for name, item in getattr(load_catalog(), kind).items():
        assert name in table
        assert name in sources
        assert item.source[:20] in sources


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_exact(kind):
    """The JSON contains every catalog entry with its source and date."""
    shown = json.loads(run(kind, "--json"))
    items = getattr(load_catalog(), kind)
    assert list(shown) == list(items)
    for name, facts in shown.items():
        assert facts["source"] == items[name].source
        assert facts["date"] == items[name].date


def test_json_has_derived_values():
    """The JSON includes the KV bytes per token of a model and the memory of a machine."""
    models = json.loads(run("models", "llama2-70b", "--json"))
    assert models["llama2-70b"]["kv_bytes_per_token"] == 327_680
    machines = json.loads(run("machines", "h100", "--json"))
    assert machines["dgx-h100"]["memory_bytes"] == 8 * 85_899_345_920
    assert machines["dgx-h100"]["accelerator"]["name"] == "h100-80gb"


def test_tables_have_units():
    """The tables show prices, power, bandwidths and sizes with their units."""
    machines, models = run("machines", "a100", "h100-pcap"), run("models", "bloom-176b")
    for expected in ("$17.60/h", "6,500 W", "200 GB/s", "8 × h100-80gb-pcap at 50% power", "7,140 W"):
        assert expected in machines
    assert "dgx-b200" not in machines
    for expected in ("176.2B", "329.0 GB", "4,014,080 B", "112/112"):
        assert expected in models


def test_own_files_and_directories(tmp_path):
    """`--catalog FILE` overrides catalog entries, and the path of a model directory is accepted as a model."""
    own = tmp_path / "own.toml"
    own.write_text("[machines.dgx-h100]\nprice_per_h = 12.5\n")
    assert "$12.50/h" in run("machines", "--catalog", own)
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}'
    )
    assert "36,864 B" in run("models", tmp_path)


def test_unknown_names_are_a_sentence():
    """The error for an unknown catalog name suggests the most similar name."""
    result = CliRunner().invoke(app, ["machines", "h10"])
    assert isinstance(result.exception, ConfigurationError)
    assert "did you mean h100?" in str(result.exception)


def test_a_full_disk_is_one_sentence():
    """If writing to stdout fails, the command prints a one-line error without a traceback."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "twofold.cli.main", "catalog", "machines"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["twofold: cannot write the output: No space left on device"]


def test_operators_are_listed():
    pytest.importorskip("aiconfigurator_core", reason="needs the extra aiconfigurator")
    facts = json.loads(run("operators", "--json"))
    assert facts["versions"]["h200"]["vllm"]
    assert facts["models"]["llama-3.1-70b"] == "meta-llama/Meta-Llama-3.1-70B"
    shown = run("operators")
    assert "Versions of engines with measured operators" in shown
    assert facts["versions"]["b200"]["sglang"] in shown


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "twofold.cli.main", "model", "get", "smollm2"]
    command += ["--directory", str(tmp_path / "file" / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"twofold: {tmp_path / 'file'}: File exists"]
