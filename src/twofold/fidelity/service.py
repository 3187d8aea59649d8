"""A design of a service on this host, in both worlds: flags for the one that runs, a cluster for the simulated one."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from twofold.cluster.cores import gateway_cores
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.fidelity.worker_log import AS_CALIBRATED, Slowness
from twofold.hardware.catalog import Catalog
from twofold.performance.host_profile import HOST, HostProfile, dump_host_profile
from twofold.request import Request
from twofold.serving.config import WorkerConfig
from twofold.serving.launch.worker_plan import available_cores, plan_workers
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ServiceDesign:
    """So many workers of each role, which compute `max_num_batched_tokens` prompt tokens at once (None: as
    many as usual).
    """

    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    max_num_batched_tokens: int | None = None

    @property
    def name(self) -> str:
        """For people: `colocated 2`, `2P+1D`."""
        return f"colocated {self.colocated}" if self.colocated else f"{self.prefill}P+{self.decode}D"

    @property
    def flags(self) -> list[str]:
        """Those of `twofold serve`. Its prompts are computed whole, as they are in the simulation."""
        flags = ["--prefill", str(self.prefill), "--decode", str(self.decode)]
        if self.colocated:
            flags = ["--colocated", str(self.colocated)]
        if self.max_num_batched_tokens is not None:
            flags += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        return [*flags, "--no-enable-prefix-caching"]

    def workers(self) -> tuple[WorkerConfig, ...]:
        """As `twofold serve` plans them."""
        return plan_workers(
            prefill=self.prefill,
            decode=self.decode,
            colocated=self.colocated,
            chunked_prefill=True,
            max_num_batched_tokens=self.max_num_batched_tokens,
            pin_cores=True,
        )


@contextmanager
def clients_beside(design: ServiceDesign) -> Iterator[None]:
    """This process, whose clients load the service, computes on the gateway's cores only meanwhile."""
    before = os.sched_getaffinity(0)
    workers = ((worker.role, worker.cores) for worker in design.workers())
    os.sched_setaffinity(0, gateway_cores(available_cores(), workers))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class SimulatedService:
    """The service of a design as it is simulated, on its host as it was measured or while that is slower or faster.

    Profiles of other speeds are written to `directory`. Raises ConfigurationError as `cluster_of` does.
    """

    def __init__(
        self,
        design: ServiceDesign,
        profile: HostProfile,
        directory: Path,
        *,
        kv_capacity_tokens: int,
        max_num_seqs: int,
        catalog: Catalog,
    ) -> None:
        self.design, self.profile, self.catalog = design, profile, catalog
        self._directory = directory
        self._kv_capacity_tokens, self._max_num_seqs = kv_capacity_tokens, max_num_seqs

    def timelines(self, requests: Sequence[Request], slowness: Slowness = AS_CALIBRATED) -> list[Timeline]:
        """Of these requests, while all takes that many times longer than it was measured."""
        path = self._directory / f"{slowness.prompts:.6f}-{slowness.decodes:.6f}.yaml"
        if not path.exists():
            path.write_text(dump_host_profile(self.profile.slower(*slowness)), encoding="utf-8")
        spec = cluster_of(
            self.design,
            self.profile,
            path,
            kv_capacity_tokens=self._kv_capacity_tokens,
            max_num_seqs=self._max_num_seqs,
        )
        return timelines_of(spec, requests, self.catalog)


def timelines_of(spec: ClusterSpec, requests: Sequence[Request], catalog: Catalog) -> list[Timeline]:
    """Of these requests on a simulated cluster, in the order in which they ended."""
    ends = _Ends()
    simulate(spec, requests, catalog=catalog, observers=[ends], series=False)
    return ends.timelines


class _Ends(Observer):
    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def ended(self, timeline: Timeline, now: float) -> None:
        self.timelines.append(timeline)


def cluster_of(
    design: ServiceDesign, profile: HostProfile, path: Path, *, kv_capacity_tokens: int, max_num_seqs: int
) -> ClusterSpec:
    """The simulated twin; raises ConfigurationError where the profile is not of a service like this one."""
    workers = design.workers()
    threads, cores = workers[0].threads, len(available_cores())
    if (profile.cores, profile.threads) != (cores, threads):
        raise ConfigurationError(
            f"the profile is of workers with {profile.threads} of {profile.cores} cores each, and those of "
            f"{design.name} have {threads} of {cores} here: measure again where it is to be used"
        )
    return ClusterSpec(
        pools=tuple(_pools(workers)),
        model=profile.model.name,
        router="jsq",
        handoff="layer-wise",
        max_num_batched_tokens=max(worker.max_num_batched_tokens for worker in workers),
        max_num_seqs=max_num_seqs,
        kv_capacity_tokens=kv_capacity_tokens,
        profile=str(path),
    )


def _pools(workers: Sequence[WorkerConfig]) -> list[PoolSpec]:
    kinds = groupby(workers, key=lambda worker: (worker.role, worker.batcher))
    return [
        PoolSpec(machines=len(list(same)), machine=HOST, role=role, batcher=batcher)
        for (role, batcher), same in kinds
    ]
