"""`twofold trace`: display, conversion and generation of traces, warnings about fields that a conversion drops."""

import msgspec
import pytest
from typer.testing import CliRunner

from support.traces import ask, public_trace
from twofold.cli.trace import app
from twofold.errors import ConfigurationError, WorkloadError
from twofold.workload.rescale import mean_rate
from twofold.workload.trace import FORMATS, detect_format, open_trace, write_trace


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "in.jsonl"
    requests = [ask(index, float(index), 1000 + index, 10, (0, index)) for index in range(10)]
    write_trace(requests, path, FORMATS["mooncake"])
    return path


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.exception
    return result


def failure(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code != 0
    return result.exception


def test_show_prints_counts_and_lengths(trace):
    shown = run("show", trace).stdout
    for expected in ("(mooncake)", "1.000 requests/s", "20, 10 distinct", "50.00% of prefix blocks", "1,004.5"):
        assert expected in shown


def test_show_json_is_exact(trace):
    shown = msgspec.json.decode(run("show", trace, "--json").stdout)
    assert (shown["path"], shown["format"], shown["requests"]) == (str(trace), "mooncake", 10)
    assert shown["highest_reuse"] == 0.5
    assert shown["prompt_tokens"]["p50"] == 1004.5


def test_show_of_the_public_trace():
    """An unlimited cache would hit 36.64% of the prompt blocks in the Mooncake conversation trace, as published."""
    assert "36.64%" in run("show", public_trace("mooncake-conversation.jsonl")).stdout


def test_reuse_prints_a_rate_for_each_size_and_rule(trace):
    shown = run("reuse", trace, "--capacity", 1, "--capacity", 2000, "--eviction", "lru").stdout
    for expected in ("20 prefix blocks, 10 distinct", "unlimited cache: 50.00%", "2,000", "45.00%"):
        assert expected in shown
    assert "lfu" not in shown
    facts = msgspec.json.decode(run("reuse", trace, "--capacity", 2000, "--json").stdout)
    assert {cache["eviction"] for cache in facts["caches"]} == {"lru", "lfu", "length-aware"}
    assert {cache["rate"] for cache in facts["caches"]} == {0.45}


def test_reuse_of_nothing_is_refused(trace, tmp_path):
    assert "--capacity 0 is out of range" in str(failure("reuse", trace, "--capacity", 0))
    assert "unknown eviction policy 'best'" in str(failure("reuse", trace, "--eviction", "best"))
    write_trace([ask(0)], tmp_path / "plain.jsonl", FORMATS["twofold"])
    assert "has no prefix blocks" in str(failure("reuse", tmp_path / "plain.jsonl"))


def test_convert_says_what_is_lost(trace, tmp_path):
    """Conversion to the Azure CSV format keeps prompt lengths, and reports on stderr that prefix blocks are lost."""
    result = run("convert", trace, tmp_path / "out.csv", "--to", "azure")
    assert "note: the azure format has no prefix blocks: 10 requests lost theirs" in result.stderr
    assert "wrote 10 requests" in result.stderr
    assert [request.prompt_tokens for request in open_trace(tmp_path / "out.csv")] == list(range(1000, 1010))


def test_convert_without_options_loses_nothing(trace, tmp_path):
    """Without `--to`, traces are converted to the `twofold` format, which loses no field."""
    out = tmp_path / "out.jsonl"
    assert "note" not in run("convert", trace, out).stderr
    assert detect_format(out).name == "twofold"
    assert list(open_trace(out)) == list(open_trace(trace))


def test_convert_rescales(trace, tmp_path):
    """Conversion first selects a part of the trace, then scales rate and lengths, then limits the lengths."""
    out = tmp_path / "out.jsonl"
    run(
        *("convert", trace, out, "--start", 2, "--num-requests", 5, "--rate", 8),
        *("--length-scale", 0.5, "--max-model-len", 400),
    )
    requests = list(open_trace(out))
    assert len(requests) == 5
    assert mean_rate(requests) == pytest.approx(8.0)
    assert all(request.prompt_tokens + request.output_tokens <= 400 for request in requests)
    run("convert", trace, out, "--rate-scale", 2, "--duration", 2)
    assert [request.arrival_s for request in open_trace(out)] == [0.0, 0.5, 1.0, 1.5]


def test_convert_mentions_outputs_of_length_zero(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = (f'{{"timestamp":{t},"input_length":5,"output_length":0}}' for t in (0, 9))
    path.write_text("\n".join(lines))
    # `--rate` makes the command read the trace twice, but each output counts once.
    result = run("convert", path, tmp_path / "out.jsonl", "--rate", 1)
    assert "note: 2 outputs of length 0 were read as 1" in result.stderr


def test_failed_convert_leaves_no_file(trace, tmp_path):
    """The error for an invalid line contains the file name and line number, and no output file remains."""
    trace.write_text(trace.read_text() + "{")
    error = failure("convert", trace, tmp_path / "out.jsonl")
    assert isinstance(error, WorkloadError)
    assert str(error) == f"{trace}:11: the JSON is cut off"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{in}",), "is the input"),
        (("{dir}/out.csv",), "give the format of the csv, --to azure or --to splitwise"),
        (("{dir}/out", "--to", "xml"), "trace format 'xml' is not one of"),
        (("{dir}/out", "--format", "xml"), "trace format 'xml' is not one of"),
        (("{dir}/out", "--start", "100"), "no request arrives in this part"),
        (("{dir}/out", "--rate", "1", "--rate-scale", "2"), "either a rate or a rate scale"),
        (("{dir}/no/out",), "cannot be written: No such file or directory"),
    ],
)
def test_convert_refuses_in_one_sentence(trace, tmp_path, arguments, message):
    before = trace.read_bytes()
    filled = [argument.format(**{"in": trace, "dir": tmp_path}) for argument in arguments]
    error = failure("convert", trace, *filled)
    assert isinstance(error, ConfigurationError)
    assert message in str(error)
    assert trace.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_generate_repeats_to_the_byte(tmp_path):
    options = ("generate", "azure-conv", "--rate", 5, "--num-requests", 50, "--arrival", "gamma", "--burstiness", 0.5)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(*options, "--output", tmp_path / name, "--seed", seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()
    assert len(list(open_trace(tmp_path / "a"))) == 50


def test_generate_refuses_in_one_sentence(tmp_path):
    out = ("--output", tmp_path / "out", "--rate", 1)
    assert "did you mean azure-code?" in str(failure("generate", "azure-cod", *out, "--num-requests", 1))
    assert "give a number of requests or a duration" in str(failure("generate", "azure-code", *out))
    assert list(tmp_path.iterdir()) == []
