"""The Chrome trace is valid JSON for Perfetto and has one thread per instance."""

import gc
import json
from itertools import groupby

import pytest

from support.observed import S, report_run
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.simulation.observers.base import IterationRun
from twofold.simulation.observers.files import ChromeTrace


def events_of(tmp_path, story=report_run):
    path = tmp_path / "trace.json"
    story(ChromeTrace(path))
    return json.loads(path.read_text("utf-8"))["traceEvents"]


def of_kind(events, kind):
    return [event for event in events if event["ph"] == kind]


def test_runs_are_complete_events(tmp_path):
    runs = of_kind(events_of(tmp_path), "X")
    assert [run["name"] for run in runs] == [
        "prefill 1,204 tokens",
        "decode ×17 (32 iterations)",
        "prefill 2,048 tokens + decode ×3",
    ]
    assert [run["cat"] for run in runs] == ["prefill", "decode", "mixed"]
    assert (runs[0]["ts"], runs[0]["dur"]) == (375_000.0, 375_000.000001)
    assert runs[1]["args"]["context tokens"] == 20_468


def test_instances_are_threads_of_the_pool_they_joined_first(tmp_path):
    """Each instance is shown as a thread of its first pool, even after a role change."""
    events = events_of(tmp_path)
    names = {(m["name"], m["pid"], m["tid"]): m["args"]["name"] for m in of_kind(events, "M") if "name" in m["args"]}
    assert names == {
        ("process_name", 1, 0): "prefill",
        ("thread_name", 1, 1): "prefill-0",
        ("process_name", 2, 0): "decode",
        ("thread_name", 2, 2): "decode-0",
    }
    assert [(run["pid"], run["tid"]) for run in of_kind(events, "X")] == [(1, 1), (2, 2), (2, 2)]
    assert [(i["name"], i["tid"], i["ts"]) for i in of_kind(events, "i")] == [
        ("joins mixed", 2, 2e6),
        ("failure", 2, 3e6),
    ]


def test_a_transfer_is_a_pair_of_asynchronous_events(tmp_path):
    """The begin and end events of a transfer have the same id."""
    events = events_of(tmp_path)
    (begin,), (end,) = of_kind(events, "b"), of_kind(events, "e")
    assert begin["name"] == "KV to decode-0"
    assert begin["args"] == {"request": "chat-1", "from": "prefill-0", "bytes": 987_654_321}
    assert (begin["ts"], end["ts"]) == (500_000.0, 812_500.0)
    assert all(begin[key] == end[key] for key in ("id", "name", "cat", "pid"))


def test_power_returns_to_zero_between_runs(tmp_path):
    """The power counter of each instance is zero while the instance runs no batch."""
    counters = sorted(of_kind(events_of(tmp_path), "C"), key=lambda c: (c["name"], c["ts"]))
    power = {name: [(c["ts"], c["args"]["W"]) for c in group] for name, group in groupby(counters, lambda c: c["name"])}
    assert power == {
        "power of prefill-0": [(375_000.0, 4_000.0), (750_000.000001, 0.0)],
        "power of decode-0": [(875_000.0, 2_500.5), (1_250_000.0, 0.0), (2e6, 3_000.0), (3e6, 0.0)],
    }


def test_consecutive_runs_have_no_zero_power_between(tmp_path):

    def story(trace):
        trace.role("mixed-0", Role.MIXED, 0)
        for i, watts in enumerate([100.0, 100.0, 200.0]):
            trace.run(IterationRun("mixed-0", i * S, (i + 1) * S, 1, 0, 0, 1, 5, watts))
        trace.close(3 * S)

    counters = of_kind(events_of(tmp_path, story), "C")
    assert [(c["ts"], c["args"]["W"]) for c in counters] == [(0, 100.0), (2e6, 200.0), (3e6, 0.0)]


def test_an_empty_run_is_valid_too(tmp_path):
    assert events_of(tmp_path, lambda trace: trace.close(0)) == []


def test_failed_runs_leave_no_file(tmp_path):
    trace = ChromeTrace(tmp_path / "trace.json")
    trace.role("mixed-0", Role.MIXED, 0)
    assert not (tmp_path / "trace.json").exists()
    del trace
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigurationError, match="cannot be written"):
        ChromeTrace(tmp_path / "gone" / "trace.json")
