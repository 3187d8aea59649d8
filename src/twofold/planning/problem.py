"""Planning problem (LLM, workload, SLO and cluster settings), and the families of designs to search."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from twofold.cluster.profiles import capacity_tokens, performance_of
from twofold.cluster.spec import SATURATING, ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError, require
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.performance.registry import EXPERT_PARALLEL
from twofold.planning.design import Design, Family, FamilyGroup, MachineKind
from twofold.planning.workload import WorkloadArguments
from twofold.request import Phase
from twofold.slo import Slo, SlowdownSlo

_MOST_STAGES = 8  # machines that a pipeline spans
# Pool routers could decode a colocated request on another instance; these do not. Other rules have the router of
# SplitwiseSim's baselines.
COLOCATED_ROUTER, CACHED_ROUTER, RULES_ROUTER = "jsq", "local-prefix", "jsq-pending"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Planning problem: LLM, cluster settings, workload and SLO."""

    template: ClusterSpec  # without pools
    workload: WorkloadArguments
    slo: Slo | SlowdownSlo
    attainment: float = 0.9  # required share of requests within an SLO in seconds
    reference: str = "dgx-a100"  # machine type that slowdowns are relative to
    tensor_parallel: int | None = None  # of an instance, if it is not searched
    batchers: dict[Role, str] = {}  # in place of the default batchers
    split_routers: tuple[str | None, ...] = (None,)  # to try in split designs; None is that of the template
    catalog: Catalog

    @property
    def colocated_batching(self) -> tuple[tuple[str, int | None], ...]:
        """Batchers and token budgets to try in colocated designs."""
        # A budget of None means the budget of the template.
        batcher = self.batchers.get(Role.MIXED)
        return COLOCATED if batcher is None else ((batcher, None),)

    @property
    def split_batchers(self) -> tuple[str | None, ...]:
        """Batchers to try in split designs; None is the default of each role."""
        given = {Role.PREFILL, Role.DECODE} & self.batchers.keys()
        whole = self.template.max_num_batched_tokens == SATURATING  # chunks need a number of tokens
        return (None,) if given or whole or self.template.rules != "twofold" else SPLIT_BATCHERS

    def kind(self, machine: str) -> MachineKind:
        """Return price, power and accelerators of a machine type. Raises ConfigurationError if it is unknown."""
        found = self.catalog.machine(machine)
        return MachineKind(name=found.name, price_per_h=found.price_per_h, tdp_w=found.tdp_w, accelerators=found.count)

    def instance(self, machine: str, tensor_parallel: int, pipeline_parallel: int = 1) -> MachineKind:
        """Return the part of a machine that one LLM instance uses, with the part's share of price and power."""
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
            machines=0,
        )

    def layouts(self, machine: str) -> list[MachineKind]:
        """Return `machine` once for each parallelism of its instances to search. Raises ConfigurationError if none
        can run the LLM.

        Pipelines are searched if no machine has enough memory for an instance; each of their stages is a machine.
        """
        whole, model = self.kind(machine), self.catalog.model(self.template.model)
        divisors = (degree for degree in range(1, whole.accelerators + 1) if whole.accelerators % degree == 0)
        degrees = [degree for degree in divisors if model.heads % degree == 0]
        if self.tensor_parallel is not None:
            degrees = [self.tensor_parallel]
        alone = [replace(whole, tensor_parallel=degree) for degree in degrees]
        if model.expert_parameters and self.template.performance in EXPERT_PARALLEL and whole.accelerators > 1:
            # Whole experts on each accelerator of the machine.
            alone = [replace(kind, expert_parallel=whole.accelerators) for kind in alone] + alone
        able, reason = self.able(alone)
        if able:
            # If some were measured, estimates of the others are not compared with them.
            measured = [kind for kind in able if not self.performance(kind).error.estimated]
            return measured or able
        if alone[-1].instances == 1:
            degree = whole.accelerators
            for stages in (each for each in range(2, _MOST_STAGES + 1) if model.layers % each == 0):
                able, _ = self.able([replace(self.instance(machine, degree, stages), machines=stages)])
                if able:
                    return able
        raise reason or ConfigurationError(f"{model.name} has no parallelism for {whole.name}")

    def able(self, kinds: Iterable[MachineKind]) -> tuple[list[MachineKind], ConfigurationError | None]:
        """Select the kinds that can run the LLM. Return them, and the error of the last other kind."""
        able, reason = [], None
        for kind in kinds:
            try:
                self.kv_capacity_tokens(kind)
                self.performance(kind)
            except ConfigurationError as error:  # too little memory, or no performance model
                reason = error
            else:
                able.append(kind)
        return able, reason

    def spec(self, design: Design) -> ClusterSpec:
        """Return the cluster spec of a design."""
        family = design.family
        pools = tuple(
            self._pool(kind, count, role, design)
            for (kind, count), role in zip(design.parts(), family.role_of, strict=True)
        )
        if family.split:
            template = self.template if family.judged is None else self._nearby(family)
            return replace(template, pools=pools, router=family.router or template.router)
        budget = family.max_num_batched_tokens or self.template.max_num_batched_tokens
        usual = COLOCATED_ROUTER if self.template.kv_cache is None else CACHED_ROUTER
        router = usual if self.template.rules == "twofold" else RULES_ROUTER
        return replace(self.template, pools=pools, router=router, max_num_batched_tokens=budget)

    def performance(self, kind: MachineKind) -> PerformanceModel:
        machine = self.catalog.machine(kind.name)
        model = self.catalog.model(self.template.model)
        return performance_of(self.template, model, machine, *self._parallelism(kind), across=kind.machines > 1)

    def tensor_parallel_on(self, kind: MachineKind) -> int:
        return kind.tensor_parallel or self.tensor_parallel or self.catalog.machine(kind.name).count

    def slo_of(self, design: Design) -> Slo | SlowdownSlo:
        """Return the SLO for a design.

        If the design is evaluated for one phase alone, an SLO in seconds keeps only one bound: TTFT for prefill, or
        TPOT for decode. An SLO on slowdowns (relative latencies) is returned unchanged.
        """
        # A family that judges one phase needs only the bound of this phase.
        slo, judged = self.slo, design.family.judged
        if judged is None or isinstance(slo, SlowdownSlo):
            return slo
        return Slo(ttft_s=slo.ttft_s) if judged is Phase.PREFILL else Slo(tpot_s=slo.tpot_s)

    def reference_model(self) -> PerformanceModel | None:
        """Return the performance model of the reference machine. Return None if the SLO is in seconds rather
        than relative to the latencies of the reference machine.
        """
        if isinstance(self.slo, Slo):
            return None
        machine = self.catalog.machine(self.reference)
        model = self.catalog.model(self.template.model)
        return performance_of(self.template, model, machine, machine.count)

    def kv_capacity_tokens(self, kind: MachineKind) -> int:
        """Return the KV capacity of an instance in tokens. Raises ConfigurationError if the LLM does not fit."""
        model, machine = self.catalog.model(self.template.model), self.catalog.machine(kind.name)
        return capacity_tokens(self.template, model, machine, *self._parallelism(kind))

    def require_sensible(self) -> None:
        """Raise ConfigurationError if the required SLO attainment or the workload duration is out of range."""
        if not 0.0 < self.attainment <= 1.0:
            raise ConfigurationError(f"--attainment must be more than 0 and at most 1, not {self.attainment:g}")
        if not 0.0 < self.workload.duration_s < float("inf"):
            raise ConfigurationError(f"--duration must be more than 0 seconds, not {self.workload.duration_s:g}")

    def _parallelism(self, kind: MachineKind) -> tuple[int, int, int | None]:
        return self.tensor_parallel_on(kind), kind.pipeline_parallel, kind.expert_parallel

    def _nearby(self, family: Family) -> ClusterSpec:
        if not family.shared:
            return self.template
        # Phases on shared nodes use the links within a node.
        links = [self.catalog.machine(kind.name).accelerator.interconnect_bytes_per_s for kind in family.kinds]
        return replace(self.template, link_bytes_per_s=min(links), contention=False)

    def _pool(self, kind: MachineKind, count: int, role: Role, design: Design) -> PoolSpec:
        family, whole = design.family, kind.machines > 0
        return PoolSpec(
            machines=count * kind.machines if whole else self._machines(kind, count, design),
            machine=kind.name,
            role=role,
            tensor_parallel=kind.tensor_parallel or self.tensor_parallel,
            pipeline_parallel=kind.pipeline_parallel,
            expert_parallel=kind.expert_parallel,
            instances=None if whole else count,
            nodes="shared" if family.shared and family.judged is None else None,
            batcher=family.batcher or self.batchers.get(role),
        )

    def _machines(self, kind: MachineKind, count: int, design: Design) -> int:
        """Return the number of machines for `count` instances of `kind`."""
        whole = self.catalog.machine(kind.name).count
        if design.family.shared and design.family.judged is None:
            # One machine per pipeline stage, or a single machine if that suffices.
            return 1 if design.accelerators <= whole else kind.pipeline_parallel
        stages = whole // self.tensor_parallel_on(kind)  # a stage never spans machines
        return -(-count * kind.pipeline_parallel // stages)


_T = TypeVar("_T")
# The designs of Splitwise (ISCA'24, section 6): prefill machine + decode machine.
SPLITWISE = {"aa": "a100+a100", "hh": "h100+h100", "ha": "h100+a100", "hhcap": "h100+h100-pcap"}
# Batchers of colocated families: whole prompts with decodes, or small or large chunks.
COLOCATED = (("mixed", None), ("chunked-prefill", 512), ("chunked-prefill", 2048))
# Splitwise's router of the template lets prefill queues hold 8,192 tokens: long prompts wait longer than with `jsq`.
SPLIT_ROUTERS = (None, "jsq")
# Some performance models take more time for a token of a batch longer than a chunk.
SPLIT_BATCHERS = (None, "chunked-prefill")


def parse_families(
    problem: Problem, families: Sequence[str], machines: str | None, *, split: bool, colocated: bool
) -> tuple[Family, ...]:
    """Return the design families selected by `--family` and `--machines`, by default the four of Splitwise. Raises
    ConfigurationError for invalid options.
    """
    if families and machines:
        raise ConfigurationError("give either --family or --machines, not both")
    require(split or colocated, "--no-split and --no-colocated exclude all designs")
    if machines:  # all pairs
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
            for batcher, budget in problem.colocated_batching
        ]
    return tuple(found)


