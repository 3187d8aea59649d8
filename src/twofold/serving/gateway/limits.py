"""What the gateway takes on for one HTTP request."""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds on one HTTP request.

    `header_bytes` bounds the request line and all headers together. `prompt_characters` and `prompt_tokens` bound
    each prompt, where the model's context is not bound enough; `choices` bounds `n`; `generations` bounds `n` times
    the number of prompts; `stop_characters` bounds the length of each stop string. A request that names no timeout
    has `timeout_s` seconds to be answered in, and none may name more than `longest_timeout_s`. A prompt is
    kept for `longest_retention_s` at most, whatever is asked for.
    """

    header_bytes: int = 64 * 1024
    body_bytes: int = 32 * 1024 * 1024
    prompt_characters: int | None = None
    prompt_tokens: int | None = None
    timeout_s: float = 1800.0
    longest_timeout_s: float = 24 * 3600.0
    longest_retention_s: float = 3600.0
    choices: int = 128
    generations: int = 2048
    stop_strings: int = 16
    stop_characters: int = 1024
