"""The same requests live and simulated, and how far apart the two are."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from twofold.bench.endpoint import discover
from twofold.bench.load import LoadResult, run_load
from twofold.bench.services import served
from twofold.errors import ConfigurationError
from twofold.fidelity.measure import load_config
from twofold.fidelity.service import Design, clients_beside
from twofold.hardware.catalog import Catalog
from twofold.performance.host_profile import dump_host_profile, read_host_profile
from twofold.reporting.summary import Distribution, Summary, summarise
from twofold.request import Request
from twofold.simulation.observer import QuietObserver
from twofold.simulation.simulate import simulate
from twofold.simulation.spec import ClusterSpec
from twofold.slo import Slo
from twofold.timeline import Timeline

ATTAINMENT_POINTS = 0.05
MEDIAN, TAIL = 0.10, 0.15  # relative errors of P50 and P90 that are let pass, beyond the spread
_METRICS = ("ttft_s", "tpot_s", "e2e_s")
_WARMUP = 3
_LONE, _LONE_TOKENS = 16, 12  # requests that show how fast the host is just now, and what each asks for


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure in both worlds: simulated, and of each live replay.

    `limit` is the error that is let pass; of the attainment in points (shares of 1), of others relative.
    """

    name: str
    simulated: float
    live: tuple[float, ...]
    limit: float

    @property
    def spread(self) -> float:
        """How far the live replays are apart."""
        return (max(self.live) - min(self.live)) / self._unit

    @property
    def error(self) -> float:
        """How far the simulation is from the mean of the replays; above 0 where it says too much."""
        return (self.simulated - fmean(self.live)) / self._unit

    @property
    def holds(self) -> bool:
        """Whether the error is within the limit, beyond the spread."""
        return abs(self.error) <= self.limit + self.spread

    @property
    def _unit(self) -> float:
        return 1.0 if self.name == ATTAINMENT else fmean(self.live)