def with_parallelism(problem: Problem, families: Iterable[Family]) -> tuple[tuple[FamilyGroup, ...], tuple[str, ...]]:
    """Expand each family to a group with each combination of parallelisms and, if it is split, of router and batcher.

    Return the groups, and an error message for each machine type that cannot run the LLM. Raises ConfigurationError if
    there is no group.
    """
    layouts: dict[MachineKind, list[MachineKind]] = {}
    reasons: dict[MachineKind, str] = {}
    groups = []
    for family in families:
        for kind in family.kinds:
            if kind not in layouts:
                try:
                    layouts[kind] = problem.layouts(kind.name)
                except ConfigurationError as error:
                    layouts[kind], reasons[kind] = [], str(error)
        policies = (problem.split_routers, problem.split_batchers) if family.split else ((None,), (family.batcher,))
        combined = product(*policies, product(*(layouts[kind] for kind in family.kinds)))
        group = tuple(replace(family, kinds=kinds, router=router, batcher=name) for router, name, kinds in combined)
        if group:
            groups.append(group)
    if not groups:
        raise ConfigurationError(next(iter(reasons.values())))
    return tuple(groups), tuple(reasons.values())


def _parse_pair(problem: Problem, word: str) -> tuple[MachineKind, MachineKind]:
    known = word.lower().removeprefix("splitwise-")
    prefill, plus, decode = SPLITWISE.get(known, word).partition("+")
    require(plus == "+", f"invalid family {word!r}: write PREFILL+DECODE as in h100+a100, or AA, HH, HA or HHcap")
    return problem.kind(prefill.strip()), problem.kind(decode.strip())


def _words(text: str) -> Iterator[str]:
    return (word.strip() for word in text.split(",") if word.strip())


def _unique(items: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(items))
