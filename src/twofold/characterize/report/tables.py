"""Tables of a characterization, for printing in a terminal."""

from collections.abc import Iterator
from typing import Final

from rich.table import Table

from twofold.characterize.analysis import Characterization, cached_speedup
from twofold.reporting.output import table
from twofold.reporting.summary import NOTHING

_PROMPTS: Final = (128, 512, 1024, 2048, 4096, 8192)
_BATCHES: Final = (1, 4, 16, 64, 256)
_CONTEXT: Final = 512
_MIXED: Final = ((256, 4), (512, 8), (1024, 16))  # (prompt tokens, decodes)


def characterization_table(found: Characterization) -> Table:
    """Return a table of one instance's predicted times, throughput, saturation points, and errors on held-out data."""
    times = found.times
    basis = f"{found.name}: {times.iterations} distinct measurements"
    made = table(basis, ("", "time (ms)", "tokens/s", "median held-out error"), right=(1, 2, 3))
    groups = (
        (_prefills(found), times.prefill_error),
        (_decodes(found), times.decode_error),
        (_mixed(found), times.mixed_error),
    )
    for rows, error in groups:
        errors = iter([percent(error)])
        for label, seconds, tokens in rows:
            made.add_row(label, _ms(seconds), f"{tokens / seconds:,.0f}", next(errors, ""))
        made.add_section()
    for label, text in findings(found):
        made.add_row(label, text)
    return made


def _prefills(found: Characterization) -> Iterator[tuple[str, float, int]]:
    for tokens in (size for size in _PROMPTS if size <= found.longest_prefill):
        yield f"prefill of {tokens:,} tokens", found.times.seconds(tokens, tokens * tokens, 0, 0), tokens


def _decodes(found: Characterization) -> Iterator[tuple[str, float, int]]:
    for batch in (size for size in _BATCHES if size <= found.largest_batch):
        yield f"{batch} x decode over {_CONTEXT} tokens", found.times.seconds(0, 0, batch, batch * _CONTEXT), batch


def _mixed(found: Characterization) -> Iterator[tuple[str, float, int]]:
    for tokens, batch in _MIXED:
        if found.times.mixed_error is not None and tokens <= found.longest_prefill and batch <= found.largest_batch:
            seconds = found.times.seconds(tokens, tokens * tokens, batch, batch * _CONTEXT)
            yield f"prefill of {tokens:,} tokens + {batch} x decode", seconds, tokens + batch


def findings(found: Characterization) -> Iterator[tuple[str, str]]:
    """Yield table rows (label, text) of results of an instance, such as its KV capacity and saturation points."""
    yield "prefill throughput saturates at", f"{found.prefill_knee():,} tokens"
    knee = found.decode_knee()
    yield "decode throughput saturates at", "no measured batch" if knee is None else f"{knee:,} sequences"
    yield "KV capacity", f"{found.profile.kv_capacity_tokens:,} tokens"
    if found.profile.request_s:
        yield "a request outside the engine", f"{_ms(found.profile.request_s)} ms"
    if found.times.cold_s:
        yield "an iteration after 2 s without work", f"{_ms(found.times.cold_start_s(2.0))} ms longer"
    speedup = cached_speedup(found.rows)
    if speedup is not None:
        yield "TTFT of a repeated prompt", f"{speedup:.1f}x faster"
    if found.profile.power is not None:
        power = found.profile.power
        yield (
            "power of prefill, of decode",
            f"{power.prefill_share:.0%}, {power.decode_share:.0%} of {power.tdp_w:,.0f} W",
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def percent(error: float | None) -> str:
    """Format a relative error as a percentage; None (not measured) becomes a dash."""
    return NOTHING if error is None else f"{error:.1%}"
