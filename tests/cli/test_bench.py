"""Tests of `twofold bench`."""

import json
import signal
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

from support.scripted_endpoint import Hang, Refuse, Send, chunk, endpoint, well_behaved
from twofold.cli.bench import bench
from twofold.errors import ConfigurationError, UserError

PROGRAM = "import typer; from twofold.cli.bench import bench; typer.run(bench)"


@pytest.fixture
def trace(tmp_path):
    """Return an Azure-format trace of twelve requests that arrive ten milliseconds apart."""
    lines = [f"2023-11-16 18:15:46.{n * 10:03d}0000,{20 + n},{2 + n % 3}" for n in range(12)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    return path


def run(*arguments: object):
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_run_prints_a_table_and_writes_a_report(trace, tmp_path):
    report_path = tmp_path / "report.json"
    with endpoint() as scripted:
        result = run(
            *("--base-url", scripted.url, "--workload", trace, "--output", report_path, "--per-request"),
            *("--slo", "ttft=3600s,tpot=3600s", "--warmup", 1, "--api-key", "secret"),
        )
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.stdout
    assert "Goodput" in result.stdout
    report = json.loads(report_path.read_text())
    assert report["summary"]["completed"] == report["summary"]["sent"] == 12
    assert report["summary"]["output_tokens"] == sum(2 + n % 3 for n in range(12))
    assert report["summary"]["slo_attainment"] == 1.0
    assert report["config"]["endpoint"]["model"] == "scripted"
    assert [line["prompt_tokens"] for line in report["requests"]] == [20 + n for n in range(12)]
    assert "secret" not in report_path.read_text() + result.output


def test_vllm_names_of_options_are_understood(trace):
    with endpoint() as scripted:
        result = run(
            *("--base-url", scripted.url, "--workload", trace, "--num-prompts", 5, "--request-rate", 200),
            *("--arrival", "poisson", "--burstiness", 1, "--seed", 1, "--max-concurrency", 2),
        )
    assert result.exit_code == 0, result.output
    assert len(scripted.bodies) == 5


def test_text_prompts(trace):
    """With `--prompt-form text`, each prompt has one word per token."""
    with endpoint() as scripted:
        result = run("--base-url", scripted.url, "--workload", trace, "--num-requests", 2, "--prompt-form", "text")
    assert result.exit_code == 0, result.output
    assert sorted(len(str(body["prompt"]).split()) for body in scripted.bodies) == [20, 21]


def test_named_workloads_fit_the_model():
    """Requests of a named workload are shortened to the model's context length."""
    with endpoint(models=[{"id": "scripted", "max_model_len": 64}]) as scripted:
        result = run("--base-url", scripted.url, "--workload", "azure-conv", "--num-requests", 1)
    assert result.exit_code == 0, result.output
    (body,) = scripted.bodies
    assert len(body["prompt"]) + body["max_tokens"] <= 64


def test_some_failures_are_shown_and_do_not_fail_the_run(trace):
    """If some requests fail, the exit code is still 0."""

    def script(body):
        return [Refuse(429)] if len(body["prompt"]) == 25 else well_behaved(body)

    with endpoint(script) as scripted:
        result = run("--base-url", scripted.url, "--workload", trace)
    assert result.exit_code == 0, result.output
    assert "HTTP 429" in result.stdout
    assert "refused by the script" in result.stderr


def test_a_run_in_which_everything_fails_exits_1(trace):
    """`twofold bench` exits with 1 if no request completes."""
    with endpoint(lambda _: [Refuse(503)]) as scripted:
        result = run("--base-url", scripted.url, "--workload", trace)
    assert result.exit_code == 1
    assert "HTTP 503" in result.stdout


def test_mistakes_are_one_sentence(trace, tmp_path):
    """Invalid arguments raise a `UserError` with the reason."""
    with endpoint() as scripted:
        base = ("--base-url", scripted.url, "--workload", trace)
        for wrong, said in (
            (("--model", "other"), "other"),
            (("--workload", "no-such-workload"), "no-such-workload"),
            (("--prompt-form", "verse"), "verse"),
            (("--slo", "ttft=never"), "ttft=never"),
            (("--output", tmp_path / "nowhere" / "report.json"), "nowhere"),
            (("--base-url", "localhost"), "localhost"),
        ):
            error = run(*base, *wrong).exception
            assert isinstance(error, UserError)
            assert said in str(error)
            assert "\n" not in str(error)
    assert scripted.bodies == []


def test_an_endpoint_that_is_not_there(trace):
    """The error contains the URL of the unreachable endpoint."""
    with endpoint() as scripted:
        pass
    error = run("--base-url", scripted.url, "--workload", trace).exception
    assert isinstance(error, ConfigurationError)
    assert scripted.url in str(error)


def test_interrupting_prints_what_was_measured(trace, tmp_path):
    """After Ctrl-C, the report contains the completed requests."""

    def script(body):
        return well_behaved(body) if len(body["prompt"]) < 26 else [Send(chunk()), Hang()]

    report_path = tmp_path / "report.json"
    with endpoint(script) as scripted:
        command = [sys.executable, "-c", PROGRAM, "--base-url", scripted.url, "--workload", str(trace)]
        # Seven requests run at once, and six of the twelve hang: once all are sent, at least five have completed.
        command += ["--max-concurrency", "7", "--output", str(report_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while len(scripted.bodies) < 12 and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    assert "Unfinished" in stdout
    assert "interrupted" in stderr
    summary = json.loads(report_path.read_text())["summary"]
    assert (summary["failed"], summary["completed"] + summary["unfinished"]) == (0, 12)
    assert 5 <= summary["completed"] <= 6


def test_a_closed_loop_ignores_arrival_times(trace):
    with endpoint() as scripted:
        result = run(
            "--base-url", scripted.url, "--workload", trace, "--concurrency", 2, "--think-time", 0.01, "--json"
        )
        refused = run("--base-url", scripted.url, "--workload", trace, "--concurrency", 2, "--duration", 1)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["summary"]["completed"] == 12
    assert (report["config"]["concurrency"], report["config"]["think_s"]) == (2, 0.01)
    assert "give --num-requests" in str(refused.exception)
