"""Logs, traces, metrics and dashboard of a real service."""

import asyncio
import json
import subprocess
import sys

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from support.collector import collecting
from support.flags import ENGINE, SPLIT
from twofold.bench.services import free_port, stop, wait_ready

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = [7, 8, 9, 10]


async def ask(url, **fields):
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{SPAN}-01"}
    async with httpx.AsyncClient(timeout=600) as client:
        return await client.post(f"{url}/v1/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def observed(tiny_model_dir, tmp_path_factory):
    """Send requests to a service; return its answers, logs, spans, metrics and dashboard snapshot."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "log"
    url = f"http://127.0.0.1:{port}"
    flags = ("--port", str(port), "--served-model-name", "m", "--log-format", "json", "--slo", "e2e=600s")
    command = [sys.executable, "-m", "twofold.cli.main", "serve", str(tiny_model_dir("llama")), *ENGINE, *SPLIT, *flags]
    with collecting() as collector, log.open("w") as out:
        process = subprocess.Popen([*command, "--otlp-endpoint", collector.url], stderr=out, stdin=subprocess.DEVNULL)
        try:
            assert wait_ready(process, url), log.read_text()
            answer = asyncio.run(ask(url))
            several = asyncio.run(ask(url, n=2))
            snapshot = httpx.get(f"{url}/dashboard/data", timeout=600).json()
            metrics = httpx.get(f"{url}/metrics", timeout=600).text
        finally:
            stop(process)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {
        "answers": [answer, several],
        "lines": lines,
        "spans": collector.spans(),
        "snapshot": snapshot,
        "metrics": metrics,
    }


def test_the_log_has_one_json_line_per_request(observed):
    ended = [line for line in observed["lines"] if line["message"] == "request ended"]
    assert [(line["request_id"], line["trace_id"], line["finish_reason"]) for line in ended] == [
        ("mine", TRACE, "length")
    ] * 3
    assert {(line["prompt_tokens"], line["output_tokens"]) for line in ended} == {(4, 4)}
    assert {(line["prefill_instance"], line["decode_instance"]) for line in ended} == {("prefill-0", "decode-0")}
    assert any(line["message"].startswith("ready on ") for line in observed["lines"])
    assert "7, 8, 9, 10" not in json.dumps(observed["lines"])


def test_spans_are_below_the_clients_span(observed):
    told = observed["answers"][0].headers["traceparent"].split("-")
    assert told[1] == TRACE
    spans = observed["spans"]
    (mine,) = [span for span in spans if span.span_id.hex() == told[2]]
    assert (mine.name, mine.parent_span_id.hex()) == ("text_completion m", SPAN)
    stages = {span.name for span in spans if span.parent_span_id == mine.span_id}
    assert stages == {"queue", "prefill", "hand-off", "decode queue", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert sum(span.name == "text_completion m" for span in spans) == 3


def test_the_snapshot_has_instances_requests_and_slo(observed):
    snapshot = observed["snapshot"]
    states = [(each["instance"], each["role"], each["state"]) for each in snapshot["instances"]]
    assert states == [("decode-0", "decode", "up"), ("prefill-0", "prefill", "up")]
    assert all(each["status"]["blocks_total"] > 0 for each in snapshot["instances"])
    assert [request["finish_reason"] for request in snapshot["requests"]] == ["length"] * 3
    assert (snapshot["totals"]["ended_length"], snapshot["totals"]["handoffs"]) == (3, 3)
    assert (snapshot["recent"]["good"], snapshot["recent"]["ttft"]["count"]) == (1.0, 3)


def test_metrics_have_roles_states_and_slo(observed):
    for line in (
        'twofold:instance_role{instance="prefill-0",role="prefill"} 1.0',
        'twofold:instance_state{instance="decode-0",state="up"} 1.0',
        'twofold:request_slo_total{met="true"} 3.0',
    ):
        assert line in observed["metrics"]
