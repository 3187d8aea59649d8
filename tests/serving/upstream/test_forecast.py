"""Early rejection by predicted TTFT, and measurement of the servers' prefill speeds."""

import pytest

from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.kvcache.index import PrefixIndex
from twofold.request import Request
from twofold.scheduling.admission.admission import QueuedRequest
from twofold.scheduling.admission.limits import AdmissionLimits, RefusalReason
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.routers import ROUTERS
from twofold.serving.upstream.forecast import NOMINAL_S, PrefillSpeeds, ServerPrediction, TtftAdmission
from twofold.serving.upstream.metrics import PrefillTotals


@pytest.fixture
def busy():
    """Return the scheduler and the admission control for one server with a prefill speed of 100 tokens/s."""
    speeds = PrefillSpeeds()
    speeds.read("one", PrefillTotals(10.0, 1000, 1))
    cluster = ClusterScheduler(ROUTERS["load"](), FixedHandoff(HandoffMode.PULL))
    cluster.add_instance("one", Role.MIXED)
    forecast = cluster.pools.forecast = ClusterForecast(PrefixIndex(), 16)
    forecast.join("one", ServerPrediction("one", speeds))
    return cluster, TtftAdmission(AdmissionLimits(), cluster, 2.0)


def request(name, tokens):
    return Request(id=name, arrival_s=0.0, prompt_tokens=tokens, output_tokens=5)


def test_rejects_when_the_queue_is_too_long(busy):
    """A rejected request's Retry-After is the time until the queue is short enough to admit it."""
    cluster, door = busy
    assert door.offer(QueuedRequest(request("a", 150), "", 0, None), 0.0) is None
    cluster.place(request("a", 150), 0.0)
    refusal = door.offer(QueuedRequest(request("b", 100), "", 0, None), 0.0)
    assert (refusal.reason, refusal.retry_after_s) == (RefusalReason.PREFILL_LOAD, 1)
    assert door.offer(QueuedRequest(request("c", 40), "", 0, None), 0.0) is None
    cluster.first_token("a", 1.5)
    assert door.offer(QueuedRequest(request("b", 100), "", 0, None), 1.5) is None


def test_queues_without_any_server(busy):
    cluster, door = busy
    cluster.pause("one")
    assert door.offer(QueuedRequest(request("a", 10**4), "", 0, None), 0.0) is None


def test_unmeasured_servers_have_the_mean_speed():
    speeds = PrefillSpeeds()
    assert speeds.of("new") == NOMINAL_S
    speeds.read("one", PrefillTotals(25.0, 100, 1))
    speeds.read("two", PrefillTotals(75.0, 100, 1))
    speeds.read("two", PrefillTotals(75.0, 100, 1))
    assert (speeds.of("one"), speeds.of("two"), speeds.of("new")) == (0.25, 0.75, 0.5)


def test_decode_servers_do_not_affect_the_speed():
    """Prefill speed is not measured on servers that only decode."""
    speeds = PrefillSpeeds()
    speeds.read("one", PrefillTotals(1.0, 1000, 2))
    speeds.read("two", PrefillTotals(5.0, 50, 50))  # a decode server computes one prompt token per request
    assert speeds.of("two") == speeds.of("one") == 0.001
    speeds.read("two", PrefillTotals(5.4, 250, 51))
    assert speeds.of("two") == pytest.approx(0.002)
    speeds.read("two", PrefillTotals(9.4, 290, 91))
    assert speeds.of("two") == pytest.approx(0.002)


def test_speed_follows_recent_measurements():
    """Recent measurements of prefill speed count more than older ones."""
    speeds = PrefillSpeeds()
    speeds.read("one", PrefillTotals(1e4, 1e6, 1000))
    assert speeds.of("one") == 0.01
    speeds.read("one", PrefillTotals(1e4 + 163.84, 1e6 + 163840, 1100))
    assert speeds.of("one") == pytest.approx((163.84 + 163.84) / (16384 + 163840))
    speeds.read("one", PrefillTotals(1.0, 1000, 1))
    assert speeds.of("one") < 0.002
