"""What a service takes on at once, and what it answers when that is too much. Structs, so not compiled."""

from enum import StrEnum

import msgspec


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one API key may ask for; None means no limit.

    `max_concurrent` counts its requests that wait or run. `requests_per_minute` is a token bucket that holds a
    minute's worth: that many may come at once, and then one every 60 / `requests_per_minute` seconds.
    """

    max_concurrent: int | None = None
    requests_per_minute: int | None = None


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on the whole service.

    `max_running` requests are handed to the cluster at once and `max_waiting` wait in front of it. A request that
    names no deadline has `timeout_s` seconds from its arrival, so that nothing waits for ever, whatever its
    priority. `keys` holds the limits of each API key by its name.
    """

    max_running: int = 1024
    max_waiting: int = 1024
    timeout_s: float = 1800.0
    keys: dict[str, KeyLimits] = {}


class RefusalReason(StrEnum):
    """What there was too much of. The last three are those of overload control: work that is there already, or, beyond
    the SLO, the request itself."""

    QUEUE_FULL = "queue-full"
    KEY_LIMIT = "key-limit"
    DEADLINE = "deadline"
    PREFILL_LOAD = "prefill-load"
    DECODE_LOAD = "decode-load"
    BEYOND_SLO = "beyond-slo"


class Refusal(msgspec.Struct, frozen=True):
    """A request is not taken; the same one would be, `retry_after_s` (at least 1) whole seconds from now.

    That is an estimate from how fast requests ended lately. It holds while that goes on and nobody else comes first.
    """

    reason: RefusalReason
    retry_after_s: int
