"""Fit the simulator's performance profile to measurements of a live service."""

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec
import numpy as np

from twofold.fidelity.measurement import GroupResult, Measurements, Purpose
from twofold.fidelity.worker_log import LoadSpan, TimedIteration, WorkerLog
from twofold.hardware.specs import Model
from twofold.performance.fitting.fit import Floats, non_negative_least_squares
from twofold.performance.fitting.iterations import Measurement, fit_iterations
from twofold.performance.profile import (
    ContentionFactors,
    GatewayTimes,
    IterationTimes,
    KvLink,
    MeasuredProfile,
    SharedHost,
)

_ALONE, _BESIDE = 0.05, 0.95  # maximum and minimum overlap with another worker, as a fraction of the iteration
_ENOUGH = 5
_WARM = 3  # a cold cost is fitted if at least one prompt in three met a warm worker
_SHARING, _BESIDE_THEM = ("prefill-1", "decode-0"), "prefill-0"  # as `share_cores` places 2P+1D


def calibrate(
    measured: Measurements, model: Model, *, cores: int, threads: int, kv_capacity_tokens: int, source: str, date: str
) -> MeasuredProfile:
    """Fit a performance profile to measurements of a service. Raises ConfigurationError for too few measurements."""
    split = (measured.prefill, measured.decode), (measured.decode, measured.prefill)
    by_itself = [one for log, other in split for one in log.ran if _busy(one, [other]) < _ALONE]
    prompts = [one for one in by_itself if one.iteration.tokens]
    # With slow clients, most prompts reach an idle, cold worker; too few warm prompts remain to separate the cold cost.
    told_apart = sum(not one.cold for one in prompts) * _WARM >= len(prompts)
    alone = [one.iteration for one in by_itself if not (one.cold and told_apart)]
    times = fit_iterations(alone).times
    usual = times.slower(_slowness(times, alone))
    # The gateway shares cores with prefill in a split service, and all cores in a colocated one. The simulation charges
    # its CPU time separately, so the contention factors exclude it.
    beside = (_front_share(measured.of(Purpose.CROWD)) / threads, 0.0)
    crowded = [
        max(1.0, _slower(usual, log, other) * (1.0 - taken)) if cores > 1 else 1.0
        for (log, other), taken in zip(split, beside, strict=True)
    ]
    taken = _front_share(measured.of(Purpose.MIXED)) / cores
    times = fit_iterations([*alone, *_as_if_alone(measured.mixed, crowded, taken)]).times
    # The fit uses medians; scaling to total time includes occasional delays, which reduce throughput.
    times = times.slower(max(1.0, _slowness(times, alone)))
    cold = [one.iteration.seconds - one.iteration.predicted_s(times) for one in by_itself if one.cold]
    times = msgspec.structs.replace(times, cold_s=max(0.0, median(cold)) if cold and told_apart else 0.0)
    prefill, decode = (
        ContentionFactors(crowded=each, shared=_shared(times, measured.shared, phase, each))
        for phase, each in zip(_SHARING, crowded, strict=True)
    )
    return MeasuredProfile(
        model=model,
        engine="twofold",
        times=times,
        link=_link(measured, model, times),
        host=SharedHost(cores=cores, threads=threads, front=_front(measured), prefill=prefill, decode=decode),
        kv_capacity_tokens=kv_capacity_tokens,
        source=source,
        date=date,
    )


def _busy(one: TimedIteration, others: Sequence[WorkerLog]) -> float:
    """Return the mean busy fraction of other workers during a worker's iteration."""
    return sum(other.busy_share(one.start_s, one.end_s) for other in others) / max(1, len(others))


def _slower(times: IterationTimes, log: WorkerLog, other: WorkerLog) -> float:
    """Return the slowdown of a worker's iterations while another worker is busy."""
    return _typical(times, [one for one in log.ran if _busy(one, [other]) > _BESIDE and not one.cold])


def _shared(times: IterationTimes, logs: dict[str, WorkerLog], name: str, crowded: float) -> float:
    """Return the slowdown of a worker's iterations by another worker on the same core."""
    if not logs:
        return 1.0
    (other,) = (log for worker, log in logs.items() if worker in _SHARING and worker != name)
    sharing = [one for one in logs[name].ran if _busy(one, [other]) > _BESIDE and not one.cold]
    beside = sum(_busy(one, [logs[_BESIDE_THEM]]) for one in sharing) / max(1, len(sharing))
    # Without the factor 2 for taking turns, and without the slowdown by a busy worker on another core.
    return max(1.0, _typical(times, sharing) / 2 / (1.0 + (crowded - 1.0) * beside))


