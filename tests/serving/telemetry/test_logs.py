"""Request logs in JSON."""

import json
import logging

import pytest

from support.timelines import SPLIT_MOMENTS, request_timeline
from twofold.serving.telemetry.context import context_of
from twofold.serving.telemetry.logs import JsonFormatter, TextFormatter, configure_logs, log_ended, log_rejected


@pytest.fixture
def lines(caplog):
    """Return a function that parses the logged lines as JSON."""
    caplog.set_level(logging.INFO, "twofold.requests")
    formatter = JsonFormatter()
    return lambda: [json.loads(formatter.format(record)) for record in caplog.records]


def test_a_finished_request_is_one_line(lines):
    context = context_of("mine", "/v1/completions", "")
    log_ended(request_timeline([4.0, 6.0, 7.0], **SPLIT_MOMENTS), context, "llama")
    (line,) = lines()
    assert line["time"].endswith("+00:00")
    assert {name: line[name] for name in line if name != "time"} == {
        "level": "info",
        "logger": "twofold.requests",
        "message": "request ended",
        "id": "r",
        "request_id": "mine",
        "trace_id": context.span.trace_id,
        "operation": "text_completion",
        "model": "llama",
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 3,
        "finish_reason": "length",
        "prefill_instance": "prefill-0",
        "decode_instance": "decode-0",
        "queue_s": 1.0,
        "prefill_s": 2.0,
        "transfer_s": 2.0,
        "ttft_s": 3.0,
        "tpot_s": 1.5,
        "e2e_s": 6.0,
    }


def test_a_rejected_request_is_one_line_with_its_reason(lines):
    log_rejected("r", 10, "queue_full", None)
    (line,) = lines()
    assert (line["id"], line["reason"], line["prompt_tokens"]) == ("r", "queue_full", 10)


def test_tracebacks_and_non_json_values_stay_in_one_line(lines, caplog):
    try:
        int("two\nlines")
    except ValueError:
        logging.getLogger("twofold.x").exception("it failed", extra={"fields": {"odd": object}})
    (record,) = caplog.records
    assert "\n" not in JsonFormatter().format(record)
    (line,) = lines()
    assert "ValueError: invalid literal" in line["exception"]


def test_the_text_format_has_request_lines_on_demand(caplog, monkeypatch):
    log = logging.getLogger("twofold.requests")
    monkeypatch.setattr(log, "level", log.level)
    configure_logs("text")
    log_ended(request_timeline([4.0]), None, "llama")
    log_rejected("r", 10, "queue_full", None)
    assert not caplog.records
    configure_logs("text", requests=True)
    log_ended(request_timeline([4.0, 6.0, 7.0], **SPLIT_MOMENTS), None, "llama")
    log_rejected("r", 10, "queue_full", None)
    ended, rejected = map(TextFormatter("%(levelname)s %(message)s").format, caplog.records)
    assert ended.startswith("INFO request ended id=r model=llama prompt_tokens=10 cached_tokens=0 output_tokens=3 ")
    assert "prefill_instance=prefill-0 decode_instance=decode-0" in ended
    assert "ttft_s=3.0 tpot_s=1.5" in ended
    assert rejected == "INFO request rejected id=r prompt_tokens=10 reason=queue_full"
