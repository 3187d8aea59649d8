"""Slowness of a host: the ratio of measured to predicted iteration times."""

import msgspec
import pytest

from support.hosts import TIMES, profile
from twofold.batch import Batch, BatchItem
from twofold.fidelity.service import ServiceDesign
from twofold.fidelity.worker_log import LoadSpan, WorkerLog, slowness
from twofold.performance.profile import ContentionFactors, GatewayTimes
from twofold.request import Phase
from twofold.serving.telemetry.journal import JournalEntry

CROWDED, SHARED = 1.25, 1.1
ALONE_S = TIMES.seconds(0, 0, 4, 400)
FRONT = GatewayTimes(
    request_s=0.002, prompt_token_s=0.0, request_delay_s=0.0, step_s=0.001, token_s=0.0001, step_delay_s=0.0
)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def log(times, longer):
    """Return a log of decode iterations. `longer` is the ratio of actual to predicted duration."""
    entries = []
    for number, start in enumerate(times):
        items = tuple(BatchItem(str(i), Phase.DECODE, 1, 100, True) for i in range(4))
        batch = msgspec.to_builtins(Batch(number, items))
        end = start + ALONE_S * longer
        entries += [JournalEntry(start, "next_batch", {}, batch), JournalEntry(end, "complete", {}, [])]
    return WorkerLog(entries)


def host(**more):
    slow = ContentionFactors(crowded=CROWDED, shared=SHARED)
    return profile(prefill=slow, decode=slow, **more)


def span(requests=0, tokens=0):
    return LoadSpan(start_s=0.0, end_s=100.0, requests=requests, tokens=tokens)


TIMES_S = [1.0 + number for number in range(20)]


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.3])
def test_speed_of_an_idle_host_is_that_of_the_iterations(slower):
    logs = {"prefill-0": log([], 1.0), "decode-0": log(TIMES_S, slower)}
    found = slowness(host(), ServiceDesign(prefill=1, decode=1).workers(), logs, span())
    assert found == pytest.approx((slower, slower))


def test_phases_have_separate_speeds():
    prompt_s = TIMES.seconds(100, 100 * 100, 0, 0)
    entries = []
    for number, start in enumerate(TIMES_S):
        batch = msgspec.to_builtins(Batch(number, (BatchItem(str(number), Phase.PREFILL, 100, 0, True),)))
        entries += [JournalEntry(start, "next_batch", {}, batch), JournalEntry(start + prompt_s, "complete", {}, [])]
    later = [start + 0.5 for start in TIMES_S]
    logs = {"prefill-0": WorkerLog(entries), "decode-0": log(later, 4 / 3)}
    found = slowness(host(), ServiceDesign(prefill=1, decode=1).workers(), logs, span())
    assert found == pytest.approx((1.0, 4 / 3))


def test_contention_does_not_count_as_slowness():
    both = {name: log(TIMES_S, CROWDED) for name in ("prefill-0", "decode-0")}
    found = slowness(host(), ServiceDesign(prefill=1, decode=1).workers(), both, span())
    assert found == pytest.approx((1.0, 1.0))


def test_core_sharing_does_not_count_as_slowness():
    turns = log(TIMES_S, 2 * SHARED)
    logs = {"prefill-0": log([], 1.0), "prefill-1": turns, "decode-0": turns}
    found = slowness(host(), ServiceDesign(prefill=2, decode=1).workers(), logs, span())
    assert found == pytest.approx((1.0, 1.0))


def test_gateway_cpu_time_does_not_count_as_slowness():
    front_s = 0.002 * 500 + 0.001 * len(TIMES_S) + 0.0001 * 80
    logs = {"mixed-0": log(TIMES_S, 1 / (1 - front_s / 100 / 2)), "mixed-1": log([], 1.0)}
    found = slowness(host(front=FRONT), ServiceDesign(colocated=2).workers(), logs, span(500, 80))
    assert found == pytest.approx((1.0, 1.0))


def test_an_idle_service_runs_as_calibrated():
    logs = {"prefill-0": log([], 1.0), "decode-0": log([], 1.0)}
    assert slowness(host(), ServiceDesign(prefill=1, decode=1).workers(), logs, span()) == (1.0, 1.0)
