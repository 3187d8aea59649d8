"""The fault suite on a split service whose decode workers are killed."""

import json
import subprocess
import sys

import typer
from typer.testing import CliRunner

from support.flags import ENGINE
from support.forked_service import forked_process
from support.running_service import named
from twofold.cli.torture import torture

SPLIT = ("--prefill", "1", "--decode", "2", "--max-restart-delay", "1")


def run(*arguments):
    app = typer.Typer()
    app.command()(torture)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_answers_survive_killed_decode_workers(tiny_model_dir, tmp_path):
    with forked_process(tiny_model_dir("llama"), *ENGINE, *SPLIT) as process:
        fork_server = named(process, "decode.*")[0].ppid()
        result = run(
            *(process.url, "--json", tmp_path / "report.json", "--html", tmp_path / "report.html"),
            *("--kill", f"decode=kill -9 $(pgrep -P {fork_server} ^decode | head -n 1)", "--every", 2),
            *("--duration", 6, "--concurrency", 6, "--num-prompts", 8, "--max-prompt-tokens", 200),
            *("--longest-prompt", 300, "--hang", 300, "--settle", 300),
        )
        assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [fault["name"] for fault in report["faults"]] == ["decode", "decode"]
    assert any(fault["error"] is None for fault in report["faults"])
    assert (report["violations"], report["leaks"], report["failures"]) == ([], [], [])
    assert report["compares_tokens"]
    assert report["unreproducible"] == 0
    assert report["compared"] > 8
    assert report["idle_prefills"] == []
    assert report["before"]["longest_prompt"] == report["after"]["longest_prompt"] == 300
    assert "no failure" in (tmp_path / "report.html").read_text()


def test_an_interrupted_load_ends_with_a_report(tiny_model_dir, tmp_path):
    with forked_process(tiny_model_dir("llama"), *ENGINE, *SPLIT) as process:
        command = [sys.executable, "-m", "twofold.cli.main", "torture", process.url, "--json", tmp_path / "report.json"]
        command += ["--kill", f"once=kill -INT $(cat {tmp_path / 'pid'})", "--every", 2, "--duration", 3600]
        command += ["--concurrency", 2, "--num-prompts", 4, "--max-prompt-tokens", 50, "--longest-prompt", 60]
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as torturing:
            (tmp_path / "pid").write_text(str(torturing.pid))
            said = torturing.communicate()[0]
        assert torturing.returncode == 130, said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["duration_s"] < 1800
    assert report["compared"] > 0
    assert report["after"]["longest_prompt"] == 60
