"""Compare live and simulated latencies of the same requests: the table of `twofold verify`."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
from rich.table import Table

from twofold.bench.endpoint import discover
from twofold.bench.services import served
from twofold.errors import ConfigurationError
from twofold.fidelity.measurement import load_config, send
from twofold.fidelity.service import Clients, SimulatedEndpoint, SimulatedService, Twin, clients_beside
from twofold.fidelity.worker_log import AS_CALIBRATED, LoadSpan, Slowness, WorkerLog, read_workers, slowness
from twofold.performance.profile import MeasuredModel, MeasuredProfile
from twofold.reporting.output import table
from twofold.reporting.summary import LatencyDistribution, Summary, bounds, seconds, summarize
from twofold.request import Request
from twofold.slo import Slo
from twofold.timeline import Timeline

ATTAINMENT_POINTS = 0.05
MEDIAN, TAIL = 0.10, 0.15  # accepted relative errors of P50 and P90, beyond the spread
_METRICS = ("ttft_s", "tpot_s", "e2e_s")
_WARMUP = 3
_STEADY = 0.1  # relative change of the host's speed during a load
_TTFT, _TPOT = 6.0, 5.0  # Splitwise's bounds on the P99 slowdown (table VI)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Live and simulated values of one metric."""

    name: str
    calibrated: float  # simulated at the host speed of the calibration
    simulated: float  # mean of one simulation per replay, at the host speed during the replay
    live: tuple[float, ...]  # one value per replay
    limit: float  # accepted error: absolute for SLO attainment, relative for latencies

    @property
    def spread(self) -> float:
        """Mean absolute difference of the metric over all pairs of live replays; 0 for a single replay.

        For a latency, the spread is relative to the mean live value; for SLO attainment, the spread is absolute.
        """
        gaps = [abs(one - other) for one, other in combinations(self.live, 2)]
        return fmean(gaps) / self._unit if gaps else 0.0

    @property
    def error(self) -> float:
        """Error of the simulation: simulated value minus mean live value.

        For a latency, the error is relative to the mean live value; for SLO attainment, the error is absolute.
        """
        return (self.simulated - fmean(self.live)) / self._unit

    @property
    def holds(self) -> bool:
        """Whether the error is at most the accepted error plus the spread of the live replays."""
        return abs(self.error) <= self.limit + self.spread

    @property
    def _unit(self) -> float:
        return 1.0 if self.name == ATTAINMENT else fmean(self.live)


ATTAINMENT = "SLO attainment"


class OfferedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are sent at their arrival times or, if `clients` are given, in a closed loop."""

    requests: Sequence[Request]
    rate: float | None = None  # requests per second
    clients: Clients | None = None

    @property
    def name(self) -> str:
        return f"{self.rate:.3g} requests/s" if self.clients is None else f"concurrency {self.clients.concurrency}"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Live and simulated results of one load on one service design."""

    design: str
    rate: float | None  # requests per second
    concurrency: int | None = None  # of a closed loop
    requests: int
    slo: Slo
    slowness: tuple[Slowness, ...]  # of the host since calibration, in each replay
    calibrated: Summary
    simulated: tuple[Summary, ...]  # each replay at its own host speed
    live: tuple[Summary, ...]

    def figures(self) -> Iterator[Figure]:
        """Yield the live and simulated SLO attainment, and P50 and P90 of TTFT, TPOT and E2E."""
        yield self._figure(ATTAINMENT, _attained, ATTAINMENT_POINTS)
        for metric in _METRICS:
            for percentile, limit in (("p50", MEDIAN), ("p90", TAIL)):
                name = f"{metric.removesuffix('_s').upper()} {percentile.upper()}"
                yield self._figure(name, partial(_value, metric=metric, percentile=percentile), limit)

    def _figure(self, name: str, of: Callable[[Summary], float], limit: float) -> Figure:
        return Figure(
            name=name,
            calibrated=of(self.calibrated),
            simulated=fmean(map(of, self.simulated)),
            live=tuple(map(of, self.live)),
            limit=limit,
        )

    @property
    def holds(self) -> bool:
        return all(figure.holds for figure in self.figures())


