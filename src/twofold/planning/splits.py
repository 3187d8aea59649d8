"""Search for the best split of equal instances into prefill and decode instances, by short simulations."""

import time
from collections.abc import Iterator
from functools import partial
from itertools import islice

from msgspec.structs import replace

from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec
from twofold.errors import require
from twofold.hardware.catalog import Catalog
from twofold.planning.trials import bound_by
from twofold.request import Phase, Request
from twofold.scheduling.replan.replanner import RoleSplit, SearchResult, SplitForecast
from twofold.scheduling.replan.traffic import TrafficSample
from twofold.simulation.replanning import assign, require_movable
from twofold.simulation.result import SimulationResult
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.workload.distributions import RandomStream, gamma, generator

_SIMULATED_S = 60.0  # seconds of arrivals, long enough to show growing queues
_FEWEST, _MOST = 400, 3000  # limits of the number of requests
_ALL = 8  # up to this many splits are all tried; more are searched by bisection
# Extra attainment required of fewer instances: about twice the standard error of a forecast of 90%.
_HEADROOM = 0.03


class SplitPlanner:
    """Planner that finds the best numbers of prefill and decode instances by simulating the cluster `spec`.

    The best numbers have the highest SLO attainment. If `replicas` is true, the planner instead finds the
    fewest instances with a simulated SLO attainment of at least `attainment` plus a small margin.
    """

    def __init__(
        self, spec: ClusterSpec, catalog: Catalog, slo: Slo, *, attainment: float = 0.9, replicas: bool = False
    ) -> None:
        """Raise ConfigurationError if instances cannot switch between prefill and decode, or if `slo` has no bounds."""
        require_movable(spec, instance_profiles(spec, catalog))
        require(slo != Slo(), "re-planning needs an SLO in seconds, as in ttft=2,tpot=0.1")
        self._spec, self._catalog, self._slo = replace(spec, failures=()), catalog, slo
        self._enough, self._replicas = attainment + _HEADROOM, replicas

    def search(self, traffic: TrafficSample, running: RoleSplit, stock: int) -> SearchResult:
        """Search by simulation for the best split of at most `stock` instances into prefill and decode.

        Return forecasts of the best split and of the current split `running`. The simulated requests have the rate,
        burstiness and lengths of the sample `traffic`.
        """
        began = time.process_time()
        search = _Search(self._spec, self._catalog, self._slo, list(synthetic_requests(traffic)))
        now = search.forecast(running)
        # With replicas, the fewest instances with which enough requests meet the SLO; otherwise, all running instances.
        best = self._fewest(search, stock) if self._replicas else search.best_of(running.instances)
        if now.attainment >= best.attainment and best.split.instances >= running.instances:
            best = now
        return SearchResult(
            running=now,
            best=best,
            searched=tuple(search.known.values()),
            requests=len(search.requests),
            cpu_s=time.process_time() - began,
        )

    def _fewest(self, search: "_Search", stock: int) -> SplitForecast:
        best = search.best_of(stock)
        low, high = 2, stock
        while low < high and best.attainment >= self._enough:
            middle = (low + high) // 2
            found = search.best_of(middle)
            if found.attainment >= self._enough:
                best, high = found, middle
            else:
                low = middle + 1
        return best


class _Search:
    """Search for the best split into prefill and decode instances, by simulations of one list of requests."""

    def __init__(self, spec: ClusterSpec, catalog: Catalog, slo: Slo, requests: list[Request]) -> None:
        self.known: dict[RoleSplit, SplitForecast] = {}
        self.requests = requests
        self._spec, self._catalog, self._slo = spec, catalog, slo
        self._strain: dict[RoleSplit, float] = {}
        self._bound: dict[RoleSplit, Phase | None] = {}

    def forecast(self, split: RoleSplit) -> SplitForecast:
        if split not in self.known:
            result = simulate(
                self._spec,
                self.requests,
                catalog=self._catalog,
                slo=self._slo,
                series=False,
                prepare=partial(assign, split=split),
            )
            self.known[split] = SplitForecast(split, (result.slo_met or 0) / result.arrived)
            self._strain[split] = _strain(result, self._slo)
            self._bound[split] = bound_by(result, self._slo)
        return self.known[split]

    def best_of(self, instances: int) -> SplitForecast:
        """Return the forecast of the best prefill/decode split of `instances` instances."""
        tried = range(1, instances) if instances - 1 <= _ALL else self._bisected(instances)
        forecasts = [self.forecast(RoleSplit(prefill, instances - prefill)) for prefill in tried]
        return max(forecasts, key=lambda each: (each.attainment, -self._strain[each.split]))

    def _bisected(self, instances: int) -> list[int]:
        """Return candidate numbers of prefill instances, found by bisection."""
        # Each step gives more instances to the phase closer to missing the SLO; both neighbours of the last are tried.
        low, high, tried = 1, instances - 1, list[int]()
        while low <= high:
            middle = (low + high) // 2
            tried.append(middle)
            bound = self._bound[self.forecast(RoleSplit(middle, instances - middle)).split]
            if bound is None:
                break
            low, high = (middle + 1, high) if bound is Phase.PREFILL else (low, middle - 1)
        return [each for each in (*tried, tried[-1] - 1, tried[-1] + 1) if 0 < each < instances]


def synthetic_requests(traffic: TrafficSample) -> Iterator[Request]:
    """Generate requests with the rate, burstiness and lengths of `traffic`, reproducibly."""
    # Prompt and output lengths are drawn independently: `traffic` does not record which belong together.
    count = round(min(max(_SIMULATED_S * traffic.rate, _FEWEST), _MOST))
    times = islice(gamma(traffic.rate, traffic.burstiness, 0), count)
    prompts = generator(0, RandomStream.PROMPTS).choice(traffic.prompt_tokens, count).tolist()
    outputs = generator(0, RandomStream.OUTPUTS).choice(traffic.output_tokens, count).tolist()
    for number, (at_s, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True)):
        yield Request(id=str(number), arrival_s=at_s, prompt_tokens=prompt, output_tokens=output)


def _strain(result: SimulationResult, slo: Slo) -> float:
    """Return the largest ratio of a simulated P90 latency to its SLO bound."""
    pairs = ((result.ttft_s, slo.ttft_s), (result.tpot_s, slo.tpot_s), (result.e2e_s, slo.e2e_s))
    shares = [(histogram.percentile(90), bound_s) for histogram, bound_s in pairs if bound_s is not None]
    return max((value / bound_s for value, bound_s in shares if value is not None), default=0.0)
