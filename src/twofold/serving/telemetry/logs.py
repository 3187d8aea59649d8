"""Logs: a line for a human, or (`--log-format json`) one JSON object a line for a machine.

Neither ever has a prompt, an answer or a key in it: lines about requests are built here from sizes and times.
"""

import logging
import sys
from datetime import UTC, datetime

import msgspec

from twofold.errors import ConfigurationError
from twofold.serving.telemetry.context import RequestContext
from twofold.timeline import Timeline

LOG_FORMATS = ("text", "json")
FIELDS = "fields"  # what a record carries besides its message
requests = logging.getLogger("twofold.requests")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the record's fields, and the exception if any."""

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


def configure_logs(log_format: str) -> None:
    """Send the logs of this process to its standard error; raises ConfigurationError on an unknown format."""
    if log_format not in LOG_FORMATS:
        raise ConfigurationError(
            f"--log-format {log_format!r} is unknown: choose one of {', '.join(LOG_FORMATS)}"
        )
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.getLogger("twofold").setLevel(logging.INFO)
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def log_ended(timeline: Timeline, context: RequestContext | None) -> None:
    """One line for a request that has ended."""
    if not requests.isEnabledFor(logging.INFO):
        return
    reason = timeline.finish_reason
    fields = _identity(timeline.request.id, context) | {
        "prompt_tokens": timeline.request.prompt_tokens,
        "output_tokens": timeline.output_tokens,
        "finish_reason": None if reason is None else reason.value,
        "prefill_instance": timeline.prefill_instance,
        "decode_instance": timeline.decode_instance,
        "queue_s": _rounded(timeline.queue_prefill_s),
        "prefill_s": _rounded(timeline.prefill_s),
        "transfer_s": _rounded(timeline.transfer_s),
        "ttft_s": _rounded(timeline.ttft_s),
        "tpot_s": _rounded(timeline.tpot_s),
        "e2e_s": _rounded(timeline.e2e_s),
    }
    requests.info("request ended", extra={FIELDS: fields})


def log_rejected(request_id: str, prompt_tokens: int, reason: str, context: RequestContext | None) -> None:
    """One line for a request that was refused at the door."""
    if requests.isEnabledFor(logging.INFO):
        fields = _identity(request_id, context) | {"prompt_tokens": prompt_tokens, "reason": reason}
        requests.info("request rejected", extra={FIELDS: fields})


def _identity(request_id: str, context: RequestContext | None) -> dict[str, object]:
    if context is None:
        return {"id": request_id}
    return {
        "id": request_id,
        "request_id": context.id,
        "trace_id": context.span.trace_id,
        "operation": context.operation,
    }


def _rounded(seconds: float | None) -> float | None:
    """To the microsecond."""
    return None if seconds is None else round(seconds, 6)
