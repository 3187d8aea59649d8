"""The verdict on a run: whether a cluster kept its service-level objectives, bound by bound."""

from collections.abc import Iterator

import msgspec

from twofold.errors import ConfigurationError
from twofold.simulation.histogram import Histogram
from twofold.simulation.result import SimulationResult
from twofold.slo import Slo, SlowdownSlo


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One bound and what the run had of it.

    `value` is None where nothing was there to measure, as TPOT is where every output has one token: such a
    bound is kept. `at_least` marks a floor; every other bound is a ceiling.
    """

    name: str
    value: float | None
    bound: float
    met: bool
    at_least: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`met` when every one of `checks` is."""

    met: bool
    checks: tuple[Check, ...]


def verdict(result: SimulationResult, slo: Slo | SlowdownSlo, attainment: float = 0.9) -> Verdict:
    """Judge a run.

    For an `Slo`, the share of all requests that completed within every bound must be at least `attainment`:
    those that were rejected, failed or did not end are misses. For a `SlowdownSlo` every percentile must be at
    most its bound, and every request must have completed; `attainment` plays no part.

    Raises ConfigurationError where the run did not measure what the SLO speaks of, or `attainment` is no share.
    """
    if not 0.0 < attainment <= 1.0:
        raise ConfigurationError(
            f"attainment {attainment:g} is no share of requests: give more than 0, at most 1"
        )
    checks = (
        (_attained(result, attainment),) if isinstance(slo, Slo) else tuple(_slowdown_checks(result, slo))
    )
    return Verdict(met=all(check.met for check in checks), checks=checks)


def _attained(result: SimulationResult, attainment: float) -> Check:
    if result.slo_met is None:
        raise ConfigurationError("this run counted no SLO: give the SLO to the simulation as well")
    return _floor("requests within the SLO", _share(result.slo_met, result.arrived), attainment)


def _slowdown_checks(result: SimulationResult, slo: SlowdownSlo) -> Iterator[Check]:
    for name, bounds, histogram in (
        ("TTFT", slo.ttft, result.ttft_slowdown),
        ("TPOT", slo.tpot, result.tpot_slowdown),
        ("E2E", slo.e2e, result.e2e_slowdown),
    ):
        for percentile, bound in sorted(bounds.items()):
            yield _ceiling(f"{name} slowdown P{percentile}", histogram, percentile, bound)
    yield _floor("requests completed", _share(result.completed, result.arrived), 1.0)


def _ceiling(name: str, histogram: Histogram | None, percentile: int, bound: float) -> Check:
    if histogram is None:
        raise ConfigurationError("this run has no slowdowns: give the simulation a reference machine")
    value = histogram.percentile(percentile)
    return Check(name=name, value=value, bound=bound, met=value is None or value <= bound)


def _floor(name: str, value: float, bound: float) -> Check:
    return Check(name=name, value=value, bound=bound, met=value >= bound, at_least=True)


def _share(part: int, whole: int) -> float:
    """A run without requests has shown nothing, so its share is 0."""
    return part / whole if whole else 0.0
