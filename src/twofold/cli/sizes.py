"""Sizes as flags have them."""

from twofold.errors import ConfigurationError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(text: str, flag: str = "--kv-cache-memory-bytes") -> int:
    """Bytes from `1073741824`, `500M` or `2GiB`; raises ConfigurationError on anything else."""
    cleaned = text.strip().upper().removesuffix("B")
    digits = cleaned.rstrip("KMGI")
    unit = cleaned[len(digits) :]
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigurationError(
            f"{flag} {text!r} is not a size: write bytes, or a number with a unit as in 2GiB or 500M"
        )
    return size
