"""Flags of `twofold serve`."""

from pathlib import Path
from typing import Final, Literal

from twofold.cli import options
from twofold.cli.settings import MAPPING, Settings, flag
from twofold.engine.registry import ENGINES
from twofold.instance import Role
from twofold.scheduling.routers import LIVE_ROUTERS, ROUTERS
from twofold.transport.registry import TRANSPORTS

LINK_LABEL: Final = "ray.io/gpu-domain"
LAUNCHERS: Final = {"local": "Processes of this host.", "ray": "Actors on the nodes of a Ray cluster."}


class ServiceSettings(Settings, panel="Service"):
    """Flags for the workers of the service and their scheduling policies."""

    model: str | None = flag(
        "Model directory or hub id; not needed with --engine emulated.", positional=True, metavar="MODEL"
    )
    prefill: int | None = flag("Number of prefill workers.", ge=0, unset="1")
    decode: int | None = flag("Number of decode workers.", ge=0, unset="1")
    colocated: int | None = flag("Number of workers that run both phases.", ge=0)
    cluster: Path | None = flag(
        "Cluster file with pools and policies, as written by `twofold plan --output`.", metavar="FILE"
    )
    catalog: tuple[Path, ...] = options.CATALOG.field(())
    router: str | None = flag(
        "Router: places requests on workers.",
        choices={name: ROUTERS[name] for name in LIVE_ROUTERS},
        unset="jsq; jsq-planned with --replan",
    )
    batcher: dict[Role, str] | None = options.BATCHER.field(unset="that of the role")
    handoff: str | None = options.HANDOFF.field(unset="layer-wise")
    transport: str | None = flag(
        "How KV blocks are moved between workers.",
        choices=TRANSPORTS,
        unset="shared_memory; curve with --listen-workers or --launcher ray",
    )
    kv_checksums: bool = flag("Verify a checksum of each KV block that is transferred.", False)
    pin_cores: bool | None = options.PIN_CORES.field(unset="yes, unless the engine is emulated")
    journal: Path | None = flag("Directory for journals of scheduling decisions.", metavar="DIR")
    max_restart_delay: float = flag("Maximum delay before a failing worker is restarted, in seconds.", 30.0, ge=0.1)
    profile: Path | None = options.PROFILE.field()


class ReplanSettings(Settings, panel="Re-planning"):
    """Flags for re-planning the roles of workers."""

    replan: bool = flag("Change roles of workers when the traffic shifts; needs --slo.", False)
    attainment: float | None = options.ATTAINMENT.field(unset="0.9")
    retire: bool = flag("Also stop workers that are not needed, and restart them.", False)
    min_between: float | None = flag("Minimum seconds between two decisions.", ge=1, unset="60")


class ParallelSettings(Settings, panel="Parallelism"):
    """Flags for tensor and pipeline parallelism within a worker."""

    tp: int | None = flag("Tensor-parallel size.", ge=1, unset="1")
    pp: int | None = flag("Pipeline-parallel size.", ge=1, unset="1")
    prefill_tp: int | None = flag("Tensor-parallel size of prefill workers.", ge=1, unset="--tp")
    prefill_pp: int | None = flag("Pipeline-parallel size of prefill workers.", ge=1, unset="--pp")
    decode_tp: int | None = flag("Tensor-parallel size of decode workers.", ge=1, unset="--tp")
    decode_pp: int | None = flag("Pipeline-parallel size of decode workers.", ge=1, unset="--pp")
    pipeline_chunk: int | None = options.PIPELINE_CHUNK.field()


class NetworkSettings(Settings, panel="Other hosts"):
    """Flags that let workers on other hosts join the service."""

    listen_workers: str | None = flag(
        "Address at which workers of other hosts join, as in tcp://10.0.0.1:7600.", metavar="ADDRESS"
    )
    cluster_key: Path | None = flag("Cluster key file, as written by `twofold keygen`.", metavar="FILE")


class RaySettings(Settings, panel="Ray"):
    """Flags for running workers on a Ray cluster."""

    launcher: str = flag("How workers are started.", "local", choices=LAUNCHERS)
    ray_address: str | None = flag(
        "Ray cluster: HOST:PORT of its head, or auto for the cluster of this host.", unset="auto"
    )
    ray_resources: str | None = flag(
        "Resources of each worker, as in CPU=4,GPU=1.", unset="CPU=1, and GPU=1 with --device cuda"
    )
    ray_link_label: str | None = flag("Label of nodes that share a fast link.", unset=LINK_LABEL)


class EngineSettings(Settings, panel="Engine"):
    """Flags for the engine of each worker."""

    engine: str = flag("Engine that runs the model.", "torch", choices=ENGINES)
    dtype: str | None = options.DTYPE.field(unset="auto")
    device: str | None = options.DEVICE.field(unset="auto: cuda if torch finds a GPU, else cpu")
    block_size: int | None = options.BLOCK_SIZE.field(unset="16; 32 with vLLM")
    kv_cache_memory_bytes: int | None = options.KV_CACHE_MEMORY.field(unset="1GiB; on GPUs, a share of the memory")
    gpu_memory_utilization: float | None = options.GPU_MEMORY.field(unset="0.9")
    swap_space: int | None = options.SWAP_SPACE.field()
    enable_prefix_caching: bool | None = flag(
        "Keep the KV of prompts for requests with the same prefix.", unset="yes, unless the engine is emulated"
    )
    cache_retention_share: float | None = flag(
        "Share of the KV cache that requests may retain.", ge=0, le=1, unset="0.25"
    )
    max_model_len: int | None = flag("Maximum length of a sequence in tokens.", ge=2, unset="the context of the model")
    max_num_seqs: int | None = options.MAX_NUM_SEQS.field(unset="64")
    max_num_batched_tokens: int | Literal["auto"] | None = options.MAX_NUM_BATCHED_TOKENS.field(
        unset="2048; 512 with chunked prefill"
    )
    enable_chunked_prefill: bool | None = flag(
        "Split prompts into chunks that run beside decodes; for colocated workers.", unset="yes"
    )
    inline_tbt: float | None = flag(
        "Run whole prompts beside decodes if the iteration is predicted to take at most this time; for colocated "
        "workers.",
        ge=0,
        metavar="SECONDS",
    )
    tokenizer: Path | None = flag("Tokenizer directory.", metavar="DIR", unset="that of the model")
    vocab_size: int | None = flag("Vocabulary size of an emulated model.", ge=2)
    engine_args: tuple[str, ...] = flag("Options of vLLM; repeatable; or its flags after --.", (), metavar=MAPPING)
    prefill_engine_args: tuple[str, ...] = flag("Options of vLLM in prefill workers.", (), metavar=MAPPING)
    decode_engine_args: tuple[str, ...] = flag("Options of vLLM in decode workers.", (), metavar=MAPPING)
    lora_modules: tuple[str, ...] = flag("LoRA adapter, with its name in the API; repeatable.", (), metavar="NAME=DIR")

    @property
    def emulated(self) -> bool:
        return self.engine == "emulated"


class ServeLimitSettings(options.LimitSettings):
    """Flags that set limits of the gateway and of the workers behind it."""

    overload: str | None = options.OVERLOAD.field()
    cache_retention: float = flag("Maximum time that a request may retain its prompt's KV, in seconds.", 3600.0, ge=0)


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
    """All flags of `twofold serve`."""

    @property
    def pinned(self) -> bool:
        """Whether workers are pinned to CPU cores."""
        if self.launcher == "ray":
            return False
        return not self.emulated if self.pin_cores is None else self.pin_cores
