"""The dashboard over HTTP and in a browser."""

import asyncio
import re
import time
from contextlib import ExitStack
from unittest.mock import Mock

import msgspec
import pytest

from support.browser import browsing, chromium
from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService
from support.timelines import SPLIT_MOMENTS, request_timeline
from twofold.errors import InstanceLostError
from twofold.instance import Role
from twofold.request import FinishReason
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.gateway.app import Dashboard
from twofold.serving.gateway.keys import ApiKey, KeyRing
from twofold.serving.telemetry.snapshot import InstanceState, ServiceHistory, ServiceSnapshot
from twofold.serving.telemetry.telemetry import Telemetry

needs_chromium = pytest.mark.skipif(chromium() is None, reason="there is no Chromium here")


def shifted(moments, by):
    return {name: at + by for name, at in moments.items()}


def busy_service():
    """Return a stub of the service, up for a minute, with several requests and three instances, one of them lost."""
    service, now = ScriptedService(), time.monotonic()
    clock = Mock(return_value=now - 60.0)
    service.telemetry = Telemetry("tiny", clock=clock)
    clock.side_effect = time.monotonic
    instances = service.telemetry.instances
    for name, role in {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE}.items():
        instances.role(name, role)
        instances.state(name, InstanceState.UP)
        instances.status(name, InstanceStatus(1, 2, 0, 0, 0, 100, 40, 10))
    instances.role("prefill-1", Role.MIXED)
    instances.remove("decode-0")
    for number in range(4):
        at = now - 8 + number
        tokens = [at + 3.0, at + 5.0, at + 6.0]
        moments = shifted(SPLIT_MOMENTS, at - 1.0)
        service.telemetry.ended(request_timeline(tokens, name=f"request-{number}", arrived=at, **moments), at + 6.0)
    service.telemetry.failed(InstanceLostError("gone"))
    service.telemetry.configuration = {"Router": "jsq", "Device": "cpu"}
    service.telemetry.ended(request_timeline([], name="failed", arrived=now - 3, reason=FinishReason.ERROR), now)
    return service


def test_viewers_share_a_snapshot():
    service, now = ScriptedService(), 0.0
    dashboard = Dashboard(service, clock=lambda: now)
    for now in (0.0, 0.5, 0.99, 1.0, 1.5):  # noqa: B007 read by the clock
        msgspec.json.decode(dashboard.data().body, type=ServiceSnapshot)
    assert service.looks == 2


def test_data_needs_an_api_key_and_the_page_does_not():
    with running_gateway(ScriptedService(), keys=KeyRing([ApiKey("watcher", "secret")])) as client:
        assert client.get("/dashboard").status_code == 200
        assert client.get("/dashboard/data").status_code == 401
        answer = client.get("/dashboard/data", headers={"authorization": "Bearer secret"})
        assert answer.json()["model"] == "tiny"


def test_the_page_loads_no_external_assets(client):
    answer = client.get("/dashboard")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert set(re.findall(r"https?://[^'\" >]+", answer.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", answer.text)


@needs_chromium
def test_a_browser_renders_the_dashboard():
    """The page shows pools, phases, events and requests, and every drawing has a text alternative."""

    async def look(url):
        async with browsing(chromium()) as page:
            await page.open(f"{url}/dashboard")
            await page.until("document.body.classList.contains('known')")
            await page.until("document.querySelector('#gantt').ariaLabel?.startsWith('5 requests')")
            assert "1 of 3 instances not up" in await page.text("#status")
            pools = await page.text("#pools")
            assert "prefill · 1 · 1 waiting · 2 running" in pools
            assert "prefill-1 (of prefill)" in pools
            assert "lost" in pools
            events = await page.text("#events")
            assert "prefill → mixed" in events
            assert "lost" in events
            assert "Failed: instance lost\n1" in await page.text("#errors")
            assert "Router\njsq\nDevice\ncpu" in await page.text("#config")
            await page.evaluate("document.querySelector('#as-table').open = true")
            await page.until("document.querySelectorAll('#requests tbody tr').length === 5")
            assert "request-3" in await page.text("#requests")
            unnamed = "[...document.querySelectorAll('canvas')].filter(c => !c.ariaLabel || c.role !== 'img').length"
            assert await page.evaluate(unnamed) == 0
            for width in (1600, 900, 420):
                await page.size(width, 900)
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            await page.scheme("dark")
            assert page.errors == []

    with running_gateway(busy_service()) as client:
        asyncio.run(look(client.base_url))


def test_the_history_is_data_of_the_dashboard():
    with running_gateway(busy_service(), keys=KeyRing([ApiKey("watcher", "secret")])) as client:
        assert client.get("/dashboard/history").status_code == 401
        answer = client.get("/dashboard/history", headers={"authorization": "Bearer secret"})
        history = msgspec.json.decode(answer.content, type=ServiceHistory)
        assert (sum(history.flow.requests), sum(history.flow.tokens)) == (5, 12)


@needs_chromium
def test_the_range_of_the_charts_survives_a_reload():

    async def look(url):
        async with browsing(chromium()) as page:
            await page.open(f"{url}/dashboard")
            await page.until("document.body.classList.contains('known')")
            assert await page.evaluate("document.querySelector('#range').value") == "300"
            await page.evaluate("document.querySelector('#range').value = '21600'")
            await page.evaluate("document.querySelector('#range').dispatchEvent(new Event('change'))")
            await page.open(f"{url}/dashboard")
            await page.until("document.querySelector('#ttft').shown?.n === 2160", tries=300)
            assert await page.evaluate("document.querySelector('#range').value") == "21600"
            assert page.errors == []

    with running_gateway(busy_service()) as client:
        asyncio.run(look(client.base_url))


@needs_chromium
def test_a_browser_renders_an_idle_service():
    """Panels without data show a placeholder text."""

    async def look(url):
        async with browsing(chromium()) as page:
            await page.open(f"{url}/dashboard")
            await page.until("document.querySelector('#gantt').ariaLabel?.startsWith('0 requests')")
            assert "none yet" in await page.text("#events")
            assert await page.text("#status") == "live"
            assert page.errors == []

    with running_gateway(ScriptedService()) as client:
        asyncio.run(look(client.base_url))


@needs_chromium
def test_a_browser_prompts_for_the_key_and_reports_a_lost_service():

    async def look(url, stop):
        async with browsing(chromium()) as page:
            await page.open(f"{url}/dashboard")
            locked = "getComputedStyle(document.querySelector('#key')).display === 'block'"
            await page.until(locked)
            await enter(page, "wrong")
            await page.until("document.querySelector('#wrong').textContent.includes('not the key')")
            await enter(page, "secret")
            await page.until("document.body.classList.contains('known')")
            assert not await page.evaluate(locked)
            await asyncio.to_thread(stop)
            await page.until("document.querySelector('#status').textContent === 'disconnected'")
            assert "trying again" in await page.text("#notice")

    async def enter(page, key):
        form = "document.querySelector('#key form')"
        await page.evaluate(f"document.querySelector('#secret').value = '{key}'; {form}.requestSubmit()")

    with ExitStack() as running:
        client = running.enter_context(running_gateway(busy_service(), keys=KeyRing([ApiKey("watcher", "secret")])))
        asyncio.run(look(client.base_url, running.close))
