"""Flags of `twofold simulate`."""

from pathlib import Path
from typing import Final, Literal

from twofold.cli import options
from twofold.cli.settings import Settings, flag
from twofold.cli.workload import WorkloadSettings
from twofold.cluster.spec import RULES, CacheSpec
from twofold.cluster.validation import MAX_SECONDS
from twofold.instance import Role
from twofold.scheduling.routers import ROUTERS
from twofold.slo import Slo, SlowdownSlo

OWN_LOADS: Final = {
    "followed": "All its unfinished requests.",
    "sent": "Requests placed since the last report.",
    "ignored": "Nothing.",
}


class ClusterSettings(Settings, panel="Cluster"):
    """Flags for the simulated cluster and its policies, which override a cluster file."""

    cluster: str | None = flag(
        "Pools as COUNTxMACHINE:ROLE, as in 35xh100:prefill,5xh100:decode, or a cluster file (YAML or TOML). A "
        "role is prefill, decode or mixed; @TP or @TPxPP after the machine is the parallelism: 4xa100@2x4:prefill; "
        "@TPepEP spreads experts over EP accelerators: 2xh200@1ep8.",
        metavar="POOLS|FILE",
    )
    model: str | None = flag("Model of the catalog, such as bloom-176b.", unset="that of the cluster file or profile")
    catalog: tuple[Path, ...] = options.CATALOG.field(())
    profiles: tuple[Path, ...] = options.PROFILES.field(())
    performance: str | None = options.PERFORMANCE.field(unset="auto")
    router: str | None = flag(
        "Router: places requests on instances.", choices=ROUTERS, unset="splitwise; jsq if all pools are mixed"
    )
    batcher: dict[Role, str] | None = options.BATCHER.field(unset="that of the role")
    handoff: str | None = options.HANDOFF.field(unset="by-size")
    max_num_batched_tokens: int | Literal["auto"] | None = options.MAX_NUM_BATCHED_TOKENS.field(unset="2048")
    max_num_seqs: int | None = options.MAX_NUM_SEQS.field(unset="512")
    pipeline_chunk: int | None = options.PIPELINE_CHUNK.field()
    block_size: int | None = options.BLOCK_SIZE.field(unset="16")
    swap_space: int | None = options.SWAP_SPACE.field()
    kv_cache: CacheSpec | None = options.KV_CACHE.field()
    kv_bytes_per_token: int | None = flag("KV cache of a token in bytes.", ge=1, unset="that of the model")
    link_gb_per_s: float | None = options.LINK_BANDWIDTH.field(unset="that of the machines")
    contention: bool | None = flag("Let concurrent transfers share the bandwidth of a link.", unset="yes")
    rules: str | None = flag("Scheduling rules of this or another simulator.", choices=RULES, unset="twofold")
    fail: tuple[str, ...] = flag(
        "Failure of an instance: decode-0@30+60 stops at 30 s and restarts 60 s later; repeatable.",
        (),
        metavar="INSTANCE@SECONDS",
    )


class ObjectiveSettings(Settings, panel="Objective"):
    """Flags for the SLO and overload control."""

    slo: Slo | SlowdownSlo | None = options.ANY_SLO.field()
    attainment: float = options.ATTAINMENT.field(0.9)
    overload: str | None = options.OVERLOAD.field()
    reference: str | None = options.REFERENCE.field(unset="dgx-a100; the machine of the profile")


class OutputSettings(Settings, panel="Output"):
    """Flags for the report and the files to write."""

    json: bool = options.JSON.field(False)
    html: Path | None = options.HTML.field()
    requests_table: Path | None = flag("Write a row for each request to this file (Parquet).", metavar="FILE")
    chrome_trace: Path | None = flag("Write a trace for chrome://tracing or Perfetto to this file.", metavar="FILE")
    event_log: Path | None = flag("Write an event per line to this file (JSON lines).", metavar="FILE")


class SimulatedReplanSettings(Settings, panel="Re-planning"):
    """Flags for re-planning the roles of instances."""

    replan: bool = flag("Change roles of instances when the traffic shifts; needs --slo.", False)
    spare: int = flag(
        "Spare machines that may be started; with any, idle instances are also stopped.", 0, ge=0, le=1000
    )
    search_time: float = flag("Simulated duration of a search in seconds.", 5.0, ge=0, le=MAX_SECONDS)
    start_up_time: float = flag("Start-up time of a machine in seconds.", 30.0, ge=0, le=MAX_SECONDS)
    min_gain: float = flag("Minimum gain of a change, as a share of requests.", 0.05, ge=0, le=1)
    min_between: float = flag("Minimum seconds between two decisions.", 60.0, ge=0, le=MAX_SECONDS)


class ControlSettings(Settings, panel="Several controllers"):
    """Flags for several controllers and for delayed load reports from instances."""

    cells: int | None = flag("Number of cells of instances, for a router of cells such as cells:jsq.", ge=1)
    controllers: int | None = flag("Number of controllers; each routes by its own view of the load.", ge=1, unset="1")
    reports_every: float | None = flag(
        "Interval of load reports of an instance or cell; 0 is immediate.",
        metavar="SECONDS",
        unset="0.2 if another flag of controllers is given",
    )
    report_delay: float | None = flag("Delay of a load report.", metavar="SECONDS")
    own_load: str | None = flag(
        "What a controller adds to reports of its own requests.", choices=OWN_LOADS, unset="followed"
    )


class SimulateSettings(
    ControlSettings, SimulatedReplanSettings, OutputSettings, ObjectiveSettings, ClusterSettings, WorkloadSettings
):
    """All flags of `twofold simulate`."""

    @property
    def written_files(self) -> dict[str, Path]:
        """Paths of the files to write, by field name."""
        names = ("html", "requests_table", "chrome_trace", "event_log")
        return {name: path for name in names if (path := getattr(self, name)) is not None}
