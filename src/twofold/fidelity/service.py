"""Live services on this host, and their simulations."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from twofold.cluster.layout import gateway_cores
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.fidelity.worker_log import AS_CALIBRATED, Slowness
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.performance.profile import MeasuredProfile, dump_profile
from twofold.request import Request
from twofold.serving.config import WorkerConfig
from twofold.serving.launch.worker_plan import BatchPolicies, available_cores, plan_workers, pools_of
from twofold.simulation.clients import ClosedLoop
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ServiceDesign:
    """Number of workers of each role in a service."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    max_num_batched_tokens: int | None = None  # None: the default

    @property
    def name(self) -> str:
        """Display name, such as `colocated 2` or `2P+1D`."""
        return f"colocated {self.colocated}" if self.colocated else f"{self.prefill}P+{self.decode}D"

    @property
    def counts(self) -> dict[Role, int]:
        """Number of workers of each role, without roles that have none."""
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.colocated}
        return {role: count for role, count in counts.items() if count}

    @property
    def flags(self) -> list[str]:
        """Flags of `twofold serve` for a service of this design."""
        flags = ["--prefill", str(self.prefill), "--decode", str(self.decode)]
        if self.colocated:
            flags = ["--colocated", str(self.colocated)]
        if self.max_num_batched_tokens is not None:
            flags += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        return [*flags, "--no-enable-prefix-caching"]  # the simulation computes every prompt in full

    def workers(self) -> tuple[WorkerConfig, ...]:
        """Return the configurations of the workers that `twofold serve` would start."""
        policies = BatchPolicies(max_num_batched_tokens=self.max_num_batched_tokens)
        return plan_workers(
            policies, prefill=self.prefill, decode=self.decode, colocated=self.colocated, pin_cores=True
        )


@contextmanager
def clients_beside(design: ServiceDesign) -> Iterator[None]:
    """Context manager that restricts this process to the CPU cores of the gateway."""
    before = os.sched_getaffinity(0)  # this process runs the clients
    workers = ((worker.role, worker.cores) for worker in design.workers())
    os.sched_setaffinity(0, gateway_cores(available_cores(), workers))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Clients(NamedTuple):
    """Clients of a closed loop."""

    concurrency: int  # number of clients
    think_s: float = 0.0  # between the end of a request and the client's next one


@dataclass(frozen=True, slots=True)
class Twin(ABC):
    """Simulation of a service from a measured profile, for comparison with the live service."""

    design: ServiceDesign
    profile: MeasuredProfile
    directory: Path  # gets a profile for each simulated speed of the host
    catalog: Catalog

    @abstractmethod
    def cluster(self, path: Path) -> ClusterSpec:
        """Return the cluster spec of the service, with the profile in the file `path`."""

    def timelines(
        self, requests: Sequence[Request], slowness: Slowness = AS_CALIBRATED, clients: Clients | None = None
    ) -> list[Timeline]:
        """Simulate `requests` on a host with the slowdown `slowness`, and return the timelines of the requests.

        They arrive at their arrival times or, if `clients` are given, from a closed loop.
        """
        profile = self.profile
        path = self.directory / f"{profile.machine}-{slowness.prompts:.6f}-{slowness.decodes:.6f}.yaml"
        path.write_text(dump_profile(profile.slower(*slowness)), encoding="utf-8")
        return timelines_of(self.cluster(path), requests, self.catalog, clients)


@dataclass(frozen=True, slots=True)
class SimulatedEndpoint(Twin):
    """Simulation of a running service from the measured profile of one instance."""

    def cluster(self, path: Path) -> ClusterSpec:
        profile = self.profile
        chunked = profile.max_num_batched_tokens is not None
        spec = ClusterSpec(
            pools=tuple(
                PoolSpec(
                    machines=count,
                    machine=profile.machine,
                    role=role,
                    batcher="chunked-prefill" if chunked and role is not Role.DECODE else None,
                )
                for role, count in self.design.counts.items()
            ),
            model=profile.model.name,
            router="jsq",
            handoff="serialized",
            profiles=(str(path.absolute()),),
        )
        limits = {"max_num_batched_tokens": profile.max_num_batched_tokens, "max_num_seqs": profile.max_num_seqs}
        return msgspec.structs.replace(spec, **{name: limit for name, limit in limits.items() if limit is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedService(Twin):
    """Simulated counterpart of a real service, based on the measured performance profile of the service's host."""

    kv_capacity_tokens: int
    max_num_seqs: int

    def cluster(self, path: Path) -> ClusterSpec:
        """Return a cluster spec for simulating the service on this machine with the profile in the file `path`.

        Raises ConfigurationError if the profile was measured with another number of CPU cores or threads per worker.
        """
        workers = self.design.workers()
        threads, cores = workers[0].threads, len(available_cores())
        host = self.profile.shared_host
        if (host.cores, host.threads) != (cores, threads):
            raise ConfigurationError(
                f"the profile was measured with {host.threads} of {host.cores} cores per worker, but "
                f"{self.design.name} has {threads} of {cores} on this machine: run `twofold calibrate live` here"
            )
        return ClusterSpec(
            pools=pools_of(workers, self.profile.machine),
            model=self.profile.model.name,
            router="jsq",
            handoff="layer-wise",
            max_num_batched_tokens=max(worker.max_num_batched_tokens for worker in workers),
            max_num_seqs=self.max_num_seqs,
            kv_capacity_tokens=self.kv_capacity_tokens,
            profiles=(str(path),),
        )


def timelines_of(
    spec: ClusterSpec, requests: Sequence[Request], catalog: Catalog, clients: Clients | None = None
) -> list[Timeline]:
    """Simulate `requests`, in a closed loop of `clients` if given. Return their timelines in order of completion."""
    ends = _Ends()
    loop = None if clients is None else ClosedLoop(requests, clients.concurrency, think_s=clients.think_s)
    open_loop, prepare = (requests, None) if loop is None else ((), loop.attach)
    simulate(spec, open_loop, catalog=catalog, observers=[ends], series=False, prepare=prepare)
    return ends.timelines


class _Ends(Observer):
    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def ended(self, timeline: Timeline, now: float) -> None:
        self.timelines.append(timeline)
