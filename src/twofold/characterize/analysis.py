"""Analysis of the measurements of one instance: fitted profile, and batch sizes at which throughput saturates."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Final

import msgspec
import numpy as np
from scipy.optimize import nnls

from twofold.characterize.rows import measurements
from twofold.characterize.target import TargetLimits
from twofold.hardware.specs import Model
from twofold.performance.fitting.iterations import fit_iterations
from twofold.performance.fitting.profile import ProfileRow, consistent_rows
from twofold.performance.profile import IterationTimes, KvLink, MachineCosts, MeasuredPower, MeasuredProfile

_SATURATED: Final = 0.95  # share of the highest throughput from which a phase counts as saturated
_PROMPT: Final = 512  # tokens of each prompt of a larger batch
_UNLIMITED: Final = 1 << 20
_NOISE: Final = 0.05  # variation of a prefill time
_HALVES_S: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class InstanceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an instance that are stated rather than measured, such as its model, engine and price."""

    model: Model
    engine: str
    kv_capacity_tokens: int
    source: str
    date: str
    costs: MachineCosts = MachineCosts()
    link: KvLink | None = None


class Characterization(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted profile of one model on one instance, with the measurements behind it."""

    profile: MeasuredProfile
    rows: tuple[ProfileRow, ...] = ()

    @property
    def name(self) -> str:
        """Display name, such as `llama2-70b on h100-80gb TP8, vLLM 0.24`."""
        profile = self.profile
        parallel = f" TP{profile.tensor_parallel}" if profile.tensor_parallel > 1 else ""
        engine = f", {profile.engine}" if profile.engine else ""
        return f"{profile.model.name} on {profile.machine}{parallel}{engine}"

    @property
    def times(self) -> IterationTimes:
        return self.profile.times

    @property
    def longest_prefill(self) -> int:
        """Largest number of prompt tokens that one measured iteration computed."""
        measured = max((row.prompt_size * row.batch_size for row in self.rows if row.prompt_time), default=8192)
        return min(measured, self.profile.max_num_batched_tokens or _UNLIMITED)

    @property
    def largest_batch(self) -> int:
        """Largest number of sequences in a measured decode iteration."""
        return max((row.batch_size for row in self.rows if row.token_time), default=64)

    def prefill_rate(self, tokens: int) -> float:
        """Return the prefill throughput in tokens/s of iterations with `tokens` prompt tokens."""
        return tokens / self.times.seconds(tokens, tokens * min(tokens, _PROMPT), 0, 0)

    def decode_rate(self, sequences: int, context: int) -> float:
        """Return decode throughput in tokens/s of `sequences` sequences with `context` tokens in the KV cache each."""
        return sequences / self.times.seconds(0, 0, sequences, sequences * context)

    def ttft_s(self, tokens: int) -> float:
        """Return the TTFT in seconds of a prompt without queueing."""
        chunk = self.profile.max_num_batched_tokens or tokens
        starts = range(0, tokens, chunk)
        chunks = ((min(chunk, tokens - start), start) for start in starts)
        return self.profile.request_s + sum(
            self.times.seconds(size, size * (size + 2 * start), 0, 0) for size, start in chunks
        )

    def prefill_knee(self) -> int:
        """Return the smallest number of prompt tokens per iteration with 95% of the highest prefill throughput."""
        return _knee(self.longest_prefill, self.prefill_rate)

    def decode_knee(self, context: int = 512) -> int | None:
        """Return the smallest batch size, in sequences, with 95% of the highest decode throughput.

        Return None if throughput still grows above half of the largest measured batch. Each sequence has `context`
        tokens in the KV cache.
        """
        knee = _knee(self.largest_batch, lambda batch: self.decode_rate(batch, context))
        # Above half of the largest batch, throughput still grows.
        return knee if knee <= self.largest_batch / 2 else None


def _knee(largest: int, rate: Callable[[int], float]) -> int:
    sizes = sorted({max(1, round(largest * 2 ** (-step / 8))) for step in range(200)})
    rates = [rate(size) for size in sizes]
    return next(size for size, each in zip(sizes, rates, strict=True) if each >= _SATURATED * max(rates))


def characterization(
    rows: Sequence[ProfileRow], limits: TargetLimits, facts: InstanceFacts, power: MeasuredPower | None
) -> Characterization:
    """Fit a profile to the measurements of one instance. Raises ConfigurationError if there are too few."""
    _, hardware, tensor_parallel = rows[0].pair
    kept = consistent_rows(rows)
    fitted = fit_iterations(measurements(kept, limits))
    cold_s, cold_half_s = measured_cold_start(kept)
    profile = MeasuredProfile(
        **{name: getattr(facts, name) for name in facts.__struct_fields__},
        times=msgspec.structs.replace(fitted.times, cold_s=cold_s, cold_half_s=cold_half_s),
        machine=hardware,
        tensor_parallel=tensor_parallel,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        request_s=fitted.request_s,
        power=power,
    )
    if facts.link is None:
        profile = msgspec.structs.replace(profile, link=measured_link(kept, facts.model))
    return Characterization(profile=profile, rows=tuple(kept))


def measured_link(rows: Sequence[ProfileRow], model: Model) -> KvLink | None:
    """Fit latency and bandwidth of a link to measured KV transfers. Return None for fewer than two prompt lengths."""
    transfers = median_by_size((row.prompt_size, row.transfer_time) for row in rows if row.transfer_time)
    if len(transfers) < 2:
        return None
    work = np.array([[1.0, tokens * model.kv_bytes_per_token] for tokens in transfers])
    latency_s, byte_s = nnls(work, np.array(list(transfers.values())) / 1e3)[0].tolist()
    return KvLink(bytes_per_s=1.0 / max(byte_s, 1e-15), latency_s=latency_s, layer_wise=False)


def measured_cold_start(rows: Sequence[ProfileRow]) -> tuple[float, float]:
    """Fit `cold_s` and `cold_half_s` of `IterationTimes` to prefills after idle times.

    Return zeros if nothing was measured, or if no prefill took longer than its usual variation.
    """
    cold = median_by_size((round(row.idle_time), row.cold_time) for row in rows if row.cold_time)
    sizes = {row.prompt_size for row in rows if row.cold_time}
    warm = [row.prompt_time for row in rows if row.prompt_time and row.batch_size == 1 and row.prompt_size in sizes]
    if not (cold and warm):
        return 0.0, 0.0
    idle_s = np.array(list(cold)) / 1e3
    longer_s = (np.array(list(cold.values())) - median(warm)) / 1e3
    if longer_s.max() < _NOISE * median(warm) / 1e3:
        return 0.0, 0.0

    def fit(half_s: float) -> tuple[float, float, float]:
        rates, error = nnls((idle_s / (idle_s + half_s))[:, None], longer_s)
        return error, float(rates[0]), half_s

    _, cold_s, cold_half_s = min(fit(half_s) for half_s in _HALVES_S)
    return cold_s, cold_half_s


def median_by_size(points: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Group (size, value) points by size, and return the median value of each group, smallest size first."""
    groups: dict[int, list[float]] = defaultdict(list)
    for size, value in points:
        groups[size].append(value)
    return {size: median(groups[size]) for size in sorted(groups)}


def measured_power(rows: Sequence[ProfileRow], tdp_w: float, source: str) -> MeasuredPower | None:
    """Return prefill power and decode power as fractions of TDP; None if either was not measured."""
    # In a row that times both phases, peak power counts as prefill and, at batch size 1, average power as decode.
    both = [row for row in rows if row.average_power and row.prompt_time and row.token_time]
    prefills = [row.average_power for row in rows if row.average_power and row.prompt_time and not row.token_time]
    prefills += [row.peak_power for row in both if row.peak_power]
    decodes = [row.average_power for row in rows if row.average_power and row.token_time and not row.prompt_time]
    decodes += [row.average_power for row in both if row.average_power and row.batch_size == 1]
    if not (prefills and decodes):
        return None
    return MeasuredPower(tdp_w=tdp_w, prefill_share=max(prefills), decode_share=median(decodes), source=source)


def cached_speedup(rows: Sequence[ProfileRow]) -> float | None:
    """Return the median ratio of TTFT without a prefix-cache hit to TTFT with a hit; None if not measured."""
    ratios = [row.prompt_time / row.cached_time for row in rows if row.cached_time]
    return median(ratios) if ratios else None
