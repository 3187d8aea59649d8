"""What the gateway takes on for one HTTP request."""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds on one HTTP request.

    `choices` bounds `n`; `generations` bounds `n` times the number of prompts; `stop_characters` bounds the
    length of each stop string.
    """

    body_bytes: int = 32 * 1024 * 1024
    choices: int = 128
    generations: int = 2048
    stop_strings: int = 16
    stop_characters: int = 1024
