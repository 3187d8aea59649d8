"""Flags of `twofold plan`."""

from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from twofold.cli import options
from twofold.cli.settings import Settings, flag
from twofold.cli.workload import DEFAULT_DURATION_S, ShapeSettings
from twofold.cluster.spec import CacheSpec
from twofold.instance import Role
from twofold.scheduling.routers import ROUTERS
from twofold.slo import SPLITWISE, Slo, SlowdownSlo

# Goodput is measured on single instances at low rates, so a simulation needs more requests.
_MIN_REQUESTS, _MIN_REQUESTS_FOR_GOODPUT = 500, 2000
_MAX_RATE: Final = 1e6  # requests per second: a trial of this many takes minutes, and a plan hundreds of trials
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


class PlanObjectiveSettings(Settings, panel="Objective"):
    """Flags for the objective of a plan and its SLO."""

    model: str | None = flag("Model of the catalog, such as bloom-176b.", unset="that of the profile")
    objective: str = flag("Objective of the search.", "throughput", choices=OBJECTIVES)
    slo: Slo | SlowdownSlo = options.ANY_SLO.field(SPLITWISE, "splitwise")
    attainment: float = options.ATTAINMENT.field(0.9)
    rate: float | None = replace(options.RATE, le=_MAX_RATE).field()
    reference: str | None = options.REFERENCE.field(unset="dgx-a100; the machine of the profile")
    confidence: float = flag(
        "Required confidence that another draw of the workload meets the SLO.", 0.95, ge=0.0, le=0.999
    )
    draws: int = flag("Number of draws to check the best designs on; 0 for none.", 20, ge=0)
    tolerance: float = flag("Relative tolerance of the highest rates.", 0.02, ge=0.001, le=0.5)


class CapacitySettings(Settings, panel="KV capacity"):
    """Flags for planning the capacity of prefix caches in DRAM and on disk."""

    kv_capacity: bool = flag(
        "Plan prefix caches: hit rate, saved GPU time and price of each capacity of DRAM and disk.", False
    )
    nodes: int | None = flag(
        "Number of machines that prefill.", ge=1, unset="as many as the trace keeps busy without reuse"
    )
    dram_gb: float | None = flag("GB of DRAM of each node in front of the disk.", ge=0, le=1e9, unset="the cheapest")
    dram_price: float | None = flag("Dollars for a GB of DRAM and hour.", ge=0, le=1e9, unset="that of the catalog")
    disk_price: float | None = flag("Dollars for a GB of disk and hour.", ge=0, le=1e9, unset="that of the catalog")


class MachineSettings(Settings, panel="Machines"):
    """Flags for the cluster designs to compare, and for limits on their machines, cost and power."""

    family: tuple[str, ...] = flag(
        "PREFILL+DECODE machines, as in h100+a100, or AA, HH, HA, HHcap; separated by commas, repeatable.",
        (),
        unset="AA,HH,HA,HHcap; the machine of the profile",
    )
    machines: str | None = flag("Machines, separated by commas: plan with all pairs of them.")
    split: bool = flag("Plan disaggregated designs.", True)
    colocated: bool = flag("Plan colocated designs, to compare.", True)
    max_machines: str | None = flag(
        "Maximum number of machines, in all or of a kind, as in 40 or a100=30,h100=20.",
        unset="no limit; as many workers as the host of the profile has cores for",
    )
    max_cost: float | None = flag("Maximum dollars per hour.")
    max_power: float | None = flag("Maximum provisioned power in kW.")
    max_gpus: str | None = flag(
        "Number of accelerators for goodput: 8 of the one kind in --machines, or a stock, a100=8,h100=16."
    )
    max_pipeline: int | None = flag("Maximum pipeline stages for goodput; fewer make the search quicker.", ge=1)
    affinity: str = flag("Whether KV may be transferred between nodes, for goodput.", "auto", choices=AFFINITIES)
    catalog: tuple[Path, ...] = options.CATALOG.field(())
    profiles: tuple[Path, ...] = options.PROFILES.field(())


class PlanWorkloadSettings(ShapeSettings):
    """Flags for the requests of each simulation."""

    workload: str = options.WORKLOAD.field(...)
    duration: float = flag(
        "Seconds of arrivals in each simulation; more if they have too few requests.",
        DEFAULT_DURATION_S,
        le=options.MAX_SECONDS,
    )
    min_requests: int | None = flag(
        "Minimum number of requests in each simulation.",
        ge=1,
        unset=f"{_MIN_REQUESTS}; {_MIN_REQUESTS_FOR_GOODPUT} for goodput",
    )


class PolicySettings(Settings, panel="Cluster"):
    """Flags for the policies and instances of the planned clusters."""

    performance: str | None = options.PERFORMANCE.field(unset="auto")
    router: str | None = flag(
        "Router of disaggregated designs.",
        choices=ROUTERS,
        unset="the better of splitwise and jsq; jsq for goodput, conductor with caches",
    )
    batcher: dict[Role, str] | None = options.BATCHER.field(
        unset="that of the role; mixed and chunked-prefill for colocated designs"
    )
    handoff: str | None = options.HANDOFF.field(unset="by-size")
    tp: int | None = options.TENSOR_PARALLEL.field(unset="searched; for --kv-capacity all accelerators of a machine")
    link_gb_per_s: float | None = options.LINK_BANDWIDTH.field(unset="that of the machines")
    max_num_batched_tokens: int | Literal["auto"] | None = options.MAX_NUM_BATCHED_TOKENS.field(unset="2048")
    max_num_seqs: int | None = options.MAX_NUM_SEQS.field(unset="512")
    kv_cache: CacheSpec | None = options.KV_CACHE.field()


class RunSettings(Settings, panel="Running"):
    """Flags that select where simulations run and where their results are stored."""

    jobs: int | None = flag("Number of simulations at a time.", ge=1, unset="all cores")
    ray: str | None = flag(
        "Simulate on this Ray cluster, and plan for its machines unless flags name others.", metavar="ADDRESS"
    )
    store: Path = flag(
        "Store of finished simulations; an interrupted or repeated plan resumes from it.",
        Path(".twofold/plan.sqlite"),
        metavar="FILE",
    )


class PlanOutputSettings(Settings, panel="Output"):
    """Flags for the report and the files to write."""

    json: bool = options.JSON.field(False)
    output: Path | None = flag("Write the best design to this file, as a deployment (YAML).", metavar="FILE")
    html: Path | None = options.HTML.field()


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
        """Minimum number of requests in a simulation."""
        return self.min_requests or (_MIN_REQUESTS_FOR_GOODPUT if self.goodput else _MIN_REQUESTS)
