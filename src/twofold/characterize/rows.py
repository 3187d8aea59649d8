"""Functions that convert token arrival times to rows of a profile CSV, and CSV rows to measured iteration times."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Final

import msgspec

from twofold.characterize.probes import ProbeKind, SweepProbe, chunks_of, mean_prompt
from twofold.characterize.target import ProbeStream, StreamTimes, TargetLimits
from twofold.performance.fitting.iterations import IterationWork, Measurement
from twofold.performance.fitting.profile import ProfileRow

_LEAST_MS: Final = 1e-3  # 0 means not measured
_FEWEST_GAPS: Final = 4
_TORN: Final = 1.5  # a gap of this many usual gaps computes a part of a prompt


def rows_of(
    probe: SweepProbe, times: Sequence[StreamTimes], limits: TargetLimits, pair: tuple[str, str, int]
) -> Iterator[ProfileRow]:
    """Convert the token times of a probe's requests to rows of the profile CSV."""
    makers = {
        ProbeKind.PREFILL: _prefill,
        ProbeKind.PARALLEL: _prefill,
        ProbeKind.DECODE: _decode,
        ProbeKind.MIXED: _mixed,
        ProbeKind.CACHED: _cached,
        ProbeKind.IDLE: _idle,
        ProbeKind.TRANSFER: _transfer,
    }
    model, hardware, tensor_parallel = pair
    for fields in makers[probe.kind](probe, times, limits):
        named = {"model": model, "hardware": hardware, "tensor_parallel": tensor_parallel, **fields}
        yield msgspec.convert(named, ProfileRow)


def _prefill(probe: SweepProbe, times: Sequence[StreamTimes], _: TargetLimits) -> Iterator[dict[str, object]]:
    began, ended = min(each.sent_s for each in times), max(each.token_times_s[0] for each in times)
    yield {**_sizes(probe.running), "prompt_time": _ms(ended - began)}


def _decode(probe: SweepProbe, times: Sequence[StreamTimes], _: TargetLimits) -> Iterator[dict[str, object]]:
    gaps = [after - before for before, after in steps_together(times)]
    if len(gaps) >= _FEWEST_GAPS:
        yield {**_sizes(probe.running), "token_time": _ms(fmean(gaps))}


def steps_together(times: Sequence[StreamTimes]) -> list[tuple[float, float]]:
    """Return the arrival times of consecutive tokens, from when all streams have started until the first has ended."""
    began, ended = max(each.token_times_s[0] for each in times), min(each.token_times_s[-1] for each in times)
    steps = (step for each in times for step in pairwise(each.token_times_s))
    return [(before, after) for before, after in steps if began <= before and after <= ended]


def _mixed(probe: SweepProbe, times: Sequence[StreamTimes], limits: TargetLimits) -> Iterator[dict[str, object]]:
    running, injected = times[: len(probe.running)], times[len(probe.running) :]
    last = max(running, key=lambda each: each.token_times_s[0])
    boundaries = last.token_times_s
    usual = median(after - before for before, after in pairwise(boundaries))
    for number, (stream, each) in enumerate(zip(probe.injected, injected, strict=True)):
        others = [other for place, other in enumerate(injected) if place != number]
        if any(other.sent_s < each.token_times_s[0] and each.sent_s < other.token_times_s[0] for other in others):
            continue
        first = bisect_right(boundaries, each.sent_s) - 1
        end = min(range(len(boundaries)), key=lambda index: abs(boundaries[index] - each.token_times_s[0]))
        gaps = [after - before for before, after in pairwise(boundaries[first : end + 1])]
        if first < 0 or not gaps or end + 1 == len(boundaries):
            continue
        chunks = chunks_of(stream.prompt_tokens, limits, len(running))
        if limits.max_num_batched_tokens is None:
            chunks = max(1, sum(gap > _TORN * usual for gap in gaps))
        plain = len(gaps) - chunks
        if plain < 0:
            continue
        yield {
            "prompt_size": stream.prompt_tokens,
            "batch_size": 1,
            "token_size": 1,
            "running": len(running),
            "running_context": sum(one.prompt_tokens + end for one in probe.running),
            "chunks": chunks,
            "mixed_time": _ms(sum(gaps) - plain * usual),
        }


def _cached(probe: SweepProbe, times: Sequence[StreamTimes], _: TargetLimits) -> Iterator[dict[str, object]]:
    first, again = times
    yield {**_sizes(probe.running), "prompt_time": _ms(first.ttft_s), "cached_time": _ms(again.ttft_s)}


def _idle(probe: SweepProbe, times: Sequence[StreamTimes], _: TargetLimits) -> Iterator[dict[str, object]]:
    yield {**_sizes(probe.running), "idle_time": _ms(probe.idle_s), "cold_time": _ms(times[0].ttft_s)}


def _transfer(probe: SweepProbe, times: Sequence[StreamTimes], _: TargetLimits) -> Iterator[dict[str, object]]:
    second, *others = (after - before for before, after in pairwise(times[0].token_times_s))
    yield {**_sizes(probe.running), "transfer_time": max(_ms(second - median(others)), _LEAST_MS)}


def _sizes(streams: Sequence[ProbeStream]) -> dict[str, object]:
    return {"prompt_size": mean_prompt(streams), "batch_size": len(streams), "token_size": streams[0].output_tokens}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def measurements(rows: Iterable[ProfileRow], limits: TargetLimits) -> list[Measurement]:
    """Convert rows of a profile CSV, of one model on one machine, to measurements for fitting iteration times."""
    budget, requests = limits.max_num_batched_tokens, int(limits.remote)
    made: list[Measurement] = []
    for row in rows:
        if row.prompt_time:
            work = packed([row.prompt_size] * row.batch_size, budget)
            made.append(Measurement(work=work, seconds=row.prompt_time / 1e3, requests=requests))
        if row.token_time:
            decode = IterationWork(0, 0, row.batch_size, round(row.mean_context))
            made.append(Measurement(work=(decode,), seconds=row.token_time / 1e3))
        if row.mixed_time:
            size = -(-row.prompt_size // row.chunks)
            chunks = packed([row.prompt_size], size)
            work = tuple(each._replace(sequences=row.running, context=row.running_context) for each in chunks)
            made.append(Measurement(work=work, seconds=row.mixed_time / 1e3))
    return made


def packed(prompts: Sequence[int], budget: int | None) -> tuple[IterationWork, ...]:
    """Split the prefill of several prompts into iterations of at most `budget` tokens (None: no limit)."""
    iterations: list[IterationWork] = []
    tokens = squares = 0
    for prompt in prompts:
        computed = 0
        while computed < prompt:
            part = prompt - computed if budget is None else min(prompt - computed, budget - tokens)
            squares += part * (part + 2 * computed)
            tokens, computed = tokens + part, computed + part
            if tokens == budget:
                iterations.append(IterationWork(tokens, squares))
                tokens = squares = 0
    if tokens:
        iterations.append(IterationWork(tokens, squares))
    return tuple(iterations)
