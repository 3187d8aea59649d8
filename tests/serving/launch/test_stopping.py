"""Tests of the end of a service while requests run."""

import asyncio
import socket

from twofold.serving.launch import local_service
from twofold.serving.launch.local_service import end_requests, ready_line


class Busy:
    """Service whose requests never end by themselves."""

    def __init__(self, live):
        self.live, self.failure = live, None

    async def drain(self):
        if self.live:
            await asyncio.Event().wait()

    def fail_all(self, reason):
        self.failure = reason


async def ended(service, *, hurry):
    said, now = [], asyncio.Event()
    ending = asyncio.create_task(end_requests(service, said.append, now))
    if hurry:
        await asyncio.sleep(0)
        now.set()
    await ending
    return said


def test_a_second_signal_ends_running_requests_at_once(monkeypatch):
    monkeypatch.setattr(local_service, "STOP_GRACE_S", 3600)
    service = Busy(2)
    assert asyncio.run(ended(service, hurry=True)) == ["draining 2 requests (3600 s); Ctrl-C again to stop now"]
    assert service.failure == "the service was stopped before the answer was complete"


def test_requests_that_outlast_the_grace_period_are_ended(monkeypatch):
    monkeypatch.setattr(local_service, "STOP_GRACE_S", 0.001)
    service = Busy(1)
    assert asyncio.run(ended(service, hurry=False))[0].startswith("draining 1 request (")
    assert service.failure is not None


def test_a_service_without_requests_says_nothing():
    assert asyncio.run(ended(Busy(0), hurry=False)) == []


def test_the_ready_line_has_the_addresses():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert ready_line(listener) == f"ready on {url}: API at /v1 and /docs, {url}/dashboard, {url}/metrics"
