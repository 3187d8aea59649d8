"""Log formats: text or JSON lines (`--log-format json`). Logs never contain prompts, answers or API keys."""

import logging
import os
import sys
import threading
from datetime import UTC, datetime

import msgspec

from twofold.serving.telemetry.context import RequestContext
from twofold.timeline import Timeline

FIELDS = "fields"  # attribute of a log record with additional fields
_LATENCIES = ("prefill_s", "transfer_s", "ttft_s", "tpot_s", "e2e_s")
request_log = logging.getLogger("twofold.requests")


class JsonFormatter(logging.Formatter):
    """Formatter of log records as JSON objects: time, level, logger, message, additional fields and exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """Formatter of log records as a line of text, with any additional fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, {}).items()
        return super().format(record) + "".join(f" {name}={value}" for name, value in fields if value is not None)


def configure_logs(log_format: str, *, requests: bool = False) -> None:
    """Send logs to standard error in the format `text` or `json`, and with `requests` a line for each request."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.getLogger("twofold").setLevel(logging.INFO)
    else:
        handler.setFormatter(TextFormatter("%(levelname)s %(name)s: %(message)s"))
    if requests:
        request_log.setLevel(logging.INFO)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def log_ended(timeline: Timeline, context: RequestContext | None, model: str) -> None:
    """Log the token counts, instances and latencies of a finished request."""
    if not request_log.isEnabledFor(logging.INFO):
        return
    reason = timeline.finish_reason
    fields = _identity(timeline.request.id, context) | {
        "model": model,
        "prompt_tokens": timeline.request.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "finish_reason": None if reason is None else reason.value,
        "prefill_instance": timeline.prefill_instance,
        "decode_instance": timeline.decode_instance,
        "queue_s": _rounded(timeline.queue_prefill_s),
    }
    fields |= {name: _rounded(getattr(timeline, name)) for name in _LATENCIES}
    request_log.info("request ended", extra={FIELDS: fields})


def log_rejected(request_id: str, prompt_tokens: int, reason: str, context: RequestContext | None) -> None:
    if request_log.isEnabledFor(logging.INFO):
        fields = _identity(request_id, context) | {"prompt_tokens": prompt_tokens, "reason": reason}
        request_log.info("request rejected", extra={FIELDS: fields})


def _identity(request_id: str, context: RequestContext | None) -> dict[str, object]:
    fields: dict[str, object] = {"id": request_id}
    if context is not None:
        fields |= {"request_id": context.id, "trace_id": context.span.trace_id, "operation": context.operation}
    return fields


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def end_process(log: logging.Logger, failed: threading.ExceptHookArgs) -> None:
    """Log the error of a failed thread, and end the process: others would wait for the thread forever."""
    thread = failed.thread.name if failed.thread is not None else "a thread"
    trace = (failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    log.critical("%s failed", thread, exc_info=trace)
    os._exit(1)
