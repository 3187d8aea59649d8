"""From a host's profile to the cluster on it: who computes on which of its cores."""

from collections.abc import Sequence

from twofold.cluster.cores import gateway_cores, share_cores
from twofold.cluster.timing import ps
from twofold.instance import Role
from twofold.performance.host_profile import HostProfile
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.simulation.host import Host
from twofold.simulation.hosted import HostedCluster, HostedInstance, SimulatedGateway
from twofold.simulation.kernel import Kernel
from twofold.simulation.observers.base import Observer
from twofold.simulation.site import Site
from twofold.simulation.statistics import RunStatistics


class Hosting:
    """A cluster on a host, empty, and what makes its instances; `workers` are their names and roles in order."""

    def __init__(
        self,
        profile: HostProfile,
        workers: Sequence[tuple[str, Role]],
        kernel: Kernel,
        scheduler: ClusterScheduler,
        statistics: RunStatistics,
        observers: Sequence[Observer],
    ) -> None:
        everywhere = range(profile.cores)
        names, roles = zip(*workers, strict=True)
        shares = share_cores(everywhere, len(workers))
        host = Host(kernel, profile.cores)
        front = SimulatedGateway(
            kernel, host, gateway_cores(everywhere, zip(roles, shares, strict=True)), profile.front
        )
        slowdowns = profile.prefill, profile.decode
        cold = ps(profile.engine.cold_s)
        self.cluster = HostedCluster(kernel, scheduler, statistics, observers, host, slowdowns, cold, front)
        self._kernel = kernel
        self._cores = dict(zip(names, shares, strict=True))

    def instance(self, site: Site, scheduler: InstanceScheduler) -> HostedInstance:
        return HostedInstance(site, scheduler, self._kernel, self.cluster, self._cores[site.name])
