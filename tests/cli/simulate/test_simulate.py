"""Tests of `twofold simulate`."""

import gc
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from support.traces import ask
from twofold.cli.simulate.command import simulate
from twofold.errors import UserError
from twofold.workload.trace import FORMATS, write_trace

app = typer.Typer()
app.command()(simulate)

SMALL = ("azure-conv", "--rate", 4, "--duration", 20, "--model", "bloom-176b")
CLUSTER = ("--cluster", "2xh100:prefill,1xh100:decode")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def run(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.exception
    return result


def simulated(*arguments):
    return msgspec.json.decode(run(*SMALL, *CLUSTER, "--json", *arguments).stdout)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_tables_show_latency_cost_and_verdict():
    shown = run(*SMALL, *CLUSTER, "--slo", "splitwise").stdout
    for expected in ("TTFT", "model error", "±", "requests/s", "kWh", "per hour", "utilization", "verdict"):
        assert expected in shown


def test_json_is_reproducible():
    """Equal seeds give equal reports except for CPU time."""
    first, again, other = simulated(), simulated(), simulated("--seed", 1)
    for report in (first, again, other):
        report.pop("cpu_s")
    assert first == again
    assert first["latencies_s"] != other["latencies_s"]
    assert (first["seed"], other["seed"], first["workload"]["rate"]) == (0, 1, 4.0)
    counts = first["counts"]
    ended = counts["completed"] + counts["rejected"] + counts["failed"] + counts["unfinished"]
    assert counts["arrived"] == ended > 0
    assert first["spec"]["model"] == "bloom-176b"
    assert 0 < first["slowdowns"]["ttft_slowdown"]["p50"] < 1, "an H100 is faster than the A100 of the reference"
    assert {pool["role"] for pool in first["pools"]} == {"prefill", "decode"}


def test_flags_reach_the_simulation():
    """A slower link lengthens hand-offs, and `--fail` adds a failure to the cluster spec."""
    quick, slow = (simulated("--handoff", "serialized"), simulated("--handoff", "serialized", "--link-gb-per-s", 1))
    assert slow["latencies_s"]["transfer_s"]["p50"] > 2 * quick["latencies_s"]["transfer_s"]["p50"]
    report = simulated("--fail", "decode-0@5+5")
    assert report["spec"]["failures"] == [{"instance": "decode-0", "at_s": 5.0, "back_s": 10.0}]


def test_an_slo_in_seconds_is_judged():
    verdict = simulated("--slo", "ttft=10,tpot=1", "--attainment", 0.5)["verdict"]
    assert verdict["met"]
    assert verdict["checks"][0]["bound"] == 0.5
    assert not simulated("--slo", "ttft=0.001")["verdict"]["met"]


def test_every_file_is_written(tmp_path):
    files = {
        "--html": "page.html",
        "--requests-table": "requests.parquet",
        "--chrome-trace": "trace.json",
        "--event-log": "events.jsonl",
    }
    run(*SMALL, *CLUSTER, *(part for flag, name in files.items() for part in (flag, tmp_path / name)))
    assert names(tmp_path) == sorted(files.values())
    assert all((tmp_path / name).stat().st_size > 0 for name in files.values())
    assert 'data-picture="gantt-0"' in (tmp_path / "page.html").read_text()


def test_a_trace_is_replayed(tmp_path):
    """If the workload is a trace file, requests arrive at the times in the trace."""
    path = tmp_path / "trace.jsonl"
    write_trace([ask(index, index * 0.5) for index in range(10)], path, FORMATS["twofold"])
    report = msgspec.json.decode(run(path, *CLUSTER, "--model", "bloom-176b", "--json").stdout)
    assert (report["counts"]["completed"], report["arrival_s"]) == (10, 4.5)


def outputs(folder):
    flags = ("--html", "--requests-table", "--chrome-trace", "--event-log")
    return [part for index, flag in enumerate(flags) for part in (flag, folder / f"out{index}")]


# Run `main`, which exits with 130 on Ctrl-C. Processes that a shell starts in the background ignore SIGINT, so the
# handler is set explicitly.
START = """
import signal
from twofold.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def test_ctrl_c_leaves_no_half_file(tmp_path):
    """Ctrl-C during a simulation removes the four partial output files, and the exit code is 130."""
    endless = ("azure-conv", "--rate", 40, "--duration", 1e6, "--model", "bloom-176b", *CLUSTER)
    command = [sys.executable, "-c", START, "simulate", *map(str, (*endless, *outputs(tmp_path)))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            while len(names(tmp_path)) < 4 and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=600)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, b"")
    assert names(tmp_path) == []


def test_a_bad_line_leaves_no_half_file(tmp_path):
    """An invalid trace line is an error, and the partial output files are removed."""
    path = tmp_path / "trace.jsonl"
    write_trace([ask(index, float(index)) for index in range(20)], path, FORMATS["twofold"])
    path.write_text(path.read_text() + "{")
    result = invoke(path, *CLUSTER, "--model", "bloom-176b", *outputs(tmp_path))
    assert isinstance(result.exception, UserError)
    assert f"{path}:" in str(result.exception)
    del result  # its traceback refers to the open files
    gc.collect()
    assert names(tmp_path) == ["trace.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SMALL, "--cluster", "2xh200x:prefill,1xh100:decode"), "h200x"),
        ((*SMALL, "--cluster", "2:prefill"), "2:prefill"),
        ((*SMALL,), "give --cluster"),
        ((*SMALL, *CLUSTER, "--model", "bloom-1"), "bloom-1"),
        ((*SMALL, *CLUSTER, "--router", "nowhere"), "nowhere"),
        ((*SMALL, *CLUSTER, "--performance", "guess"), "guess"),
        ((*SMALL, *CLUSTER, "--handoff", "pigeon"), "pigeon"),
        ((*SMALL, *CLUSTER, "--rules", "none"), "none"),
        ((*SMALL, *CLUSTER, "--reference", "abacus"), "abacus"),
        ((*SMALL, *CLUSTER, "--fail", "decode-9@3"), "decode-9"),
        ((*SMALL, *CLUSTER, "--slo", "fast"), "fast"),
        ((*SMALL, *CLUSTER, "--attainment", "90"), "--attainment 90"),
        ((*SMALL, *CLUSTER, "--html", "no/where/page.html"), "no/where/page.html cannot be written"),
        ((*SMALL, *CLUSTER, "--html", "same", "--event-log", "same"), "--html and --event-log both write"),
        ((*SMALL, *CLUSTER, "--duration", "0.000001"), "no request"),
        ((*SMALL, *CLUSTER, "--rate", "1e300"), "--rate 1e+300 is out of range"),
        ((*SMALL, *CLUSTER, "--duration", "1e300"), "--duration 1e+300 is out of range"),
        ((*SMALL, *CLUSTER, "--rate", "1e6", "--duration", "1e6"), "make 1e+12 requests"),
        ((*SMALL, *CLUSTER, "--length-scale", "1e300"), "--length-scale 1e+300 is out of range"),
        ((*SMALL, *CLUSTER, "--arrival", "gamma", "--burstiness", "1e-300"), "--burstiness 1e-300 is out of range"),
        ((*SMALL, *CLUSTER, "--link-gb-per-s", "1e-300"), "--link-gb-per-s 1e-300 is too slow"),
        ((*SMALL, *CLUSTER, "--fail", "decode-0@1e300"), "--fail decode-0@1e300"),
        (("azure-conv", *CLUSTER, "--model", "bloom-176b"), "needs a rate"),
        (("azure-cond", *CLUSTER, "--model", "bloom-176b"), "did you mean azure-conv"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words):
    """Invalid arguments raise a `UserError` with the reason."""
    error = invoke(*arguments).exception
    assert isinstance(error, UserError), repr(error)
    assert words in str(error)
    assert "\n" not in str(error)


def test_what_is_read_is_not_written_over(tmp_path):
    """An output path must not be an input file."""
    trace, cluster = tmp_path / "t.jsonl", tmp_path / "c.yaml"
    trace.write_text("".join(_lines([0, 1])))
    cluster.write_text("model: bloom-176b\npools: [{machines: 1, machine: h100, role: mixed}]\n")
    for path in (trace, cluster):
        before = path.read_text()
        error = invoke(trace, "--cluster", cluster, "--html", path).exception
        assert "an input file" in str(error)
        assert path.read_text() == before


def test_a_mistake_is_not_noted_beside_the_error():
    found = invoke(*SMALL, *CLUSTER, "--performance", "guess")
    assert isinstance(found.exception, UserError)
    assert found.stderr == ""


def test_an_empty_trace_and_times_out_of_order_are_refused(tmp_path):
    """`twofold simulate` rejects an empty trace, and a trace with decreasing arrival times."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "the file is empty" in str(invoke(empty, *CLUSTER, "--model", "bloom-176b").exception)
    backwards = tmp_path / "backwards.jsonl"
    backwards.write_text("".join(_lines((5, 3))))
    assert "must be in order" in str(invoke(backwards, *CLUSTER, "--model", "bloom-176b").exception)


def _lines(milliseconds):
    for at in milliseconds:
        yield f'{{"timestamp":{at},"input_length":5,"output_length":5}}\n'


def test_weights_that_do_not_fit_are_refused(tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "model: bloom-176b\npools:\n- {machines: 1, machine: dgx-h100, role: mixed, tensor_parallel: 1}\n"
    )
    error = invoke(*SMALL, "--cluster", config).exception
    assert isinstance(error, UserError), repr(error)
    assert "bloom-176b" in str(error)


def test_the_command_starts_light():
    """Importing `twofold simulate` does not import plotly, numpy or torch."""
    modules = ("plotly", "numpy", "torch")
    code = f"import sys, twofold.cli.simulate.command; print([m for m in {modules} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_kv_cache_counts_reused_prefix_blocks(tmp_path):
    """With `--kv-cache SIZE`, the report counts the prefix blocks that were reused."""
    trace = tmp_path / "talk.jsonl"
    line = '{{"timestamp": {}, "input_length": 2048, "output_length": 2, "hash_ids": [0, 1, 2, {}]}}\n'
    trace.write_text("".join(line.format(1000 * i, 10 + i) for i in range(4)))
    flags = (trace, *CLUSTER, "--model", "llama2-70b", "--router", "conductor", "--json")
    reuse = msgspec.json.decode(run(*flags, "--kv-cache", "1TB").stdout)["reuse"]
    assert (reuse["blocks"], reuse["hit_rate"], reuse["reused_tokens"]) == (16, 9 / 16, 9 * 512)
    assert "reuse" not in msgspec.json.decode(run(*flags).stdout)
    assert isinstance(refused := invoke(*flags, "--kv-cache", "12 apples").exception, UserError)
    assert "12 apples" in str(refused)


def test_a_closed_loop_replaces_arrival_times():
    asked = ("azure-conv", "--model", "bloom-176b", *CLUSTER, "--num-requests", 40, "--json")
    one, eight = (msgspec.json.decode(run(*asked, "--concurrency", clients).stdout) for clients in (1, 8))
    assert one["workload"]["concurrency"] == 1
    assert one["counts"]["completed"] == eight["counts"]["completed"] == 40
    assert one["duration_s"] > 2 * eight["duration_s"]
    assert one["latencies_s"]["tpot_s"]["mean"] < eight["latencies_s"]["tpot_s"]["mean"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--concurrency", 2, "--rate", 4), "--rate sets arrival times, which --concurrency ignores"),
        (("--concurrency", 2, "--arrival", "poisson"), "--arrival sets arrival times"),
        (("--rate", 4, "--think-time", 1), "--think-time needs --concurrency"),
    ],
)
def test_flags_that_a_closed_loop_contradicts_are_refused(flags, why):
    result = invoke("azure-conv", "--model", "bloom-176b", *CLUSTER, *flags)
    assert isinstance(result.exception, UserError)
    assert why in str(result.exception)


def test_a_colocated_cluster_keeps_its_requests():
    """The default router of a cluster of mixed instances hands nothing off; another router is noticed."""
    mixed = (*SMALL, "--cluster", "3xh100:mixed/chunked-prefill")
    assert msgspec.json.decode(run(*mixed, "--json").stdout)["counts"]["handoffs"] == 0
    shown = run(*mixed, "--router", "splitwise")
    assert "requests were handed off between colocated instances" in shown.output
