"""Admission metrics by API key."""

from prometheus_client import CollectorRegistry, generate_latest

from support.admitted import admission, offer
from twofold.serving.telemetry.metrics import AdmissionMetrics


def test_requests_are_counted_by_key_and_state():
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
    ):
        assert line in text.splitlines()
