"""Reading of traces: format detection, error messages and public traces."""

import gzip

import pytest

from support.traces import ask, public_trace
from twofold.errors import ConfigurationError, WorkloadError
from twofold.workload.rows import ReadNotes
from twofold.workload.summary import summarise
from twofold.workload.trace import FORMATS, detect_format, open_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
MOONCAKE = '{"timestamp": 5, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
SPLITWISE = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n7,2,0,0.25,1,1787,6\n"
)
TWOFOLD = '{"id":"a","arrival_s":0.5,"prompt_tokens":3,"output_tokens":2,"prefix_blocks":[9]}\n'
AIPERF = '{"session_id": "a", "timestamp": 5, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
EXAMPLES = {"aiperf": AIPERF, "azure": AZURE, "mooncake": MOONCAKE, "splitwise": SPLITWISE, "twofold": TWOFOLD}


@pytest.fixture
def write(tmp_path):
    def write(content, name="trace"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def complaint(path, format_name=None):
    with pytest.raises(WorkloadError) as caught:
        list(open_trace(path, format_name))
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_detected_from_content(write, name):
    """The format is detected from the content, even if the file is compressed."""
    content = EXAMPLES[name].encode()
    assert detect_format(write(content)).name == name
    assert detect_format(write(gzip.compress(content, mtime=0))).name == name
    assert detect_format(write(b"\xef\xbb\xbf" + content)).name == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("azure", ask(0, 0.0, 4808, 10)),
        ("mooncake", ask(0, 0.0, 700, 5, (0, 1))),
        ("splitwise", ask(7, 0.25, 1787, 6)),
        ("twofold", ask("a", 0.5, 3, 2, (9,))),
    ],
)
def test_reads_every_field_of_each_format(write, name, expected):
    assert list(open_trace(write(EXAMPLES[name]), name)) == [expected]


def test_azure_times_keep_their_seven_digits_and_offsets(write):
    """Times are exact to 100 ns, even across midnight and with a UTC offset."""
    rows = "2023-12-31 23:59:59.9999999,1,1\n2024-01-01 00:00:00,1,1\n2024-01-01 01:00:00.5+01:00,1,1\n"
    times = [r.arrival_s for r in open_trace(write("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))]
    assert times == [0.0, 1e-7, 0.5000001]


def test_columns_are_found_by_name(write):
    """CSV columns may be in any order; extra columns, spaces, quotes and CRLF line ends are allowed."""
    content = ' GeneratedTokens , Extra,TIMESTAMP,ContextTokens\r\n\r\n"10",x,2023-11-16 18:17:03,"4808"\r\n\r\n'
    assert list(open_trace(write(content))) == [ask(0, 0.0, 4808, 10)]


def test_output_of_length_zero_is_read_as_one_and_counted(write):
    """An output of length 0 is read as one token."""
    notes = ReadNotes()
    path = write(MOONCAKE + MOONCAKE.replace('"output_length": 5', '"output_length": 0'))
    assert [request.output_tokens for request in open_trace(path, notes=notes)] == [5, 1]  # prefill generates one
    assert notes.zero_outputs == 1
    list(open_trace(path, notes=notes))
    assert notes.zero_outputs == 1, "a second reading counts anew"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ": the file is empty"),
        ("\n\n", ": the file is empty"),
        (AZURE.splitlines()[0], ": the trace has no requests"),
        ("TIMESTAMP,ContextTokens\n", ":1: missing column GeneratedTokens (it looks like the azure format)"),
        ('{"timestamp": 1, "input_length": 3}\n', ":1: missing key output_length (it looks like the mooncake format)"),
        (AZURE + "2023-11-16 18:17:04\n", ":3: 1 columns where the header has 3"),
        (AZURE + "2023-11-16 18:17:04,1,2,3\n", ":3: 4 columns where the header has 3"),
        (AZURE + "2023-11-16 18:17:04,x,2\n", ":3: ContextTokens is 'x', which is not a whole number"),
        (AZURE + "2023-11-16 18:17:04,1.5,2\n", ":3: ContextTokens is '1.5', which is not a whole number"),
        (AZURE + "2023-11-16 18:17:04,nan,2\n", ":3: ContextTokens is 'nan', which is not a whole number"),
        (AZURE + "2023-11-16 18:17:04,,2\n", ":3: ContextTokens is '', which is not a whole number"),
        (AZURE + "2023-11-16 18:17:04,0,2\n", ":3: ContextTokens is 0, and a prompt has at least one token"),
        (AZURE + "\n2023-11-16 18:17:04,1,-2\n", ":4: GeneratedTokens is -2, and an output has no negative length"),
        (
            AZURE + "2023-11-16 18:17:04,4000000000,2\n",
            ":3: ContextTokens is 4000000000, more than a trace can hold (2,147,483,647)",
        ),
        (
            AZURE + "yesterday,1,2\n",
            ":3: TIMESTAMP is 'yesterday', which is not a time such as 2023-11-16 18:17:03.9799600",
        ),
        (
            AZURE + "2023-11-16 18:17:03.9799599,1,2\n",
            ":3: arrives 1e-07 s before the request above it; arrivals must be in order",
        ),
        (AZURE + '"2023-11-16 18:17:04,1,2\n2023-11-16 18:17:05,1,2\n', ":3: not a csv line: unexpected end of data"),
        (MOONCAKE + '{"timestamp": 6, "input_le', ":2: the JSON is cut off"),
        (MOONCAKE + '{"timestamp": 6}', ":2: missing required field input_length"),
        (MOONCAKE + MOONCAKE.replace("700", '"700"'), ":2: input_length: expected int, got str"),
        (MOONCAKE + MOONCAKE.replace("[0, 1]", "[0, null]"), ":2: hash_ids[1]: expected int, got null"),
        (MOONCAKE + MOONCAKE.replace("700", "-7"), ":2: input_length is -7, and a prompt has at least one token"),
        (MOONCAKE + MOONCAKE.replace("5,", "NaN,", 1), ":2: not valid JSON: invalid character (byte 14)"),
        (MOONCAKE + MOONCAKE.replace("5,", "1e999,", 1), ":2: timestamp: number out of range"),
        (MOONCAKE + MOONCAKE.replace("700", "7" * 5000), ":2: input_length: integer value out of range"),
        (MOONCAKE + "[1]\n", ":2: expected object, got array"),
        (MOONCAKE + '{"x":' + "[" * 100000 + "\n", ":2: the JSON is nested too deeply for a trace"),
        (
            MOONCAKE + MOONCAKE.replace("5,", "4,", 1),
            ":2: arrives 0.001 s before the request above it; arrivals must be in order",
        ),
        ("[1]\n", ":1: expected object, got array"),
        (SPLITWISE + "8,2,0,inf,1,1,1\n", ":3: arrival_timestamp is 'inf', which is not a time in seconds from 0 on"),
        (SPLITWISE + "8,2,0,nan,1,1,1\n", ":3: arrival_timestamp is 'nan', which is not a time in seconds from 0 on"),
        (SPLITWISE + "8,2,0,one,1,1,1\n", ":3: arrival_timestamp is 'one', which is not a number"),
        (SPLITWISE + "8,2,0,1.0,4,1,1\n", ":3: batch_size is 4, and only rows of one request are supported"),
        (TWOFOLD + TWOFOLD.replace("0.5", "-0.5"), ":2: arrival_s is -0.5, which is not a time in seconds from 0 on"),
        (AZURE.encode() + b"\xff\xfe\n", ":3: this is not UTF-8 text; a trace is csv or jsonl, plain or gzip"),
        (b"\x7fELF\x02\x01\x00\x00", ":1: this is a binary file, not a trace in csv or jsonl"),
        (gzip.compress(AZURE.encode(), mtime=0)[:-12], ":2: the gzip data is damaged or cut off here"),
    ],
)
def test_bad_line_is_reported_with_number_and_reason(write, content, expected):
    assert complaint(write(content)) == expected


