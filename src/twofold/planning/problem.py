"""What is planned: the model, how it is run, what comes in and what must be kept; all but the machines.

Which families of designs a plan looks at, from what people write.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.performance.instance import kv_capacity_tokens
from twofold.performance.registry import performance_model
from twofold.planning.design import Design, Family, MachineKind
from twofold.planning.workload import WorkloadArguments
from twofold.request import Phase
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
        return MachineKind(
            name=found.name, price_per_h=found.price_per_h, tdp_w=found.tdp_w, accelerators=found.count
        )

    def instance(self, machine: str, tensor_parallel: int, pipeline_parallel: int = 1) -> MachineKind:
        """An instance on accelerators of that machine, at its share of the machine's price and power."""
        whole = self.kind(machine)
        accelerators = tensor_parallel * pipeline_parallel
        share = accelerators / whole.accelerators
        return MachineKind(
            name=whole.name,
            price_per_h=round(share * whole.price_per_h, 6),
            tdp_w=round(share * whole.tdp_w, 6),
            accelerators=accelerators,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
        )

    def spec(self, design: Design) -> ClusterSpec:
        """The cluster to simulate."""
        family = design.family
        pools = tuple(
            self._pool(kind, count, role, design)
            for (kind, count), role in zip(design.parts(), family.role_of, strict=True)
        )
        if family.split:
            template = self.template if family.judged is None else self._nearby(family)
            return replace(template, pools=pools)
        budget = family.max_num_batched_tokens or self.template.max_num_batched_tokens
        return replace(self.template, pools=pools, router=COLOCATED_ROUTER, max_num_batched_tokens=budget)

    def performance(self, kind: MachineKind) -> PerformanceModel:
        machine = self.catalog.machine(kind.name)
        model = self.catalog.model(self.template.model)
        return performance_model(
            self.template.performance,
            model,
            machine,
            self.tensor_parallel_on(kind),
            kind.pipeline_parallel,
        )

    def tensor_parallel_on(self, kind: MachineKind) -> int:
        return kind.tensor_parallel or self.tensor_parallel or self.catalog.machine(kind.name).count

    def instances_on(self, kind: MachineKind) -> int:
        """How many instances one of this kind holds."""
        if kind.tensor_parallel is not None:
            return 1
        return self.catalog.machine(kind.name).count // self.tensor_parallel_on(kind)

    def slo_of(self, design: Design) -> Slo | SlowdownSlo:
        """What the design is judged by: all of the SLO, or the bound of the one phase that counts."""
        slo, judged = self.slo, design.family.judged
        if judged is None or isinstance(slo, SlowdownSlo):
            return slo
        return Slo(ttft_s=slo.ttft_s) if judged is Phase.PREFILL else Slo(tpot_s=slo.tpot_s)

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
        return template.kv_capacity_tokens or kv_capacity_tokens(
            self.catalog.model(template.model),
            self.catalog.machine(kind.name),
            self.tensor_parallel_on(kind),
            template.memory_utilization,
            template.kv_bytes_per_token,
            kind.pipeline_parallel,
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

    def _nearby(self, family: Family) -> ClusterSpec:
        """A template for one phase by itself: where it will share nodes with the other, hand-offs stay within them."""
        if not family.shared:
            return self.template
        links = [
            self.catalog.machine(kind.name).accelerator.interconnect_bytes_per_s for kind in family.kinds
        ]
        return replace(self.template, link_bytes_per_s=min(links), contention=False)

    def _pool(self, kind: MachineKind, count: int, role: Role, design: Design) -> PoolSpec:
        family = design.family
        if kind.tensor_parallel is None:
            return PoolSpec(
                machines=count,
                machine=kind.name,
                role=role,
                tensor_parallel=self.tensor_parallel,
                batcher=family.batcher,
            )
        return PoolSpec(
            machines=self._machines(kind, count, design),
            machine=kind.name,
            role=role,
            tensor_parallel=kind.tensor_parallel,
            pipeline_parallel=kind.pipeline_parallel,
            instances=count,
            nodes="shared" if family.shared and family.judged is None else None,
            batcher=family.batcher,
        )

    def _machines(self, kind: MachineKind, count: int, design: Design) -> int:
        """Those that so many instances are on: a stage never lies on two of them.

        On shared nodes there is one for each stage, unless the whole design fits on one.
        """
        whole = self.catalog.machine(kind.name).count
        if design.family.shared and design.family.judged is None:
            return 1 if design.accelerators <= whole else kind.pipeline_parallel
        stages = whole // self.tensor_parallel_on(kind)
        return -(-count * kind.pipeline_parallel // stages)


_T = TypeVar("_T")
# The designs of Splitwise (ISCA'24, section 6): prefill machine + decode machine.
SPLITWISE = {"aa": "a100+a100", "hh": "h100+h100", "ha": "h100+a100", "hhcap": "h100+h100-pcap"}
# How colocated instances batch: whole prompts beside decodes, or chunks of them, small or large.
COLOCATED = (("mixed", None), ("chunked-prefill", 512), ("chunked-prefill", 2048))


def parse_families(
    problem: Problem, families: Sequence[str], machines: str | None, *, split: bool, colocated: bool
) -> tuple[Family, ...]:
    """The families of `--family` (PREFILL+DECODE, or AA, HH, HA, HHcap), or of all pairs of `--machines`.

    With neither, the four of Splitwise. `colocated` adds, for each machine in them, one family per way to batch. Raises
    ConfigurationError for what cannot be understood.
    """
    if families and machines:
        raise ConfigurationError("give either --family or --machines, not both")
    if not (split or colocated):
        raise ConfigurationError("--no-split and --no-colocated together leave nothing to plan")
    if machines:
        kinds = _unique(problem.kind(name) for name in _words(machines))
        pairs = [(prefill, decode) for prefill in kinds for decode in kinds]
    else:
        words = [word for text in families for word in _words(text)] or list(SPLITWISE)
        pairs = _unique(_parse_pair(problem, word) for word in words)
    kinds = _unique(kind for pair in pairs for kind in pair)
    found = [Family(kinds=pair) for pair in pairs] if split else []
    if colocated:
        found += [
            Family(kinds=(kind,), batcher=batcher, max_num_batched_tokens=budget)
            for kind in kinds
            for batcher, budget in COLOCATED
        ]
    return tuple(found)


def fitting(problem: Problem, families: Iterable[Family]) -> tuple[tuple[Family, ...], tuple[str, ...]]:
    """(families whose machines all hold the model, why the other machines do not).

    Raises ConfigurationError where none is left.
    """
    reasons: dict[str, str] = {}
    fit = []
    for family in families:
        wrong = {kind.name: why for kind in family.kinds if (why := _why_not(problem, kind))}
        reasons |= wrong
        if not wrong:
            fit.append(family)
    if not fit:
        raise ConfigurationError(next(iter(reasons.values())))
    return tuple(fit), tuple(reasons.values())


def _parse_pair(problem: Problem, word: str) -> tuple[MachineKind, MachineKind]:
    known = word.lower().removeprefix("splitwise-")
    prefill, plus, decode = SPLITWISE.get(known, word).partition("+")
    if not plus:
        raise ConfigurationError(
            f"family {word!r} is not understood: write PREFILL+DECODE as in h100+a100, or AA, HH, HA or HHcap"
        )
    return problem.kind(prefill.strip()), problem.kind(decode.strip())


def _why_not(problem: Problem, kind: MachineKind) -> str | None:
    try:
        problem.kv_capacity_tokens(kind)
    except ConfigurationError as error:
        return str(error)
    return None


def _words(text: str) -> Iterator[str]:
    return (word.strip() for word in text.split(",") if word.strip())


def _unique(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))
