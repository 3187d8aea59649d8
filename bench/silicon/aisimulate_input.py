"""Input of AISimulate for peers.py, which has only the standard library, and plans.py."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

BLOCK = 512  # tokens of a block of the trace
ROLES = {"mixed": "aggregated", "prefill": "prefill", "decode": "decode"}  # AISimulate's names
NO_CACHE = {"prefix_caching": False}


def trace_source(trace: Path) -> dict[str, object]:
    """Return the field `traffic.source` for a trace of `trace_lines`."""
    return {"type": "trace", "format": "mooncake", "paths": [str(trace)], "block_size": BLOCK}


def trace_lines(requests: Iterable[tuple[float, int, int]]) -> Iterator[str]:
    """Yield a trace in Mooncake's format, of prompts that share no prefix.

    Each request has an arrival time in seconds, prompt tokens and output tokens.
    """
    blocks = 0
    for arrival_s, prompt, output in requests:
        ids = list(range(blocks, blocks := blocks + -(-prompt // BLOCK)))
        sizes = {"input_length": prompt, "output_length": output, "hash_ids": ids}
        yield json.dumps({"timestamp": round(arrival_s * 1e3), **sizes}) + "\n"
