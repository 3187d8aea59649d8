"""Log formats: text lines, or one JSON object per line (`--log-format json`).

Logs never contain prompts, answers or keys: request lines consist of sizes and times.
"""

import logging
import sys
from datetime import UTC, datetime

import msgspec

from twofold.errors import ConfigurationError

LOG_FORMATS = ("text", "json")
FIELDS = "fields"  # attribute of a log record with additional fields


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, additional fields and exception."""

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
    """Log to standard error; raises ConfigurationError for an unknown format."""
    if log_format not in LOG_FORMATS:
        raise ConfigurationError(f"--log-format {log_format!r} is unknown: choose one of {', '.join(LOG_FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.getLogger("twofold").setLevel(logging.INFO)
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