ATTAINMENT = "SLO attainment"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one design in both worlds.

    `slowness` is, for each replay, how many times longer than in the profile requests took just before it that met
    nobody. A host is not always as fast as when it was measured; the simulation is of the host as it was on average.
    """

    design: str
    rate: float
    requests: int
    slo: Slo
    slowness: tuple[float, ...]
    simulated: Summary
    live: tuple[Summary, ...]

    def figures(self) -> Iterator[Figure]:
        """All that is compared."""
        yield Figure(
            name=ATTAINMENT,
            simulated=_attained(self.simulated),
            live=tuple(map(_attained, self.live)),
            limit=ATTAINMENT_POINTS,
        )
        for metric in _METRICS:
            for percentile, limit in (("p50", MEDIAN), ("p90", TAIL)):
                yield Figure(
                    name=f"{metric.removesuffix('_s').upper()} {percentile.upper()}",
                    simulated=_value(self.simulated, metric, percentile),
                    live=tuple(_value(summary, metric, percentile) for summary in self.live),
                    limit=limit,
                )

    @property
    def holds(self) -> bool:
        return all(figure.holds for figure in self.figures())


def compare(
    model: Path,
    flags: Sequence[str],
    design: Design,
    spec: ClusterSpec,
    loads: dict[float, list[Request]],
    *,
    catalog: Catalog,
    slo: Slo,
    replays: int,
    on_load: Callable[[str], None],
) -> list[Comparison]:
    """Serve `design` once and replay each load (by its rate) so often, and simulate each."""
    live: dict[float, list[Summary]] = {rate: [] for rate in loads}
    slowness: dict[float, list[float]] = {rate: [] for rate in loads}
    with served(model, (*design.flags, *flags)) as url, clients_beside(design):
        for replay in range(replays):
            for rate, requests in loads.items():
                on_load(f"{design.name}, {rate:.3g} requests/s, replay {replay + 1} of {replays}")
                slowness[rate].append(_slowness(url, spec, requests, catalog, slo))
                live[rate].append(summarised(_replay(url, requests).timelines, slo))
    return [
        Comparison(
            design=design.name,
            rate=rate,
            requests=len(requests),
            slo=slo,
            slowness=tuple(slowness[rate]),
            simulated=_simulated_at(spec, fmean(slowness[rate]), requests, catalog, slo),
            live=tuple(live[rate]),
        )
        for rate, requests in loads.items()
    ]


def _slowness(url: str, spec: ClusterSpec, requests: Sequence[Request], catalog: Catalog, slo: Slo) -> float:
    """How many times longer requests of this workload take just now, one at a time, than the profile says."""
    lone = [
        msgspec.structs.replace(
            request, id=f"lone-{number}", arrival_s=60.0 * number, output_tokens=_LONE_TOKENS
        )
        for number, request in enumerate(requests[:_LONE])
    ]
    profile = simulated(spec, lone, catalog, slo)
    now = summarised(_replay(url, lone, max_concurrency=1).timelines, slo)
    return _value(now, "e2e_s", "mean") / _value(profile, "e2e_s", "mean")


def _simulated_at(
    spec: ClusterSpec, slowness: float, requests: Sequence[Request], catalog: Catalog, slo: Slo
) -> Summary:
    """What the simulator says of a host that is that much slower than in the profile."""
    profile = read_host_profile(spec.profile or "")
    with tempfile.TemporaryDirectory(prefix="twofold-verify-") as directory:
        path = Path(directory, "host.yaml")
        path.write_text(dump_host_profile(profile.slower(slowness)), encoding="utf-8")
        as_it_was = msgspec.structs.replace(spec, profile=str(path))
        return simulated(as_it_was, requests, catalog, slo)


def simulated(spec: ClusterSpec, requests: Sequence[Request], catalog: Catalog, slo: Slo) -> Summary:
    """What the simulator says of these requests."""
    ends = _Ends()
    simulate(spec, requests, catalog=catalog, observers=[ends], series=False)
    return summarised(ends.timelines, slo)


def summarised(timelines: Sequence[Timeline], slo: Slo) -> Summary:
    return summarise(timelines, slo=slo)


def knee(
    spec: ClusterSpec,
    make: Callable[[float], list[Request]],
    catalog: Catalog,
    slo: Slo,
    attainment: float = 0.9,
) -> float:
    """The highest rate at which the simulation keeps the SLO for that share of the requests, within 2%.

    DistServe's goodput (section 4.1) of the whole service. Raises ConfigurationError where no rate keeps it.
    """

    def kept(rate: float) -> bool:
        return _attained(simulated(spec, make(rate), catalog, slo)) >= attainment

    low, high = 0.0, 1 / 16
    while kept(high):
        low, high = high, 2 * high
    if not low:
        raise ConfigurationError(f"the SLO {slo} is not kept at {high:g} requests per second: widen it")
    while high / low > 1.02:
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def _replay(url: str, requests: Sequence[Request], max_concurrency: int | None = None) -> LoadResult:
    async def run() -> LoadResult:
        config = load_config(await discover(url))
        config = msgspec.structs.replace(config, warmup=_WARMUP, max_concurrency=max_concurrency)
        due = requests if max_concurrency is None else [_at_once(request) for request in requests]
        return await run_load(config, due)

    result = asyncio.run(run())
    for request_id, reason in result.errors.items():
        raise ConfigurationError(f"request {request_id} failed: {reason}")
    return result


def _at_once(request: Request) -> Request:
    return msgspec.structs.replace(request, arrival_s=0.0)


class _Ends(QuietObserver):
    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def ended(self, timeline: Timeline) -> None:
        self.timelines.append(timeline)


def _attained(summary: Summary) -> float:
    return summary.slo_attainment or 0.0


def _value(summary: Summary, metric: str, percentile: str) -> float:
    distribution: Distribution | None = getattr(summary, metric)
    value: float = getattr(distribution, percentile)
    return value