def _typical(times: IterationTimes, ran: Sequence[TimedIteration]) -> float:
    return max(1.0, _slowness(times, [one.iteration for one in ran])) if len(ran) >= _ENOUGH else 1.0


def _slowness(times: IterationTimes, iterations: Sequence[Measurement]) -> float:
    """Return the total measured time of iterations divided by their total predicted time."""
    return sum(one.seconds for one in iterations) / sum(one.predicted_s(times) for one in iterations)


def _front_share(observed: Sequence[GroupResult]) -> float:
    """Return the mean number of CPU cores that gateway and clients used."""
    loaded_s = sum(LoadSpan.of(one.timelines).seconds for one in observed)
    return sum(one.front_cpu_s for one in observed) / loaded_s if loaded_s else 0.0


def _as_if_alone(logs: Sequence[WorkerLog], crowded: Sequence[float], taken: float) -> Iterator[Measurement]:
    """Yield the workers' iterations, with the slowdown by CPU contention removed from the durations."""
    prefill, decode = crowded
    for log in logs:
        others = [other for other in logs if other is not log]
        for one in (one for one in log.ran if not one.cold):
            slowdown = prefill if one.iteration.tokens else decode
            longer = (1.0 + (slowdown - 1.0) * _busy(one, others)) / (1.0 - taken)
            yield msgspec.structs.replace(one.iteration, seconds=one.iteration.seconds / longer)


def _link(measured: Measurements, model: Model, times: IterationTimes) -> KvLink:
    """Return the measured speed of KV transfers."""
    path = measured.link.transfer(model.kv_bytes_per_token, model.layers)
    tails = []  # delays beyond an ideal layer-wise hand-off
    for one in measured.prefill.ran:
        if len(one.requests) == 1 and one.requests[0] in measured.decode.landed:
            tokens = one.iteration.tokens
            ideal_s = path.layer_wise_s(tokens, one.iteration.predicted_s(times)) - path.sync_s
            tails.append(measured.decode.landed[one.requests[0]] - one.end_s - ideal_s)
    return KvLink(
        bytes_per_s=measured.link.bytes_per_s,
        latency_s=measured.link.overhead_s,
        sync_s=max(0.0, median(tails)) if tails else path.sync_s,
    )


def _front(measured: Measurements) -> GatewayTimes:
    """Return the measured CPU times and delays of the gateway."""
    request_s, step_s, token_s = _cpu_of_each(measured)
    # Delays are the latencies of lone requests, without CPU and iteration time.
    pairs = list(_lone_prompts(measured))
    sizes = np.array([one.iteration.tokens for _, one in pairs], dtype=np.float64)
    before = np.array([one.start_s - sent for (sent, _), one in pairs], dtype=np.float64)
    after = median(seen - one.end_s for (_, seen), one in pairs)
    prompt_token_s, before_s = np.polyfit(*_medians(sizes, before), 1).tolist()
    return GatewayTimes(
        request_s=request_s,
        prompt_token_s=max(0.0, prompt_token_s),
        request_delay_s=max(0.0, before_s - request_s),
        step_s=step_s,
        token_s=token_s,
        step_delay_s=max(0.0, after - step_s - token_s),
    )


def _cpu_of_each(measured: Measurements) -> tuple[float, float, float]:
    """Return the gateway's CPU seconds per request, iteration and token."""
    rows, spent = [], []
    for one in measured.observed:
        if one.group.purpose not in {Purpose.MIXED, Purpose.SHARED}:
            span = LoadSpan.of(one.timelines)
            logs = measured.prefill, measured.decode
            steps = sum(len(log.between(span.start_s, span.end_s)) for log in logs)
            rows.append((span.requests, steps, span.tokens, 1.0, span.seconds))
            spent.append(one.front_cpu_s)
    columns = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
    cost = np.array(spent, dtype=np.float64)
    request_s, step_s, token_s, _, _ = non_negative_least_squares(columns, cost, cost).tolist()
    return request_s, step_s, token_s


def _medians(xs: Floats, ys: Floats) -> tuple[Floats, Floats]:
    """Return the distinct values in `xs`, and the median of `ys` at each."""
    points = np.unique(xs)
    return points, np.array([np.median(ys[xs == point]) for point in points])


def _lone_prompts(measured: Measurements) -> Iterator[tuple[tuple[float, float], TimedIteration]]:
    """Yield the send time, the time of the first token, and the prefill iteration of each request sent alone."""
    timelines = [one.timelines[0] for one in measured.of(Purpose.ALONE)]
    for timeline in sorted(timelines, key=lambda timeline: min(timeline.moments.values())):
        sent = min(timeline.moments.values())
        seen = timeline.token_times_s[0]
        ran = measured.prefill.between(sent, seen)
        if len(ran) == 1:
            yield (sent, seen), ran[0]
