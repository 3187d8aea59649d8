"""AIPerf's session files: turns hold new tokens only, and follow the answers before them."""

from itertools import pairwise

import msgspec
import pytest

from twofold.errors import ConfigurationError, WorkloadError
from twofold.workload.rows import ReadNotes
from twofold.workload.source import workload
from twofold.workload.trace import FORMATS, detect_format, open_trace, write_trace

# As `aiperf` generates them: the sessions share a prefix of two full blocks, and the lines of a session may be apart.
ROWS = (
    {
        "session_id": "b",
        "input_length": 1500,
        "output_length": 30,
        "hash_ids": [0, 1, 7],
        "timestamp": 3500,
        "delay": 9,
    },
    {"session_id": "a", "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 9], "timestamp": 1000.0},
    {"session_id": "a", "input_length": 600, "output_length": 10, "hash_ids": [20, 21], "delay": 2500.0},
    {"session_id": "b", "input_length": 40, "output_length": 5, "hash_ids": [22], "delay": 0},
    {"session_id": "a", "input_length": 1, "output_length": 0, "timestamp": 9000.0, "delay": 7000.0, "group_id": 3},
)


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        path = tmp_path / "sessions.jsonl"
        path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
        return path

    return write


def untimed(rows=ROWS):
    return [{key: value for key, value in row.items() if key != "timestamp"} for row in rows]


def test_prompts_hold_the_turns_and_answers_before_them(write):
    """A line has the new tokens of a turn; the prompt has those of the earlier turns and answers, too."""
    notes, path = ReadNotes(), write(*ROWS)
    assert detect_format(path).name == "aiperf"
    requests = list(open_trace(path, notes=notes))
    assert [(r.id, r.prompt_tokens, r.output_tokens) for r in requests] == [
        ("a-0", 1100, 20),
        ("a-1", 1100 + 20 + 600, 10),
        ("b-0", 1500, 30),
        ("b-1", 1500 + 30 + 40, 5),
        ("a-2", 1720 + 10 + 1, 1),
    ]
    assert [r.session for r in requests] == ["a", "a", "b", "b", "a"]
    assert notes.zero_outputs == 1


def test_later_turns_wait_for_their_delay_or_their_timestamp(write):
    """Times begin with the first session. A timestamp takes precedence over a delay, as in AIPerf's fixed schedule."""
    times = {r.id: (r.arrival_s, r.think_s) for r in open_trace(write(*ROWS))}
    assert times == {"a-0": (0.0, 0.0), "a-1": (0.0, 2.5), "b-0": (2.5, 0.0), "b-1": (2.5, 0.0), "a-2": (8.0, 0.0)}


def test_shared_tokens_are_those_of_the_hash_ids_that_all_sessions_begin_with(write):
    assert {r.shared_tokens for r in open_trace(write(*ROWS))} == {1024}
    other = {**ROWS[0], "session_id": "c", "hash_ids": [5, 1, 7]}
    assert {r.shared_tokens for r in open_trace(write(*ROWS, other))} == {0}
    short = {**ROWS[0], "session_id": "c", "hash_ids": [0, 1], "input_length": 600}
    assert {r.shared_tokens for r in open_trace(write(*ROWS, short))} == {600}
    assert {r.shared_tokens for r in open_trace(write(*ROWS, {**ROWS[0], "session_id": "c", "hash_ids": None}))} == {0}


def test_a_line_without_session_is_a_session_of_its_own(write):
    lone = {"session_id": None, "input_length": 8, "output_length": 2, "timestamp": 5000}
    requests = list(open_trace(write(*ROWS, lone, lone)))[-3:]
    assert [(r.session, r.prompt_tokens) for r in requests] == [("line-6", 8), ("line-7", 8), ("a", 1731)]


def test_sessions_without_timestamps_get_an_arrival_process(write):
    """New arrival times are those of sessions: a later turn only waits for the turn before it."""
    path = write(*untimed())
    assert {r.arrival_s for r in workload(str(path))} == {0.0}
    with pytest.raises(ConfigurationError, match=r"all requests arrive at the same time, .*: generate new arrivals$"):
        workload(str(path), rate=2.0)
    requests = list(workload(str(path), rate=2.0, arrival="constant"))
    assert [(r.id, r.arrival_s) for r in requests] == [
        ("b-0", 0.0),
        ("b-1", 0.0),
        ("a-0", 1.0),
        ("a-1", 1.0),
        ("a-2", 1.0),
    ]
    assert [r.think_s for r in requests] == [0.0, 0.0, 0.0, 2.5, 7.0]


def test_sessions_are_converted_without_loss(write, tmp_path):
    requests = list(open_trace(write(*ROWS)))
    out = tmp_path / "out.jsonl"
    assert write_trace(requests, out, FORMATS["twofold"]).losses(FORMATS["twofold"]) == []
    assert list(open_trace(out)) == requests
    for turns in ([r for r in requests if r.session == name] for name in "ab"):
        assert len(turns) > 1
        assert all(b.prompt_tokens > a.prompt_tokens + a.output_tokens for a, b in pairwise(turns))


def test_sessions_are_not_written(write, tmp_path):
    with pytest.raises(ConfigurationError, match="aiperf format is only read: write azure or mooncake or splitwise or"):
        write_trace(open_trace(write(*ROWS)), tmp_path / "out.jsonl", FORMATS["aiperf"])
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "row",
    [
        {"session_id": "a", "turns": [{"text": "Hello"}, {"text": "Go on", "delay": 1000}]},
        {"turns": [{"text": "Hello"}]},
        {"session_id": "a", "text_input": "Hello", "output_length": 4},
        {"session_id": "a", "messages": [{"role": "user", "content": "Hello"}], "output_length": 4},
        {"text": "Hello"},
    ],
)
def test_files_of_texts_are_refused(row, write):
    """AIPerf's other files have texts, whose lengths depend on a tokenizer."""
    with pytest.raises(WorkloadError, match=r":1: \w+ has no length in tokens: AIPerf files are read if") as refused:
        open_trace(write(row))
    assert str(refused.value).endswith("session_id, input_length, output_length")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input_length": 0}, "input_length is 0, and a prompt has at least one token"),
        ({"output_length": -1}, "output_length is -1, and an output has no negative length"),
        ({"output_length": None}, "output_length: expected int, got null"),
        ({"delay": -5}, "delay is -5, which is not a time in ms from 0 on"),
        ({"delay": "5"}, "delay: expected float or null, got str"),
        ({"hash_ids": [1, 2, 3, 4]}, "hash_ids has 4 blocks of 512 tokens, more than input_length 1500"),
        ({"session_id": "c", "timestamp": None}, "either the first turn of every session has a timestamp, or none has"),
        (
            {"session_id": "b", "input_length": 2000, "hash_ids": [0, 1, 7, 8]},
            "hash_ids repeats the previous turn of the session: input_length and hash_ids cover new tokens only",
        ),
    ],
)
def test_a_wrong_line_is_one_sentence(row, says, write):
    path = write(ROWS[0], {**ROWS[0], "session_id": "x", **row})
    with pytest.raises(WorkloadError) as refused:
        list(open_trace(path))
    assert str(refused.value) == f"{path}:2: {says}"
