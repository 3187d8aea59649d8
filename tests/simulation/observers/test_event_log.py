"""The event log is complete, exact to the picosecond and reproducible."""

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.observed import completed, report_run
from twofold.errors import ConfigurationError
from twofold.simulation.observers.files import EventLog, _seconds
from twofold.timeline import Timeline


def lines_of(path):
    return [json.loads(line, parse_float=Decimal) for line in path.read_text("utf-8").splitlines()]


def test_equal_runs_give_equal_bytes(tmp_path):
    report_run(EventLog(tmp_path / "a"))
    report_run(EventLog(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_writes_every_event_in_order(tmp_path):
    report_run(EventLog(tmp_path / "log"))
    events = [line["event"] for line in lines_of(tmp_path / "log")]
    assert " ".join(events) == "role role note run transfer ended run ended role run note close"


def test_lines_have_exact_times(tmp_path):
    report_run(EventLog(tmp_path / "log"))
    lines = lines_of(tmp_path / "log")
    assert lines[3] == {
        "at_s": Decimal("0.750000000001"),
        "event": "run",
        "instance": "prefill-0",
        "start_s": Decimal("0.375"),
        "iterations": 1,
        "prefill_tokens": 1_204,
        "prefill_sequences": 1,
        "decode_sequences": 0,
        "context_tokens": 0,
        "watts": Decimal("4000.0"),
    }
    assert lines[4]["request"] == "chat-1"
    assert (lines[4]["start_s"], lines[4]["at_s"]) == (Decimal("0.5"), Decimal("0.8125"))
    assert lines[-1] == {"at_s": Decimal("12345.000000000001"), "event": "close"}


def test_moments_are_sorted(tmp_path):
    line, mirrored = completed(), completed()
    mirrored.moments = dict(reversed(line.moments.items()))
    for name, timeline in (("a", line), ("b", mirrored)):
        log = EventLog(tmp_path / name)
        log.ended(timeline, 0.0)
        log.close(0)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    first = json.loads((tmp_path / "a").read_text().splitlines()[0])
    assert first["moments"] == {moment.value: at_s for moment, at_s in line.moments.items()}
    assert first["at_s"] == 1.25


def test_a_request_without_moments_has_its_arrival(tmp_path):
    """A request without recorded phase times is logged at its arrival time."""
    log = EventLog(tmp_path / "log")
    log.ended(Timeline(completed().request), 0.0)
    log.close(0)
    assert lines_of(tmp_path / "log")[0]["at_s"] == Decimal("0.25")


@given(st.integers(0, 10**24))
def test_seconds_are_exact(ps):
    """Times in picoseconds are written in seconds without loss."""
    assert Decimal(bytes(_seconds(ps)).decode()) == Decimal(ps).scaleb(-12)
    assert json.loads(bytes(_seconds(ps))) == pytest.approx(ps / 1e12)


def test_rejects_unwritable_paths(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be written"):
        EventLog(tmp_path / "gone" / "log")
