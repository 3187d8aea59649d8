"""Flags of `twofold serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

from twofold.cli import options
from twofold.cli.settings import Settings, flag, flag_name
from twofold.engine.registry import ENGINES
from twofold.instance import Role
from twofold.scheduling.routers import LIVE_ROUTERS, ROUTERS
from twofold.transport.registry import TRANSPORTS

LINK_LABEL: Final = "ray.io/gpu-domain"
LAUNCHERS: Final = {"local": "Processes of this host.", "ray": "Actors on the nodes of a Ray cluster."}


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(Settings):
    """The workers of the service and their scheduling policies."""

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

    model: str | None = flag(
        "Model directory or hub id; not needed with --engine emulated.", positional=True, metavar="MODEL"
    )
    prefill: int | None = flag("Number of prefill workers.", ge=0)
    decode: int | None = flag("Number of decode workers.", ge=0)
    colocated: int | None = flag("Number of workers that run both phases.", ge=0)
    cluster: Path | None = flag(
        "Cluster file with pools and policies, as written by `twofold plan --output`.", metavar="FILE"
    )
    catalog: tuple[Path, ...] = options.CATALOG.field(())
    router: str | None = flag(
        "Router: places requests on workers.", choices={name: ROUTERS[name] for name in LIVE_ROUTERS}
    )
    batcher: dict[Role, str] | None = options.BATCHER.field()
    handoff: str | None = options.HANDOFF.field()
    transport: str | None = flag("How KV blocks are moved between workers.", choices=TRANSPORTS)
    kv_checksums: bool = flag("Verify a checksum of each KV block that is transferred.", False)
    pin_cores: bool | None = options.PIN_CORES.field()
    journal: Path | None = flag("Directory for journals of scheduling decisions.", metavar="DIR")
    max_restart_delay: float = flag("Maximum delay before a failing worker is restarted, in seconds.", 30.0, ge=0.1)
    profile: Path | None = options.PROFILE.field()


@dataclass(frozen=True, kw_only=True)
class ReplanSettings(Settings):
    """Re-planning of the roles of workers."""

    PANEL: ClassVar = "Re-planning"
    DEFAULTS: ClassVar = {"attainment": "0.9", "min_between": "60"}

    replan: bool = flag("Change roles of workers when the traffic shifts; needs --slo.", False)
    attainment: float | None = flag("Share of requests that must meet the SLO.", gt=0, le=1)
    retire: bool = flag("Also stop workers that are not needed, and restart them.", False)
    min_between: float | None = flag("Minimum seconds between two decisions.", ge=1)


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

    tp: int | None = flag("Tensor-parallel size.", ge=1)
    pp: int | None = flag("Pipeline-parallel size.", ge=1)
    prefill_tp: int | None = flag("Tensor-parallel size of prefill workers.", ge=1)
    prefill_pp: int | None = flag("Pipeline-parallel size of prefill workers.", ge=1)
    decode_tp: int | None = flag("Tensor-parallel size of decode workers.", ge=1)
    decode_pp: int | None = flag("Pipeline-parallel size of decode workers.", ge=1)
    pipeline_chunk: int | None = options.PIPELINE_CHUNK.field()

    @property
    def degrees(self) -> list[tuple[str, int | None]]:
        """The flags of parallel sizes: of all workers, then of each phase."""
        names = ("tp", "pp", "prefill_tp", "prefill_pp", "decode_tp", "decode_pp")
        return [(flag_name(name), getattr(self, name)) for name in names]


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(Settings):
    """Workers of other hosts."""

    PANEL: ClassVar = "Other hosts"

    listen_workers: str | None = flag(
        "Address at which workers of other hosts join, as in tcp://10.0.0.1:7600.", metavar="ADDRESS"
    )
    cluster_key: Path | None = flag("Cluster key file, as written by `twofold keygen`.", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class RaySettings(Settings):
    """Workers on a Ray cluster."""

    PANEL: ClassVar = "Ray"
    DEFAULTS: ClassVar = {
        "ray_address": "auto",
        "ray_resources": "CPU=1, and GPU=1 with --device cuda",
        "ray_link_label": LINK_LABEL,
    }

    launcher: str = flag("How workers are started.", "local", choices=LAUNCHERS)
    ray_address: str | None = flag("Ray cluster: HOST:PORT of its head, or auto for the cluster of this host.")
    ray_resources: str | None = flag("Resources of each worker, as in CPU=4,GPU=1.")
    ray_link_label: str | None = flag("Label of nodes that share a fast link.")


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

    engine: str = flag("Engine that runs the model.", "torch", choices=ENGINES)
    dtype: str | None = options.DTYPE.field()
    device: str | None = options.DEVICE.field()
    block_size: int | None = options.BLOCK_SIZE.field()
    kv_cache_memory_bytes: int | None = options.KV_CACHE_MEMORY.field()
    swap_space: int | None = options.SWAP_SPACE.field()
    enable_prefix_caching: bool | None = flag("Keep the KV of prompts for requests with the same prefix.")
    cache_retention_share: float | None = flag("Share of the KV cache that requests may retain.", ge=0, le=1)
    max_model_len: int | None = flag("Maximum length of a sequence in tokens.", ge=2)
    max_num_seqs: int | None = options.MAX_NUM_SEQS.field()
    max_num_batched_tokens: int | Literal["auto"] | None = options.MAX_NUM_BATCHED_TOKENS.field()
    enable_chunked_prefill: bool | None = flag(
        "Split prompts into chunks that run beside decodes; for colocated workers."
    )
    inline_tbt: float | None = flag(
        "Run whole prompts beside decodes if the iteration is predicted to take at most this time; for colocated "
        "workers.",
        ge=0,
        metavar="SECONDS",
    )
    tokenizer: Path | None = flag("Tokenizer directory.", metavar="DIR")
    vocab_size: int | None = flag("Vocabulary size of an emulated model.", ge=2)

    @property
    def emulated(self) -> bool:
        return self.engine == "emulated"


@dataclass(frozen=True, kw_only=True)
class ServeLimitSettings(options.LimitSettings):
    """Limits of the gateway and of the workers behind it."""

    PANEL: ClassVar = options.LimitSettings.PANEL

    overload: str | None = options.OVERLOAD.field()
    cache_retention: float = flag("Maximum time that a request may retain its prompt's KV, in seconds.", 3600.0, ge=0)


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
    """All flags of `twofold serve`; a flag that is not given and has no fixed default is None."""

    PANEL: ClassVar = "Service"

    @property
    def pinned(self) -> bool:
        """Whether workers are pinned to cores; by default only workers that compute on this host are."""
        if self.launcher == "ray":
            return False
        return not self.emulated if self.pin_cores is None else self.pin_cores

    @property
    def over_hosts(self) -> bool:
        """Whether workers may run on other hosts."""
        return self.listen_workers is not None or self.launcher == "ray"
