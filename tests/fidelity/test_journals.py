"""Iterations and their durations as read from worker journals."""

import msgspec
import pytest

from twofold.batch import Batch, BatchItem
from twofold.fidelity.worker_log import WorkerLog
from twofold.request import Phase
from twofold.serving.telemetry.journal import JournalEntry


def entries(*spans):
    """Yield journal entries for the start and the end of each iteration."""
    for number, (start, end, items) in enumerate(spans):
        yield JournalEntry(start, "next_batch", {}, msgspec.to_builtins(Batch(number, tuple(items))))
        yield JournalEntry(end, "complete", {"stopped": []}, [])


def prompt(name, tokens, context=0, *, samples=True):
    return BatchItem(name, Phase.PREFILL, tokens, context, samples)


def decode(name, context):
    return BatchItem(name, Phase.DECODE, 1, context, True)


def test_counts_the_work_of_an_iteration():
    """Work is counted in prompt tokens, squared prompt lengths, decode sequences and context tokens."""
    items = [prompt("a", 10), prompt("b", 20, 30, samples=False), decode("c", 100), decode("d", 50)]
    (ran,) = WorkerLog(list(entries((1.0, 1.5, items)))).ran
    one = ran.iteration
    assert one.work == ((30, 100 + 50**2 - 30**2, 2, 150),)
    assert one.seconds == pytest.approx(0.5)
    assert (one.kind, ran.requests) == ("mixed", ("a",))


def test_an_iteration_lasts_until_the_next_can_start():
    """The duration includes the usual gap before the next iteration, but excludes longer idle times."""
    log = WorkerLog(list(entries(*((at, at + 0.009, [decode("a", 5)]) for at in (0.0, 0.01, 0.02, 5.0)))))
    assert [one.iteration.seconds for one in log.ran] == pytest.approx([0.01] * 4)


def test_computes_the_busy_share_of_a_time_span():
    log = WorkerLog(list(entries((1.0, 2.0, [decode("a", 5)]), (3.0, 4.0, [decode("a", 5)]))))
    assert log.busy_share(0.0, 1.0) == 0.0
    assert log.busy_share(1.2, 1.8) == pytest.approx(1.0)
    assert log.busy_share(1.5, 3.5) == pytest.approx(0.5)
    assert [one.start_s for one in log.between(2.5, 9.0)] == [3.0]


def test_ignores_an_incomplete_batch():
    # The journal of a killed worker lacks the end of its last batch.
    assert WorkerLog(list(entries((1.0, 2.0, [decode("a", 5)])))[:1]).ran == []


def test_records_kv_arrival_times_by_attempt():
    log = WorkerLog([JournalEntry(3.0, "kv_received", {"request_id": "r~0", "epoch": 1}, True)])
    assert log.landed == {"r~0": 3.0}
