"""The door's metrics: by the names of keys, as they are when asked for."""

from prometheus_client import CollectorRegistry, generate_latest

from support.admitted import admission, offer
from twofold.serving.admission_metrics import AdmissionMetrics


def test_what_waits_and_what_was_refused():
    """Gauges by key and state, counters by reason."""
    door = admission(max_running=1, max_waiting=1)
    registry = CollectorRegistry()
    registry.register(AdmissionMetrics(door))
    offer(door, "a", key="alice")
    door.next(0.0)
    offer(door, "b", deadline_s=2.0)
    offer(door, "c")
    text = generate_latest(registry).decode()
    for line in (
        'twofold:admission_requests{key="alice",state="running"} 1.0',
        'twofold:admission_requests{key="anonymous",state="waiting"} 1.0',
        'twofold:admission_refusals_total{reason="queue-full"} 1.0',
        'twofold:admission_refusals_total{reason="deadline"} 0.0',
        "twofold:admission_expirations_total 0.0",
    ):
        assert line in text.splitlines()
    door.expired(2.0)
    assert "twofold:admission_expirations_total 1.0" in generate_latest(registry).decode()
