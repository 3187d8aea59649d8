"""Flags of `twofold simulate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final

from twofold.cli import options
from twofold.cli.settings import Flag, Settings
from twofold.cli.workload import WorkloadSettings
from twofold.cluster.spec import RULES, CacheSpec, parse_cache
from twofold.cluster.validation import MAX_SECONDS
from twofold.scheduling.routers import ROUTERS

OWN_LOADS: Final = {
    "followed": "All its unfinished requests.",
    "sent": "Requests placed since the last report.",
    "ignored": "Nothing.",
}


def _parse_cache(text: str, _: str) -> CacheSpec:
    return parse_cache(text)


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(Settings):
    """The simulated cluster and its policies; flags override what a cluster file has."""

    PANEL: ClassVar = "Cluster"
    DEFAULTS: ClassVar = {
        "model": "that of the cluster file or profile",
        "performance": "auto",
        "router": "splitwise",
        "batcher": "that of the role",
        "handoff": "by-size",
        "max_num_batched_tokens": "2048",
        "max_num_seqs": "512",
        "block_size": "16",
        "kv_bytes_per_token": "that of the model",
        "link_gb_per_s": "that of the machines",
        "contention": "yes",
        "rules": "twofold",
    }

    cluster: Annotated[
        str | None,
        Flag(
            "Pools as COUNTxMACHINE:ROLE, as in 35xh100:prefill,5xh100:decode, or a cluster file (YAML or TOML). A "
            "role is prefill, decode or mixed; @TP or @TPxPP after the machine is the parallelism: 4xa100@2x4:prefill.",
            metavar="POOLS|FILE",
        ),
    ] = None
    model: Annotated[str | None, Flag("Model of the catalog, such as bloom-176b.")] = None
    catalog: options.Catalog = ()
    profile: options.Profile = None
    performance: options.Performance = None
    router: Annotated[str | None, Flag("Router: places requests on instances.", choices=ROUTERS)] = None
    batcher: options.Batcher = None
    handoff: options.Handoff = None
    max_num_batched_tokens: options.MaxNumBatchedTokens = None
    max_num_seqs: options.MaxNumSeqs = None
    pipeline_chunk: options.PipelineChunk = None
    block_size: options.BlockSize = None
    swap_space: options.SwapSpace = None
    kv_cache: Annotated[
        CacheSpec | None,
        Flag(
            "Prefix cache of each prefilling machine, as in 128GiB, '3000000 tokens' or "
            "dram=512GiB,disk=4TB,eviction=lfu; used where the trace names prefix blocks.",
            metavar="SIZE",
            parse=_parse_cache,
        ),
    ] = None
    kv_bytes_per_token: Annotated[int | None, Flag("KV cache of a token in bytes.", ge=1)] = None
    link_gb_per_s: options.LinkBandwidth = None
    contention: Annotated[bool | None, Flag("Let concurrent transfers share the bandwidth of a link.")] = None
    rules: Annotated[str | None, Flag("Scheduling rules of this or another simulator.", choices=RULES)] = None
    fail: Annotated[
        tuple[str, ...],
        Flag(
            "Failure of an instance: decode-0@30+60 stops at 30 s and restarts 60 s later; repeatable.",
            metavar="INSTANCE@SECONDS",
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(Settings):
    """The SLO and admission control."""

    PANEL: ClassVar = "Objective"
    DEFAULTS: ClassVar = {"reference": "dgx-a100; host with --profile"}

    slo: options.AnySlo = None
    attainment: options.Attainment = 0.9
    overload: options.Overload = None
    reference: options.Reference = None


@dataclass(frozen=True, kw_only=True)
class OutputSettings(Settings):
    """Reports and files."""

    PANEL: ClassVar = "Output"

    json: options.Json = False
    html: options.Html = None
    requests_table: Annotated[
        Path | None, Flag("Write a row for each request to this file (Parquet).", metavar="FILE")
    ] = None
    chrome_trace: Annotated[
        Path | None, Flag("Write a trace for chrome://tracing or Perfetto to this file.", metavar="FILE")
    ] = None
    event_log: Annotated[Path | None, Flag("Write an event per line to this file (JSON lines).", metavar="FILE")] = None


@dataclass(frozen=True, kw_only=True)
class SimulatedReplanSettings(Settings):
    """Re-planning of the roles of instances; see `scheduling.replan`."""

    PANEL: ClassVar = "Re-planning"

    replan: Annotated[bool, Flag("Change roles of instances when the traffic shifts; needs --slo.")] = False
    spare: Annotated[
        int, Flag("Spare machines that may be started; with any, idle instances are also stopped.", ge=0, le=1000)
    ] = 0
    search_time: Annotated[float, Flag("Simulated duration of a search in seconds.", ge=0, le=MAX_SECONDS)] = 5.0
    start_up_time: Annotated[float, Flag("Start-up time of a machine in seconds.", ge=0, le=MAX_SECONDS)] = 30.0
    min_gain: Annotated[float, Flag("Minimum gain of a change, as a share of requests.", ge=0, le=1)] = 0.05
    min_between: Annotated[float, Flag("Minimum seconds between two decisions.", ge=0, le=MAX_SECONDS)] = 60.0


@dataclass(frozen=True, kw_only=True)
class ControlSettings(Settings):
    """Several controllers, with delayed load reports."""

    PANEL: ClassVar = "Several controllers"
    DEFAULTS: ClassVar = {
        "controllers": "1",
        "reports_every": "0.2 if another flag of controllers is given",
        "own_load": "followed",
    }

    cells: Annotated[
        int | None, Flag("Number of cells of instances, for a router of cells such as cells:jsq.", ge=1)
    ] = None
    controllers: Annotated[
        int | None, Flag("Number of controllers; each routes by its own view of the load.", ge=1)
    ] = None
    reports_every: Annotated[
        float | None, Flag("Interval of load reports of an instance or cell; 0 is immediate.", metavar="SECONDS")
    ] = None
    report_delay: Annotated[float | None, Flag("Delay of a load report.", metavar="SECONDS")] = None
    own_load: Annotated[
        str | None, Flag("What a controller adds to reports of its own requests.", choices=OWN_LOADS)
    ] = None


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(
    ControlSettings, SimulatedReplanSettings, OutputSettings, ObjectiveSettings, ClusterSettings, WorkloadSettings
):
    """All flags of `twofold simulate`."""

    @property
    def written_files(self) -> dict[str, Path]:
        """The files to write, by the names of their fields."""
        names = ("html", "requests_table", "chrome_trace", "event_log")
        return {name: path for name in names if (path := getattr(self, name)) is not None}

    @property
    def read_files(self) -> list[Path | str]:
        """Files that the command reads, and so must not write."""
        named = [self.workload, self.profile, *self.catalog, self.cluster]
        return [path for path in named if path is not None]