def test_compressed_blank_lines_are_not_read_to_their_end(write):
    """A small gzip file may hold gigabytes of line ends."""
    blank = b"\n" * 2**21
    for number, content in ((2**20 + 1, blank), (2**20 + 3, AZURE.encode() + blank), (16, (b" " * 2**16 + b"\n") * 99)):
        path = write(gzip.compress(content, mtime=0))
        assert complaint(path) == f":{number}: more than 1,048,576 bytes of blank lines: this is not a trace"


def test_unknown_content_names_the_known_formats(write):
    message = complaint(write("name,age\nx,3\n"))
    assert message.startswith(":1: no known trace format begins like this (aiperf: session_id, input_length")


def test_wrong_explicit_format_reports_missing_columns(write):
    """A file that does not have the given format is an error."""
    assert complaint(write(AZURE), "splitwise").startswith(":1: missing column request_id, arrival_timestamp")
    assert complaint(write(AZURE), "twofold").startswith(":1: not valid JSON")


def test_rejects_missing_files_directories_and_unknown_formats_immediately(tmp_path):
    with pytest.raises(WorkloadError, match="no such file"):
        open_trace(tmp_path / "none.csv")
    with pytest.raises(WorkloadError, match="not a regular file"):
        open_trace(tmp_path)
    with pytest.raises(WorkloadError, match="cannot be opened"):
        open_trace("x" * 5000)
    with pytest.raises(ConfigurationError, match="'csv' is not one of aiperf, azure, mooncake, splitwise, twofold"):
        open_trace(__file__, "csv")


def test_reading_is_lazy(write):
    """`open_trace` yields the requests above an invalid line, and raises WorkloadError only at the invalid line."""
    requests = open_trace(write(AZURE + "bad\n"))
    assert next(requests).prompt_tokens == 4808
    with pytest.raises(WorkloadError):
        next(requests)


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"),
    [("azure-2023-code.csv", 8819, (1469, 2048), (13, 28)), ("azure-2023-conv.csv", 19366, (1020, 1155), (129, 211))],
)
def test_azure_traces_have_the_published_lengths(name, requests, prompt, output):
    """Median and mean lengths equal those in section 3 of the Splitwise paper."""
    summary = summarise(open_trace(public_trace(name)))
    assert summary.requests == requests
    assert (summary.prompt_tokens.p50, round(summary.prompt_tokens.mean)) == prompt
    assert (summary.output_tokens.p50, round(summary.output_tokens.mean)) == output


def test_mooncake_trace_has_the_published_reuse():
    """The Mooncake trace has the published numbers of requests and blocks, and the published reuse."""
    summary = summarise(open_trace(public_trace("mooncake-conversation.jsonl")))
    assert summary.requests == 12031
    assert (summary.duration_s, summary.prompt_tokens.p50) == (3536.999, 6909)
    assert (round(summary.prompt_tokens.mean), round(summary.output_tokens.mean)) == (12035, 343)
    assert (summary.prefix_blocks, summary.distinct_prefix_blocks) == (288500, 182790)
    assert summary.highest_reuse == pytest.approx(0.3664, abs=5e-5)


def test_splitwise_trace_keeps_its_own_times():
    """SplitwiseSim's trace keeps its arrival times, which do not start at 0."""
    requests = list(open_trace(public_trace("splitwise-code-70rps-2min.csv")))
    assert len(requests) == 8502
    assert (requests[0].arrival_s, requests[-1].id) == (0.011369635830901571, "8501")