def compare(
    model: Path,
    flags: Sequence[str],
    twin: SimulatedService,
    loads: Sequence[OfferedLoad],
    *,
    slo: Slo,
    replays: int,
    on_load: Callable[[str], None],
) -> list[Comparison]:
    """Replay each load on a live service of this host, and compare the results with simulations."""
    design = twin.design
    live: list[list[list[Timeline]]] = [[] for _ in loads]
    with tempfile.TemporaryDirectory(prefix="twofold-verify-") as journals:
        with served(model, (*design.flags, *flags, "--journal", journals)) as url, clients_beside(design):
            for replay in range(replays):
                for load, replayed in zip(loads, live, strict=True):
                    on_load(f"{design.name}, {load.name}, replay {replay + 1} of {replays}")
                    replayed.append(replay_on(url, load))
        logs = read_workers(Path(journals))
    return [compare_replays(twin, load, replayed, logs, slo) for load, replayed in zip(loads, live, strict=True)]


class _Replay(NamedTuple):
    drift: float  # largest relative change of the host's speed from before to after
    slowness: Slowness
    live: Summary


def compare_endpoint(
    send_load: Callable[[OfferedLoad], list[Timeline]],
    twin: SimulatedEndpoint,
    loads: Sequence[OfferedLoad],
    *,
    slo: Slo,
    replays: int,
    on_load: Callable[[str], None],
    slowdowns: Callable[[], tuple[float, float]] = lambda: AS_CALIBRATED,
    tries: int = 1,
) -> list[Comparison]:
    """Compare a running service with its simulation at each load.

    `send_load` sends the requests of a load to the service, and returns their timelines. `slowdowns` measures the
    slowdowns of the idle service's host since the calibration, as in `Slowness`; those during a load are the means
    before and after it. A load during which they change by more than 10% is sent again, up to `tries` times in all;
    the one with the smallest change counts.
    """
    replayed: list[list[_Replay]] = [[] for _ in loads]
    before = slowdowns()
    for replay in range(replays):
        for number, load in enumerate(loads):
            tried: list[_Replay] = []
            for _ in range(tries):
                on_load(f"{twin.design.name}, {load.name}, replay {replay + 1} of {replays}")
                live = summarize(send_load(load), slo=slo)
                after = slowdowns()
                both = list(zip(before, after, strict=True))
                drift = max(abs(late / early - 1.0) for early, late in both)
                tried.append(_Replay(drift, Slowness(*map(fmean, both)), live))
                before = after
                if drift <= _STEADY:
                    break
            replayed[number].append(min(tried, key=lambda each: each.drift))
    return [
        _compared(twin, load, [each.slowness for each in found], [each.live for each in found], slo)
        for load, found in zip(loads, replayed, strict=True)
    ]


def compare_replays(
    twin: SimulatedService,
    load: OfferedLoad,
    live: Sequence[list[Timeline]],
    logs: Mapping[str, WorkerLog],  # by name of the worker
    slo: Slo,
) -> Comparison:
    """Simulate the requests that were replayed on a live service, and compare the simulated and the live latencies."""
    workers = twin.design.workers()
    slow = [slowness(twin.profile, workers, logs, LoadSpan.of(timelines)) for timelines in live]
    return _compared(twin, load, slow, [summarize(timelines, slo=slo) for timelines in live], slo)


def _compared(twin: Twin, load: OfferedLoad, slow: Sequence[Slowness], live: Sequence[Summary], slo: Slo) -> Comparison:
    def simulated(speed: Slowness) -> Summary:
        return summarize(twin.timelines(load.requests, speed, load.clients), slo=slo)

    return Comparison(
        design=twin.design.name,
        rate=load.rate,
        concurrency=None if load.clients is None else load.clients.concurrency,
        requests=len(load.requests),
        slo=slo,
        slowness=tuple(slow),
        calibrated=simulated(AS_CALIBRATED),
        simulated=tuple(map(simulated, slow)),
        live=tuple(live),
    )


