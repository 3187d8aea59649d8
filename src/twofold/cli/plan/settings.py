"""Flags of `twofold plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

from twofold.cli import options
from twofold.cli.settings import Settings, flag
from twofold.cli.workload import DEFAULT_DURATION_S, ShapeSettings
from twofold.instance import Role
from twofold.scheduling.routers import ROUTERS
from twofold.slo import SPLITWISE, Slo, SlowdownSlo

# Goodput compares single instances, whose rates are low, so a simulation needs more requests.
_MIN_REQUESTS, _MIN_REQUESTS_FOR_GOODPUT = 500, 2000
OBJECTIVES: Final = {
    "throughput": "Most requests/s within a budget.",
    "cost": "Least dollars per hour for --rate.",
    "power": "Least power for --rate.",
    "goodput": "Most requests/s per accelerator within the SLO, with parallelism of its own for each phase.",
}
AFFINITIES: Final = {
    "auto": "By the links of the machines.",
    "high": "KV may be transferred between nodes.",
    "low": "KV is transferred within a node.",
}


@dataclass(frozen=True, kw_only=True)
class PlanObjectiveSettings(Settings):
    """The objective of a plan, and the SLO that it must meet."""

    PANEL: ClassVar = "Objective"
    DEFAULTS: ClassVar = {"slo": "splitwise"}

    model: str = flag("Model of the catalog, such as bloom-176b.", ...)
    objective: str = flag("Objective of the search.", "throughput", choices=OBJECTIVES)
    slo: Slo | SlowdownSlo = flag(
        "SLO in seconds, as in ttft=2,tpot=0.1, or splitwise for the bounds on slowdowns of Splitwise (table VI).",
        SPLITWISE,
        metavar="BOUNDS",
        parse=options.parse_any_slo,
    )
    attainment: float = options.ATTAINMENT.field(0.9)
    rate: float | None = options.RATE.field()
    reference: str = flag("Reference machine of slowdowns.", "dgx-a100", metavar="MACHINE")
    tolerance: float = flag("Relative tolerance of the highest rates.", 0.02, ge=0.001, le=0.5)


@dataclass(frozen=True, kw_only=True)
class CapacitySettings(Settings):
    """Capacity planning of prefix caches, instead of machines."""

    PANEL: ClassVar = "KV capacity"
    DEFAULTS: ClassVar = {
        "nodes": "as many as the trace keeps busy without reuse",
        "dram_gb": "the cheapest",
        "dram_price": "that of the catalog",
        "disk_price": "that of the catalog",
    }

    kv_capacity: bool = flag(
        "Plan prefix caches: hit rate, saved GPU time and price of each capacity of DRAM and disk.", False
    )
    nodes: int | None = flag("Number of machines that prefill.", ge=1)
    dram_gb: float | None = flag("GB of DRAM of each node in front of the disk.")
    dram_price: float | None = flag("Dollars for a GB of DRAM and hour.")
    disk_price: float | None = flag("Dollars for a GB of disk and hour.")


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Settings):
    """The designs to compare, and their budget."""

    PANEL: ClassVar = "Machines"
    DEFAULTS: ClassVar = {"family": "AA,HH,HA,HHcap"}

    family: tuple[str, ...] = flag(
        "PREFILL+DECODE machines, as in h100+a100, or AA, HH, HA, HHcap; separated by commas, repeatable.", ()
    )
    machines: str | None = flag("Machines, separated by commas: plan with all pairs of them.")
    split: bool = flag("Plan disaggregated designs.", True)
    colocated: bool = flag("Plan colocated designs, to compare.", True)
    max_machines: str | None = flag("Maximum number of machines, in all or of a kind, as in 40 or a100=30,h100=20.")
    max_cost: float | None = flag("Maximum dollars per hour.")
    max_power: float | None = flag("Maximum provisioned power in kW.")
    max_gpus: str | None = flag(
        "Number of accelerators for goodput: 8 of the one kind in --machines, or a stock, a100=8,h100=16."
    )
    max_pipeline: int | None = flag("Maximum pipeline stages for goodput; fewer make the search quicker.", ge=1)
    affinity: str = flag("Whether KV may be transferred between nodes, for goodput.", "auto", choices=AFFINITIES)
    catalog: tuple[Path, ...] = options.CATALOG.field(())


@dataclass(frozen=True, kw_only=True)
class PlanWorkloadSettings(ShapeSettings):
    """The requests of each simulation."""

    PANEL: ClassVar = "Workload"
    DEFAULTS: ClassVar = {"min_requests": f"{_MIN_REQUESTS}; {_MIN_REQUESTS_FOR_GOODPUT} for goodput"}

    workload: str = options.WORKLOAD.field(...)
    duration: float = flag(
        "Seconds of arrivals in each simulation; more if they have too few requests.", DEFAULT_DURATION_S
    )
    min_requests: int | None = flag("Minimum number of requests in each simulation.", ge=1)


@dataclass(frozen=True, kw_only=True)
class PolicySettings(Settings):
    """Policies of the instances of a design."""

    PANEL: ClassVar = "Cluster"
    DEFAULTS: ClassVar = {
        "performance": "auto",
        "router": "splitwise; jsq for goodput",
        "batcher": "that of the role; mixed and chunked-prefill for colocated designs",
        "handoff": "by-size",
        "tp": "all accelerators of a machine",
        "link_gb_per_s": "that of the machines",
        "max_num_batched_tokens": "2048",
        "max_num_seqs": "512",
    }

    performance: str | None = options.PERFORMANCE.field()
    router: str | None = flag("Router of disaggregated designs.", choices=ROUTERS)
    batcher: dict[Role, str] | None = options.BATCHER.field()
    handoff: str | None = options.HANDOFF.field()
    tp: int | None = options.TENSOR_PARALLEL.field()
    link_gb_per_s: float | None = options.LINK_BANDWIDTH.field()
    max_num_batched_tokens: int | Literal["auto"] | None = options.MAX_NUM_BATCHED_TOKENS.field()
    max_num_seqs: int | None = options.MAX_NUM_SEQS.field()


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Executor of simulations, and store of results."""

    PANEL: ClassVar = "Running"
    DEFAULTS: ClassVar = {"jobs": "all cores"}

    jobs: int | None = flag("Number of simulations at a time.", ge=1)
    ray: str | None = flag(
        "Simulate on this Ray cluster, and plan for its machines unless flags name others.", metavar="ADDRESS"
    )
    store: Path = flag(
        "Store of finished simulations; an interrupted or repeated plan resumes from it.",
        Path(".twofold/plan.sqlite"),
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOutputSettings(Settings):
    """Reports and files."""

    PANEL: ClassVar = "Output"

    json: bool = options.JSON.field(False)
    output: Path | None = flag("Write the best design to this file, as a deployment (YAML).", metavar="FILE")
    html: Path | None = options.HTML.field()


@dataclass(frozen=True, kw_only=True)
class PlanSettings(
    PlanOutputSettings,
    RunSettings,
    PolicySettings,
    PlanWorkloadSettings,
    MachineSettings,
    CapacitySettings,
    PlanObjectiveSettings,
):
    """All flags of `twofold plan`."""

    @property
    def goodput(self) -> bool:
        return self.objective == "goodput"

    @property
    def requests_per_trial(self) -> int:
        """The minimum number of requests of a simulation."""
        return self.min_requests or (_MIN_REQUESTS_FOR_GOODPUT if self.goodput else _MIN_REQUESTS)
