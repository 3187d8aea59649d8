"""Flags of `twofold plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final

from twofold.cli import options
from twofold.cli.settings import Flag, Settings
from twofold.cli.workload import DEFAULT_DURATION_S, ShapeSettings
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
    """What the plan optimizes, and the SLO that it must meet."""

    PANEL: ClassVar = "Objective"
    DEFAULTS: ClassVar = {"slo": "splitwise"}

    model: Annotated[str, Flag("Model of the catalog, such as bloom-176b.")]
    objective: Annotated[str, Flag("Objective of the search.", choices=OBJECTIVES)] = "throughput"
    slo: Annotated[
        Slo | SlowdownSlo,
        Flag(
            "SLO in seconds, as in ttft=2,tpot=0.1, or splitwise for the bounds on slowdowns of Splitwise (table VI).",
            metavar="BOUNDS",
            parse=options.parse_any_slo,
        ),
    ] = SPLITWISE
    attainment: options.Attainment = 0.9
    rate: options.Rate = None
    reference: Annotated[str, Flag("Reference machine of slowdowns.", metavar="MACHINE")] = "dgx-a100"
    tolerance: Annotated[float, Flag("Relative tolerance of the highest rates.", ge=0.001, le=0.5)] = 0.02


@dataclass(frozen=True, kw_only=True)
class CapacitySettings(Settings):
    """The capacity of prefix caches, in place of machines."""

    PANEL: ClassVar = "KV capacity"
    DEFAULTS: ClassVar = {
        "nodes": "as many as the trace keeps busy without reuse",
        "dram_gb": "the cheapest",
        "dram_price": "that of the catalog",
        "disk_price": "that of the catalog",
    }

    kv_capacity: Annotated[
        bool, Flag("Plan prefix caches: hit rate, saved GPU time and price of each capacity of DRAM and disk.")
    ] = False
    nodes: Annotated[int | None, Flag("Number of machines that prefill.", ge=1)] = None
    dram_gb: Annotated[float | None, Flag("GB of DRAM of each node in front of the disk.")] = None
    dram_price: Annotated[float | None, Flag("Dollars for a GB of DRAM and hour.")] = None
    disk_price: Annotated[float | None, Flag("Dollars for a GB of disk and hour.")] = None


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Settings):
    """The designs to compare, and their budget."""

    PANEL: ClassVar = "Machines"
    DEFAULTS: ClassVar = {"family": "AA,HH,HA,HHcap"}

    family: Annotated[
        tuple[str, ...],
        Flag("PREFILL+DECODE machines, as in h100+a100, or AA, HH, HA, HHcap; separated by commas, repeatable."),
    ] = ()
    machines: Annotated[str | None, Flag("Machines, separated by commas: plan with all pairs of them.")] = None
    split: Annotated[bool, Flag("Plan disaggregated designs.")] = True
    colocated: Annotated[bool, Flag("Plan colocated designs, to compare.")] = True
    max_machines: Annotated[
        str | None, Flag("Maximum number of machines, in all or of a kind, as in 40 or a100=30,h100=20.")
    ] = None
    max_cost: Annotated[float | None, Flag("Maximum dollars per hour.")] = None
    max_power: Annotated[float | None, Flag("Maximum provisioned power in kW.")] = None
    max_gpus: Annotated[
        str | None,
        Flag("Number of accelerators for goodput: 8 of the one kind in --machines, or a stock, a100=8,h100=16."),
    ] = None
    max_pipeline: Annotated[
        int | None, Flag("Maximum pipeline stages for goodput; fewer make the search quicker.", ge=1)
    ] = None
    affinity: Annotated[str, Flag("Whether KV may be transferred between nodes, for goodput.", choices=AFFINITIES)] = (
        "auto"
    )
    catalog: options.Catalog = ()


@dataclass(frozen=True, kw_only=True)
class PlanWorkloadSettings(ShapeSettings):
    """The requests of each simulation."""

    PANEL: ClassVar = "Workload"
    DEFAULTS: ClassVar = {"min_requests": f"{_MIN_REQUESTS}; {_MIN_REQUESTS_FOR_GOODPUT} for goodput"}

    workload: options.Workload
    duration: Annotated[float, Flag("Seconds of arrivals in each simulation; more if they have too few requests.")] = (
        DEFAULT_DURATION_S
    )
    min_requests: Annotated[int | None, Flag("Minimum number of requests in each simulation.", ge=1)] = None


@dataclass(frozen=True, kw_only=True)
class PolicySettings(Settings):
    """How the instances of a design are run."""

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

    performance: options.Performance = None
    router: Annotated[str | None, Flag("Router of disaggregated designs.", choices=ROUTERS)] = None
    batcher: options.Batcher = None
    handoff: options.Handoff = None
    tp: options.TensorParallel = None
    link_gb_per_s: options.LinkBandwidth = None
    max_num_batched_tokens: options.MaxNumBatchedTokens = None
    max_num_seqs: options.MaxNumSeqs = None


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Where simulations run, and where results are kept."""

    PANEL: ClassVar = "Running"
    DEFAULTS: ClassVar = {"jobs": "all cores"}

    jobs: Annotated[int | None, Flag("Number of simulations at a time.", ge=1)] = None
    ray: Annotated[
        str | None,
        Flag("Simulate on this Ray cluster, and plan for its machines unless flags name others.", metavar="ADDRESS"),
    ] = None
    store: Annotated[
        Path, Flag("Store of finished simulations; an interrupted or repeated plan resumes from it.", metavar="FILE")
    ] = Path(".twofold/plan.sqlite")


@dataclass(frozen=True, kw_only=True)
class PlanOutputSettings(Settings):
    """Reports and files."""

    PANEL: ClassVar = "Output"

    json: options.Json = False
    output: Annotated[
        Path | None, Flag("Write the best design to this file, as a deployment (YAML).", metavar="FILE")
    ] = None
    html: options.Html = None


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
