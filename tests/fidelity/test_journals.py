"""What workers ran, read from their journals."""

import msgspec
import pytest

from twofold.batch import Batch, BatchItem
from twofold.fidelity.worker_log import WorkerLog
from twofold.request import Phase
from twofold.serving.telemetry.journal import JournalEntry


def entries(*spans):
    """Journal entries of iterations (start, end, items)."""
    for number, (start, end, items) in enumerate(spans):
        yield JournalEntry(start, "next_batch", {}, msgspec.to_builtins(Batch(number, tuple(items))))
        yield JournalEntry(end, "complete", {"stopped": []}, [])


def prompt(name, tokens, context=0, *, samples=True):
    return BatchItem(name, Phase.PREFILL, tokens, context, samples)


def decode(name, context):
    return BatchItem(name, Phase.DECODE, 1, context, True)


def test_what_was_in_an_iteration():
    """Tokens, squares and context are counted as performance models want them; a chunk completes no prompt."""
    items = [prompt("a", 10), prompt("b", 20, 30, samples=False), decode("c", 100), decode("d", 50)]
    (ran,) = WorkerLog(list(entries((1.0, 1.5, items)))).ran
    one = ran.iteration
    assert (one.tokens, one.squares, one.sequences, one.context) == (30, 100 + 50**2 - 30**2, 2, 150)
    assert one.seconds == pytest.approx(0.5)
    assert (one.kind, ran.requests) == ("mixed", ("a",))


def test_an_iteration_takes_until_the_next_can_begin():
    """The usual pause between two that follow each other belongs to the first; idling does not."""
    log = WorkerLog(list(entries(*((at, at + 0.009, [decode("a", 5)]) for at in (0.0, 0.01, 0.02, 5.0)))))
    assert [one.iteration.seconds for one in log.ran] == pytest.approx([0.01] * 4)


def test_how_busy_a_worker_was():
    """The share of a span in which something ran."""
    log = WorkerLog(list(entries((1.0, 2.0, [decode("a", 5)]), (3.0, 4.0, [decode("a", 5)]))))
    assert log.busy_share(0.0, 1.0) == 0.0
    assert log.busy_share(1.2, 1.8) == pytest.approx(1.0)
    assert log.busy_share(1.5, 3.5) == pytest.approx(0.5)
    assert [one.start_s for one in log.between(2.5, 9.0)] == [3.0]


def test_a_batch_that_did_not_end_is_left_out():
    """The journal of a worker that was ended in the middle of one."""
    assert WorkerLog(list(entries((1.0, 2.0, [decode("a", 5)])))[:1]).ran == []


def test_when_kv_landed():
    """By attempt."""
    log = WorkerLog([JournalEntry(3.0, "kv_received", {"request_id": "r~0", "epoch": 1}, True)])
    assert log.landed == {"r~0": 3.0}