def default_slo(profile: MeasuredProfile, requests: Sequence[Request]) -> Slo:
    """Return 6 × TTFT and 5 × TPOT, in seconds, of an average request that runs alone on a measured instance."""
    prompt = sum(request.prompt_tokens for request in requests) // len(requests)
    output = sum(request.output_tokens for request in requests) // len(requests)
    ttft_s, tpot_s = MeasuredModel("", profile.times).uncontended(prompt, output)
    return Slo(ttft_s=round(_TTFT * (ttft_s + profile.request_s), 3), tpot_s=round(_TPOT * tpot_s, 4))


def knee(twin: Twin, make: Callable[[float], list[Request]], slo: Slo, attainment: float = 0.9) -> float:
    """Return the goodput of a simulated service in requests/s (DistServe, section 4.1), accurate to 2%.

    Goodput is the highest request rate with an SLO attainment of at least `attainment`. Raises ConfigurationError
    if the goodput is below 1/16 requests/s.
    """

    def kept(rate: float) -> bool:
        return _attained(summarize(twin.timelines(make(rate)), slo=slo)) >= attainment

    low, high = 0.0, 1 / 16
    while kept(high):
        low, high = high, 2 * high
    if not low:
        raise ConfigurationError(f"the SLO {slo} is not kept at {high:g} requests per second: widen it")
    while high / low > 1.02:
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def replay_on(url: str, load: OfferedLoad, api_key: str | None = None) -> list[Timeline]:
    """Send the requests of a load to a service. Raises ConfigurationError if a request fails."""
    config = load_config(asyncio.run(discover(url, None, api_key)))
    config = msgspec.structs.replace(config, api_key=api_key, warmup=_WARMUP)
    if load.clients is not None:
        config = msgspec.structs.replace(config, **load.clients._asdict())
    return send(config, load.requests)


def _attained(summary: Summary) -> float:
    return summary.slo_attainment or 0.0


def _value(summary: Summary, metric: str, percentile: str) -> float:
    distribution: LatencyDistribution | None = getattr(summary, metric)
    value: float = getattr(distribution, percentile)
    return value


def fidelity_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a table that compares simulated and live values, with a row for each load and metric."""
    replays = max(len(comparison.live) for comparison in comparisons)
    first = comparisons[0]
    slo = ", ".join(f"{name} {bound}" for name, bound in bounds(first.slo))
    title = f"{first.design}: simulated and live, SLO {slo}"
    live = (f"live {replay + 1}" for replay in range(replays))
    label = "concurrency" if first.concurrency else "requests/s"
    headings = (label, "", "as calibrated", "simulated", *live, "spread", "error", "")
    drawn = table(title, headings, [index for index, heading in enumerate(headings) if heading])
    for comparison in comparisons:
        labels = iter((f"{comparison.concurrency or comparison.rate:.3g}", f"host {speed_text(comparison)}"))
        for figure in comparison.figures():
            drawn.add_row(next(labels, ""), *_cells(figure))
        drawn.add_section()
    return drawn


def speed_text(comparison: Comparison) -> str:
    """Format the mean factors by which the service's host was slower than at calibration: `x1.04, x1.12`.

    The first factor is for iterations with prompts, the second factor for iterations that only decode.
    """
    prompts, decodes = (fmean(each) for each in zip(*comparison.slowness, strict=True))
    return f"x{prompts:.2f}, x{decodes:.2f}"


def _cells(figure: Figure) -> tuple[str, ...]:
    shares = figure.name == ATTAINMENT
    both = figure.calibrated, figure.simulated, *figure.live
    values = [f"{value:.1%}" if shares else seconds(value) for value in both]
    spread, error = (f"{value * 100:+.1f}" for value in (figure.spread, figure.error))
    points = " points" if shares else "%"
    verdict = "ok" if figure.holds else f"over {figure.limit:.0%}".replace("%", points)
    return figure.name, *values, spread.lstrip("+") + points, error + points, verdict
