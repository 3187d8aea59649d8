"""Flags of `twofold serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final

from twofold.cli import options
from twofold.cli.settings import Flag, Settings, flag_name
from twofold.engine.registry import ENGINES
from twofold.scheduling.routers import LIVE_ROUTERS, ROUTERS
from twofold.transport.registry import TRANSPORTS

LINK_LABEL: Final = "ray.io/gpu-domain"
LAUNCHERS: Final = {"local": "Processes of this host.", "ray": "Actors on the nodes of a Ray cluster."}


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(Settings):
    """What is served: workers, and the policies that schedule them."""

    PANEL: ClassVar = "Service"
    DEFAULTS: ClassVar = {
        "prefill": "1",
        "decode": "1",
        "router": "jsq; jsq-planned with --replan",
        "batcher": "that of the role",
        "handoff": "layer-wise",
        "transport": "shared_memory; curve with --listen-workers or --launcher ray",
        "pin_cores": "yes, unless the engine is emulated",
    }

    model: Annotated[
        str | None,
        Flag("Model directory or hub id; not needed with --engine emulated.", positional=True, metavar="MODEL"),
    ] = None
    prefill: Annotated[int | None, Flag("Number of prefill workers.", ge=0)] = None
    decode: Annotated[int | None, Flag("Number of decode workers.", ge=0)] = None
    colocated: Annotated[int | None, Flag("Number of workers that run both phases.", ge=0)] = None
    cluster: Annotated[
        Path | None,
        Flag("Cluster file with pools and policies, as written by `twofold plan --output`.", metavar="FILE"),
    ] = None
    catalog: options.Catalog = ()
    router: Annotated[
        str | None, Flag("Router: places requests on workers.", choices={name: ROUTERS[name] for name in LIVE_ROUTERS})
    ] = None
    batcher: options.Batcher = None
    handoff: options.Handoff = None
    transport: Annotated[str | None, Flag("How KV blocks are moved between workers.", choices=TRANSPORTS)] = None
    kv_checksums: Annotated[bool, Flag("Verify a checksum of each KV block that is transferred.")] = False
    pin_cores: options.PinCores = None
    journal: Annotated[Path | None, Flag("Directory for journals of scheduling decisions.", metavar="DIR")] = None
    max_restart_delay: Annotated[
        float, Flag("Maximum delay before a failing worker is restarted, in seconds.", ge=0.1)
    ] = 30.0
    profile: options.Profile = None


@dataclass(frozen=True, kw_only=True)
class ReplanSettings(Settings):
    """Re-planning of the roles of workers."""

    PANEL: ClassVar = "Re-planning"
    DEFAULTS: ClassVar = {"attainment": "0.9", "min_between": "60"}

    replan: Annotated[bool, Flag("Change roles of workers when the traffic shifts; needs --slo.")] = False
    attainment: Annotated[float | None, Flag("Share of requests that must meet the SLO.", gt=0, le=1)] = None
    retire: Annotated[bool, Flag("Also stop workers that are not needed, and restart them.")] = False
    min_between: Annotated[float | None, Flag("Minimum seconds between two decisions.", ge=1)] = None


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Settings):
    """Tensor and pipeline parallelism within a worker."""

    PANEL: ClassVar = "Parallelism"
    DEFAULTS: ClassVar = {
        "tp": "1",
        "pp": "1",
        "prefill_tp": "--tp",
        "prefill_pp": "--pp",
        "decode_tp": "--tp",
        "decode_pp": "--pp",
    }

    tp: Annotated[int | None, Flag("Tensor-parallel size.", ge=1)] = None
    pp: Annotated[int | None, Flag("Pipeline-parallel size.", ge=1)] = None
    prefill_tp: Annotated[int | None, Flag("Tensor-parallel size of prefill workers.", ge=1)] = None
    prefill_pp: Annotated[int | None, Flag("Pipeline-parallel size of prefill workers.", ge=1)] = None
    decode_tp: Annotated[int | None, Flag("Tensor-parallel size of decode workers.", ge=1)] = None
    decode_pp: Annotated[int | None, Flag("Pipeline-parallel size of decode workers.", ge=1)] = None
    pipeline_chunk: options.PipelineChunk = None

    @property
    def degrees(self) -> list[tuple[str, int | None]]:
        """The flags of parallel sizes: of all workers, then of each phase."""
        names = ("tp", "pp", "prefill_tp", "prefill_pp", "decode_tp", "decode_pp")
        return [(flag_name(name), getattr(self, name)) for name in names]


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(Settings):
    """Workers of other hosts."""

    PANEL: ClassVar = "Other hosts"

    listen_workers: Annotated[
        str | None, Flag("Address at which workers of other hosts join, as in tcp://10.0.0.1:7600.", metavar="ADDRESS")
    ] = None
    cluster_key: Annotated[Path | None, Flag("Cluster key file, as written by `twofold keygen`.", metavar="FILE")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class RaySettings(Settings):
    """Workers on a Ray cluster."""

    PANEL: ClassVar = "Ray"
    DEFAULTS: ClassVar = {
        "ray_address": "auto",
        "ray_resources": "CPU=1, and GPU=1 with --device cuda",
        "ray_link_label": LINK_LABEL,
    }

    launcher: Annotated[str, Flag("How workers are started.", choices=LAUNCHERS)] = "local"
    ray_address: Annotated[
        str | None, Flag("Ray cluster: HOST:PORT of its head, or auto for the cluster of this host.")
    ] = None
    ray_resources: Annotated[str | None, Flag("Resources of each worker, as in CPU=4,GPU=1.")] = None
    ray_link_label: Annotated[str | None, Flag("Label of nodes that share a fast link.")] = None


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    """The engine of each worker."""

    PANEL: ClassVar = "Engine"
    DEFAULTS: ClassVar = {
        "dtype": "auto",
        "device": "cpu",
        "block_size": "16; 32 with vLLM on a CPU",
        "kv_cache_memory_bytes": "1GiB",
        "enable_prefix_caching": "yes, unless the engine is emulated",
        "cache_retention_share": "0.25",
        "max_model_len": "the context of the model",
        "max_num_seqs": "64",
        "max_num_batched_tokens": "2048; 512 with chunked prefill",
        "enable_chunked_prefill": "yes",
        "tokenizer": "that of the model",
    }

    engine: Annotated[str, Flag("Engine that runs the model.", choices=ENGINES)] = "torch"
    dtype: options.Dtype = None
    device: options.Device = None
    block_size: options.BlockSize = None
    kv_cache_memory_bytes: options.KvCacheMemory = None
    swap_space: options.SwapSpace = None
    enable_prefix_caching: Annotated[bool | None, Flag("Keep the KV of prompts for requests with the same prefix.")] = (
        None
    )
    cache_retention_share: Annotated[
        float | None, Flag("Share of the KV cache that requests may retain.", ge=0, le=1)
    ] = None
    max_model_len: Annotated[int | None, Flag("Maximum length of a sequence in tokens.", ge=2)] = None
    max_num_seqs: options.MaxNumSeqs = None
    max_num_batched_tokens: options.MaxNumBatchedTokens = None
    enable_chunked_prefill: Annotated[
        bool | None, Flag("Split prompts into chunks that run beside decodes; for colocated workers.")
    ] = None
    inline_tbt: Annotated[
        float | None,
        Flag(
            "Run whole prompts beside decodes if the iteration is predicted to take at most this time; for colocated "
            "workers.",
            ge=0,
            metavar="SECONDS",
        ),
    ] = None
    tokenizer: Annotated[Path | None, Flag("Tokenizer directory.", metavar="DIR")] = None
    vocab_size: Annotated[int | None, Flag("Vocabulary size of an emulated model.", ge=2)] = None

    @property
    def emulated(self) -> bool:
        return self.engine == "emulated"


@dataclass(frozen=True, kw_only=True)
class ServeLimitSettings(options.LimitSettings):
    """Limits of the gateway and of the workers behind it."""

    PANEL: ClassVar = options.LimitSettings.PANEL

    overload: options.Overload = None
    cache_retention: Annotated[
        float, Flag("Maximum time that a request may retain its prompt's KV, in seconds.", ge=0)
    ] = 3600.0


@dataclass(frozen=True, kw_only=True)
class ServeSettings(
    options.TelemetrySettings,
    ServeLimitSettings,
    options.HttpSettings,
    options.StoreSettings,
    EngineSettings,
    RaySettings,
    NetworkSettings,
    ParallelSettings,
    ReplanSettings,
    ServiceSettings,
):
    """All flags of `twofold serve`; None where one is not given and has no fixed default."""

    PANEL: ClassVar = "Service"

    @property
    def pinned(self) -> bool:
        """Whether workers are pinned to cores: by default those that compute on this host."""
        if self.launcher == "ray":
            return False
        return not self.emulated if self.pin_cores is None else self.pin_cores

    @property
    def over_hosts(self) -> bool:
        """Whether workers may run on other hosts."""
        return self.listen_workers is not None or self.launcher == "ray"
