"""Simulation of the number of active tokens per iteration (Splitwise, section III-B).

Active tokens are the prompt tokens that an iteration computes, plus one for each sequence that it decodes.
"""

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.performance.profile import MeasuredProfile, dump_profile
from twofold.request import Request
from twofold.simulation.observers.base import IterationRun, Observer
from twofold.simulation.simulate import simulate

LOADS: Final = (0.25, 0.5, 0.75)  # shares of the highest throughput of the instance
_PS: Final = 10**12


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that an instance spends on batches, by active tokens: prompt tokens, and one per decoding sequence."""

    workload: str
    load: float
    rate: float
    busy_s: dict[int, float]

    def share(self, tokens: int) -> float:
        """Return the fraction of busy time spent on batches with at most `tokens` active tokens."""
        return sum(seconds for active, seconds in self.busy_s.items() if active <= tokens) / sum(self.busy_s.values())

    def steps(self) -> list[tuple[int, float]]:
        """Return the distribution of active tokens: pairs (n, fraction of busy time with at most n tokens)."""
        total, whole, found = 0.0, sum(self.busy_s.values()), []
        for active in sorted(self.busy_s):
            total += self.busy_s[active]
            found.append((active, total / whole))
        return found


class _BusyTime(Observer):
    def __init__(self) -> None:
        self.seconds: defaultdict[int, float] = defaultdict(float)
        self.end_ps = 0

    def run(self, run: IterationRun) -> None:
        self.seconds[run.prefill_tokens + run.decode_sequences] += (run.end_ps - run.start_ps) / _PS
        self.end_ps = max(self.end_ps, run.end_ps)


def activities(profile: MeasuredProfile, catalog: Catalog, name: str, requests: Sequence[Request]) -> list[Activity]:
    """Return the seconds that a simulated instance spends with each number of active tokens, at three loads.

    The loads are 25%, 50% and 75% of the highest throughput. The mean arrival rate of `requests` must be 1 request/s.
    """
    with tempfile.TemporaryDirectory(prefix="twofold-characterize-") as folder:
        path = Path(folder) / "profile.yaml"
        path.write_text(dump_profile(msgspec.structs.replace(profile, host=None)), encoding="utf-8")
        spec = ClusterSpec(
            pools=(PoolSpec(machines=1, machine=profile.machine, role=Role.MIXED),),
            model=profile.model.name,
            router="jsq",
            profiles=(str(path),),
        )
        highest = len(requests) * _PS / _busy(spec, catalog, _arriving(requests, None)).end_ps
        return [
            Activity(
                workload=name,
                load=load,
                rate=load * highest,
                busy_s=dict(_busy(spec, catalog, _arriving(requests, load * highest)).seconds),
            )
            for load in LOADS
        ]


def _busy(spec: ClusterSpec, catalog: Catalog, requests: Sequence[Request]) -> _BusyTime:
    busy = _BusyTime()
    simulate(spec, requests, catalog=catalog, observers=[busy], series=False)
    return busy


def _arriving(requests: Sequence[Request], rate: float | None) -> list[Request]:
    scale = 0.0 if rate is None else 1.0 / rate
    return [msgspec.structs.replace(request, arrival_s=request.arrival_s * scale) for request in requests]
