"""For how long a request wants its prompt kept: what OpenAI calls prompt caching, as it is meant here."""

from typing import Final

from twofold.errors import RequestError
from twofold.serving.gateway.schemas import GenerationFields

# OpenAI wrote the first as the second until 2026, and clients still do. Both mean: as long as there is room.
RETENTIONS: Final = {"in_memory": 0.0, "in-memory": 0.0, "24h": 24 * 3600.0}
MODES: Final = ("implicit",)

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def retention_s(fields: GenerationFields, longest_s: float) -> float:
    """Seconds for which the prompt is to be kept, at most `longest_s`; 0 asks for nothing.

    Of `prompt_cache_retention` and `prompt_cache_options.ttl` the longer counts. Raises RequestError.
    """
    wanted_s = 0.0
    if fields.prompt_cache_retention is not None:
        if fields.prompt_cache_retention not in RETENTIONS:
            raise RequestError(
                f"prompt_cache_retention: {fields.prompt_cache_retention!r} is none of in_memory and 24h",
                param="prompt_cache_retention",
                code="invalid_value",
            )
        wanted_s = RETENTIONS[fields.prompt_cache_retention]
    options = fields.prompt_cache_options
    if options is not None:
        if options.mode is not None and options.mode not in MODES:
            raise RequestError(
                "prompt_cache_options.mode: not supported by this service, which keeps every full block of a prompt; "
                "leave it out or send implicit",
                param="prompt_cache_options.mode",
                code="unsupported_parameter",
            )
        if options.ttl is not None:
            ttl = options.ttl.strip()  # the pattern lets a last newline through
            wanted_s = max(wanted_s, int(ttl[:-1]) * _UNITS[ttl[-1]])
    return min(wanted_s, longest_s)
