"""Paths of public traces, and hypothesis strategies for requests."""

from pathlib import Path

import pytest
from hypothesis import strategies as st

from twofold.bench.real_data import find_data
from twofold.request import Request

ROOT = Path(__file__).parents[2]


def public_trace(name: str) -> Path:
    """Return the path of a public trace, or skip the test if the trace is absent."""
    path = find_data(f"traces/{name}")
    if path is None:
        pytest.skip(f"{name} is absent: `make data` downloads public traces, TWOFOLD_DATA locates others")
    return path


def ask(index=0, arrival_s=0.0, prompt_tokens=100, output_tokens=10, prefix_blocks=()):
    return Request(
        id=str(index),
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefix_blocks=tuple(prefix_blocks),
    )


NOTHING = st.just(None)
NO_BLOCKS = st.just(())


def request_lists(*, min_size=1, ids=NOTHING, blocks=NO_BLOCKS):
    """Hypothesis strategy for lists of requests in order of arrival."""
    lengths = st.integers(1, 2**31 - 1)
    rows = st.tuples(st.floats(0, 1e5), lengths, lengths, blocks, ids)
    return st.lists(rows, min_size=min_size, max_size=30).map(_in_order)


def _in_order(rows):
    times = sorted(row[0] for row in rows)
    return [
        Request(
            id=str(index) if name is None else name,
            arrival_s=time - times[0],
            prompt_tokens=prompt,
            output_tokens=output,
            prefix_blocks=tuple(blocks),
        )
        for index, (time, (_, prompt, output, blocks, name)) in enumerate(zip(times, rows, strict=True))
    ]
