"""Phases of requests in answers, metrics and the dashboard of real services."""

import time

import httpx
import pytest

from support.flags import ENGINE, SPLIT
from support.running_service import running_service

PARTS = ("gateway_queue_s", "prefill_queue_s", "prefill_s")
GAP_PARTS = ("kv_transfer_visible_s", "decode_queue_s", "first_decode_s")
METRICS = {
    "gateway_queue_s": "gateway_queue_time",
    "prefill_queue_s": "prefill_queue_time",
    "prefill_s": "request_prefill_time",
    "kv_transfer_hidden_s": "kv_transfer_hidden",
    "kv_transfer_visible_s": "kv_transfer_visible",
    "decode_queue_s": "request_decode_queue_time",
    "first_decode_s": "first_decode_time",
}


def body(**fields):
    return {"model": "m", "prompt": [7, 8, 9, 10] * 8, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


def metric_sums(text):
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("twofold:"))
    return {name.removeprefix("twofold:"): float(value) for name, value in lines}


@pytest.fixture(scope="module", params=["split", "colocated", "split, two gateways"])
def served(request, tiny_model_dir):
    """Run a service. Yield its name and URL."""
    flags = {"split": SPLIT, "colocated": ("--colocated", "1")}.get(request.param, (*SPLIT, "--gateway-processes", "2"))
    with running_service(tiny_model_dir("llama"), *ENGINE, *flags, "--served-model-name", "m") as (_, url):
        yield request.param, url


def test_parts_in_the_answer_sum_up(served):
    name, url = served
    began_s = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json=body(return_timings=True), timeout=600).json()
    elapsed_s = time.monotonic() - began_s
    (told,) = answer["usage"]["timings"]
    (shown,) = (
        each["timings"]
        for each in httpx.get(f"{url}/dashboard/data", timeout=600).json()["requests"]
        if answer["id"] in each["id"]
    )
    assert told == pytest.approx(shown)
    assert all(value >= 0.0 for value in told.values() if value is not None)
    # The service is on this host: its interval lies within that of the client, on the same clock.
    assert sum(told[part] for part in PARTS) + sum(told[part] or 0.0 for part in GAP_PARTS) <= elapsed_s
    assert (told["kv_transfer_hidden_s"] is None) == (told["kv_transfer_visible_s"] is None) == (name == "colocated")


def test_parts_in_metrics_sum_up(served):
    _, url = served
    answers = [
        httpx.post(f"{url}/v1/completions", json=body(return_timings=True, n=2), timeout=600).json() for _ in range(2)
    ]
    assert [len(answer["usage"]["timings"]) for answer in answers] == [2, 2]
    sums = metric_sums(httpx.get(f"{url}/metrics", timeout=600).text)
    for parts, whole in ((PARTS, "time_to_first_token"), (GAP_PARTS, "first_token_gap")):
        total_s = sum(sums[f"{METRICS[part]}_seconds_sum"] for part in parts)
        assert total_s == pytest.approx(sums[f"{whole}_seconds_sum"])
        assert sums[f"{whole}_seconds_count"] >= 4


def test_a_stream_ends_with_the_timings(served):
    _, url = served
    fields = body(return_timings=True, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=600) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert [event.count('"timings"') for event in events] == [0] * 4 + [1]


def test_answers_have_no_timings_unless_asked(served):
    _, url = served
    assert "timings" not in httpx.post(f"{url}/v1/completions", json=body(), timeout=600).json()["usage"]
