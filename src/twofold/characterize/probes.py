"""Probes for `twofold characterize`.

A probe is a group of requests that measures one property of an instance:

    kind      requests                                        measures
    prefill   one prompt alone                                prefill time by prompt length
    parallel  several prompts at once                         prefill time by number of batched tokens
    decode    requests that decode in one batch               iteration time by batch size and context length
    mixed     decoding requests, and prompts sent meanwhile   time of an iteration with a prompt and decodes
    cached    one prompt, sent twice                          prefill time with a prefix-cache hit
    idle      one prompt after an idle time                   by how much longer its prefill takes
    transfer  one request to a disaggregated service          delay of the second token due to the KV transfer

Most prompt lengths are primes, because kernels compute in tiles: a prompt that fills its tiles takes less time than
most prompts of a workload. Requests that decode together have contexts of different lengths, as in a workload.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from twofold.bench.prompts import unlike_lengths
from twofold.characterize.target import ProbeStream, TargetLimits

_PROMPTS: Final = (2, 7, 23, 47, 97, 163, 257, 401, 641, 997, 1499, 1999, 3001, 4001, 5987, 7993, 12007, 16001, 23993)
_TOGETHER: Final = ((31, 6), (127, 7), (401, 5), (701, 6), (997, 9))  # (prompt tokens, prompts)
_BATCHES: Final = (1, 2, 3, 5, 7, 11, 17, 24, 33, 47, 65, 96, 130, 190, 255)
_CONTEXTS: Final = (61, 509, 1999)
_BESIDE: Final = (1, 4, 15, 40)  # decodes beside which prompts are sent
_INJECTED: Final = (17, 67, 199, 499, 997, 1999)
_IDLE: Final = (0.5, 2.0, 8.0)  # seconds
_IDLE_PROMPT: Final = 23  # tokens; one of `_PROMPTS`
_GAPS: Final = 24  # decode iterations that a probe measures
_SETTLE: Final = 6  # decode iterations before and after a prompt is sent
_TOKENS_PER_S: Final = 1000  # prefilled by a slow instance
_MOST_TOKENS: Final = 262_144  # of all requests of a probe
_CHUNK: Final = 2048  # assumed size of prefill chunks of an endpoint that does not tell its own
_RESERVED: Final = 8  # context left free, because a tokenizer may add tokens


class ProbeKind(StrEnum):
    """Kind of measurement that a probe makes, such as prefill times."""

    PREFILL = "prefill"
    PARALLEL = "parallel"
    DECODE = "decode"
    MIXED = "mixed"
    CACHED = "cached"
    IDLE = "idle"
    TRANSFER = "transfer"


# Probes of an instance's speed: (kind, mean prompt tokens, requests, output tokens)
_SPEED: Final = (
    (ProbeKind.PREFILL, 101, 1, 1),
    (ProbeKind.PREFILL, 307, 1, 1),
    (ProbeKind.PREFILL, 907, 1, 1),
    (ProbeKind.DECODE, 200, 1, 16),
    (ProbeKind.DECODE, 300, 4, 16),
)


class SweepProbe(msgspec.Struct, frozen=True, kw_only=True):
    """A group of requests that measures one property of an instance."""

    kind: ProbeKind
    streams: tuple[ProbeStream, ...]
    idle_s: float = 0.0  # idle time before the requests, in seconds

    @property
    def running(self) -> list[ProbeStream]:
        """Requests that start at the beginning of the probe."""
        return [stream for stream in self.streams if not stream.after_tokens]

    @property
    def injected(self) -> list[ProbeStream]:
        """Requests that start after the `running` requests have produced output tokens."""
        return [stream for stream in self.streams if stream.after_tokens]

    @property
    def name(self) -> str:
        """Display name of the probe, such as `mixed 4x512+200`."""
        many = f"{len(self.running)}x{mean_prompt(self.running)}"
        beside = "".join(f"+{stream.prompt_tokens}" for stream in self.injected)
        after = f" after {self.idle_s:g} s" if self.idle_s else ""
        return f"{self.kind.value} {many}{beside}{after}"

    @property
    def cost(self) -> float:
        """Approximate duration of the probe, in units of the prefill time of a token."""
        return self.tokens + _TOKENS_PER_S * self.idle_s

    @property
    def tokens(self) -> int:
        """Sum of the prompt and output tokens of all requests of the probe."""
        return sum(stream.prompt_tokens + stream.output_tokens for stream in self.streams)


def mean_prompt(streams: Sequence[ProbeStream]) -> int:
    """Return the mean number of prompt tokens, rounded."""
    return round(sum(stream.prompt_tokens for stream in streams) / len(streams))


def probes(limits: TargetLimits) -> list[SweepProbe]:
    """Return the probes within the limits of an instance. Kinds and sizes of probes are interleaved."""
    kinds = (_transfers,) if limits.disaggregated else (_prefills, _decodes, _mixed, _parallel, _cached, _idle)
    # Interleaved, so that a sweep that ends early has measured all kinds and both small and large sizes.
    ranked: list[tuple[float, SweepProbe]] = []
    for kind in kinds:
        found = sorted(kind(limits), key=lambda probe: probe.tokens)
        order = sorted(range(len(found)), key=_bisecting)
        ranked += [(place / len(found), found[index]) for place, index in enumerate(order)]
    return [probe for _, probe in sorted(ranked, key=lambda entry: entry[0])]


def speed_probes(limits: TargetLimits) -> list[SweepProbe]:
    """Return a few short probes of prefill and of decode, which measure how fast an instance is at present."""
    return [SweepProbe(kind=kind, streams=_unlike(mean, count, output, limits)) for kind, mean, count, output in _SPEED]


def _bisecting(index: int) -> float:
    # The van der Corput number of the index: sorting by it bisects the gaps between indices.
    number, unit = 0.0, 0.5
    while index:
        number += unit * (index & 1)
        index, unit = index >> 1, unit / 2
    return number


def _longest(limits: TargetLimits, output: int) -> int:
    return limits.max_model_len - output - _RESERVED


def _prefills(limits: TargetLimits) -> Iterator[SweepProbe]:
    longest = _longest(limits, 1)
    for tokens in (size for size in _PROMPTS if size <= longest):
        yield SweepProbe(kind=ProbeKind.PREFILL, streams=(_stream(tokens, 1),))


def _parallel(limits: TargetLimits) -> Iterator[SweepProbe]:
    for tokens, count in _TOGETHER:
        if tokens <= _longest(limits, 1) and _fits(limits, [tokens] * count, 1):
            yield SweepProbe(kind=ProbeKind.PARALLEL, streams=(_stream(tokens, 1),) * count)


def _decodes(limits: TargetLimits) -> Iterator[SweepProbe]:
    for batch in _BATCHES:
        for context in _CONTEXTS:
            # The first prompts decode while the last ones are computed.
            output = _GAPS + 2 + context * batch // (limits.max_num_batched_tokens or _CHUNK)
            if context <= _longest(limits, output) and _fits(limits, [context] * batch, output):
                yield SweepProbe(kind=ProbeKind.DECODE, streams=_unlike(context, batch, output, limits))


def _mixed(limits: TargetLimits) -> Iterator[SweepProbe]:
    for batch in _BESIDE:
        injected, output = list[ProbeStream](), _SETTLE
        for prompt in _INJECTED:
            injected.append(ProbeStream(prompt_tokens=prompt, output_tokens=1, after_tokens=output))
            output += chunks_of(prompt, limits, batch) + _SETTLE
        while injected:
            context = min(257, _longest(limits, output))
            together = [context] * batch + [injected[-1].prompt_tokens]
            if context > 0 and injected[-1].prompt_tokens <= _longest(limits, 1) and _fits(limits, together, output):
                running = _unlike(context, batch, output, limits)
                yield SweepProbe(kind=ProbeKind.MIXED, streams=(*running, *injected))
                break
            output = injected.pop().after_tokens


def _cached(limits: TargetLimits) -> Iterator[SweepProbe]:
    tokens = min(997, _longest(limits, 1))
    again = ProbeStream(prompt_tokens=tokens, output_tokens=1, after_tokens=1, prompt=0)
    yield SweepProbe(kind=ProbeKind.CACHED, streams=(msgspec.structs.replace(again, after_tokens=0), again))


def _idle(_: TargetLimits) -> Iterator[SweepProbe]:
    for idle_s in _IDLE:
        yield SweepProbe(kind=ProbeKind.IDLE, streams=(_stream(_IDLE_PROMPT, 1),), idle_s=idle_s)


def _transfers(limits: TargetLimits) -> Iterator[SweepProbe]:
    longest = _longest(limits, _SETTLE)
    for tokens in (size for size in _PROMPTS if size <= longest):
        yield SweepProbe(kind=ProbeKind.TRANSFER, streams=(_stream(tokens, _SETTLE),))


def chunks_of(tokens: int, limits: TargetLimits, decodes: int = 0) -> int:
    """Return the number of prefill chunks of a prompt that shares batches with `decodes` decoding requests."""
    budget = limits.max_num_batched_tokens
    return 1 if budget is None else -(-tokens // max(1, budget - decodes))


def _stream(prompt: int, output: int) -> ProbeStream:
    return ProbeStream(prompt_tokens=prompt, output_tokens=output)


def _unlike(mean: int, count: int, output: int, limits: TargetLimits) -> tuple[ProbeStream, ...]:
    return tuple(_stream(tokens, output) for tokens in unlike_lengths(mean, count, _longest(limits, output)))


def _fits(limits: TargetLimits, prompts: Sequence[int], output: int) -> bool:
    tokens = sum(prompts) + output * len(prompts)
    capacity = min(_MOST_TOKENS, limits.kv_capacity_tokens or _MOST_TOKENS)
    return tokens <= capacity and len(prompts) <= (limits.max_num_seqs or len(prompts))
