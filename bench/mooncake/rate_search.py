"""Search by simulation for the highest request rate at which P90 TTFT and P90 TBT meet an SLO."""

from collections.abc import Callable, Sequence

import msgspec

from twofold.cluster.spec import ClusterSpec
from twofold.hardware.catalog import load_catalog
from twofold.planning.rates import RateGrid
from twofold.request import Request
from twofold.simulation.result import SimulationResult
from twofold.simulation.simulate import simulate
from twofold.slo import Slo

_HOPELESS = 0.01  # give-up threshold relative to the starting rate


class SearchResult(msgspec.Struct, frozen=True):
    """Highest request rate that meets the SLO, or None if no rate meets the SLO.

    `bound` is the reason why the next higher rate failed: a latency above the SLO (TTFT or TBT), or refused
    requests.
    """

    rate: float | None
    bound: str
    cpu_s: float

    def __str__(self) -> str:
        return "none" if self.rate is None else f"{self.rate:.3g} {self.bound}"


def search(
    spec: ClusterSpec, arriving: Callable[[float], Sequence[Request]], slo: Slo, start: float, grid: RateGrid
) -> SearchResult:
    """Return the highest rate at which a simulated cluster meets the SLO."""
    spent = 0.0

    def misses(rate: float) -> str:
        nonlocal spent
        result = run(spec, arriving(rate))
        spent += result.cpu_s
        return missed(result, slo)

    rate, bound = highest(misses, start, grid)
    return SearchResult(rate, bound, spent)


def run(spec: ClusterSpec, arriving: Sequence[Request], slo: Slo | None = None) -> SimulationResult:
    return simulate(spec, arriving, catalog=load_catalog(), slo=slo, series=False)


def missed(result: SimulationResult, slo: Slo) -> str:
    """Return why a run missed the SLO ("TTFT", "TBT" or "refused"), or an empty string if the run met the SLO."""
    for name, histogram, bound_s in (("TTFT", result.ttft_s, slo.ttft_s), ("TBT", result.tpot_s, slo.tpot_s)):
        value = histogram.percentile(90)
        if value is not None and bound_s is not None and value > bound_s:
            return name
    return "" if result.completed == result.arrived else "refused"


def highest(misses: Callable[[float], str], start: float, grid: RateGrid) -> tuple[float | None, str]:
    """Return the highest rate that meets the SLO, and the reason why the next higher rate fails."""
    step, stride = grid.step(start), grid.stride
    kept: int | None = None
    lost: tuple[int, str] | None = None
    while kept is None or lost is None:
        what = misses(grid.rate(step))
        if not what:
            kept = step
        elif grid.rate(step) < _HOPELESS * start:
            return None, what
        else:
            lost = step, what
        step += stride if lost is None else -stride
        stride *= 2
    while lost[0] - kept > 1:
        middle = (kept + lost[0]) // 2
        what = misses(grid.rate(middle))
        if what:
            lost = middle, what
        else:
            kept = middle
    return grid.rate(kept), lost[1]
