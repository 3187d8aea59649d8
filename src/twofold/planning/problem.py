"""What is planned: the model, how it is run, what comes in and what must be kept; all but the machines."""

import msgspec
from msgspec.structs import replace

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.performance.memory import kv_capacity_tokens
from twofold.performance.registry import performance_model
from twofold.planning.design import Design, MachineKind
from twofold.planning.workload import WorkloadArguments
from twofold.simulation.spec import ClusterSpec, PoolSpec
from twofold.slo import Slo, SlowdownSlo

# A colocated request stays where it is; a router of pools might decode it elsewhere.
COLOCATED_ROUTER = "jsq-pending"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """`template` is a cluster without pools: its model, router, hand-off and batches.

    `tensor_parallel` accelerators make an instance, all of a machine if None. `attainment` is the share of requests
    that must keep an `Slo`; `reference` the machine of a `SlowdownSlo`.
    """

    template: ClusterSpec
    workload: WorkloadArguments
    slo: Slo | SlowdownSlo
    attainment: float = 0.9
    reference: str = "dgx-a100"
    tensor_parallel: int | None = None
    catalog: Catalog

    def kind(self, machine: str) -> MachineKind:
        """A machine of the catalog; raises ConfigurationError for one that is not there."""
        found = self.catalog.machine(machine)
        return MachineKind(name=found.name, price_per_h=found.price_per_h, tdp_w=found.tdp_w)

    def spec(self, design: Design) -> ClusterSpec:
        """The cluster to simulate."""
        family = design.family
        if family.split:
            roles = (Role.PREFILL, Role.DECODE)
            pools = tuple(
                self._pool(kind, count, role)
                for (kind, count), role in zip(design.parts(), roles, strict=True)
            )
            return replace(self.template, pools=pools)
        pools = tuple(self._pool(kind, count, Role.MIXED, family.batcher) for kind, count in design.parts())
        budget = family.token_budget or self.template.token_budget
        return replace(self.template, pools=pools, router=COLOCATED_ROUTER, token_budget=budget)

    def performance(self, kind: MachineKind) -> PerformanceModel:
        machine = self.catalog.machine(kind.name)
        model = self.catalog.model(self.template.model)
        return performance_model(self.template.performance, model, machine, self.tensor_parallel_on(kind))

    def tensor_parallel_on(self, kind: MachineKind) -> int:
        return self.tensor_parallel or self.catalog.machine(kind.name).count

    def instances_on(self, kind: MachineKind) -> int:
        """How many instances a machine holds."""
        return self.catalog.machine(kind.name).count // self.tensor_parallel_on(kind)

    def reference_model(self) -> PerformanceModel | None:
        """What slowdowns are multiples of; None where the SLO does not speak of slowdowns."""
        if isinstance(self.slo, Slo):
            return None
        machine = self.catalog.machine(self.reference)
        model = self.catalog.model(self.template.model)
        return performance_model(self.template.performance, model, machine, machine.count)

    def kv_capacity_tokens(self, kind: MachineKind) -> int:
        """Tokens of KV cache of an instance; raises ConfigurationError where the model does not fit."""
        template = self.template
        return kv_capacity_tokens(
            self.catalog.model(template.model),
            self.catalog.machine(kind.name),
            self.tensor_parallel_on(kind),
            template.memory_utilization,
            template.kv_bytes_per_token,
        )

    def require_sensible(self) -> None:
        """Raise ConfigurationError for numbers that cannot be."""
        if not 0.0 < self.attainment <= 1.0:
            raise ConfigurationError(
                f"--attainment {self.attainment:g} is no share: give more than 0, at most 1"
            )
        if not 0.0 < self.workload.duration_s < float("inf"):
            raise ConfigurationError(
                f"--duration {self.workload.duration_s:g} simulates nothing: give seconds above 0"
            )

    def _pool(self, kind: MachineKind, count: int, role: Role, batcher: str | None = None) -> PoolSpec:
        return PoolSpec(
            machines=count,
            machine=kind.name,
            role=role,
            tensor_parallel=self.tensor_parallel,
            batcher=batcher,
        )
