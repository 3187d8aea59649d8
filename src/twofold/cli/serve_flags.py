"""What the flags of `twofold serve` amount to: a service, taken from the flags or from a cluster file."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from twofold.cli.serve_forecast import forecast_config
from twofold.cli.serve_inline import inline_config
from twofold.cli.serve_overload import OverloadFlags, overload_config
from twofold.cli.serve_ray import RayFlags, check_ray, ray_network
from twofold.cli.serve_replan import DEFAULT_ROUTER, ReplanFlags, replan_config
from twofold.cli.store_flags import check_eviction
from twofold.curve.key import read_key
from twofold.curve.network import HOME, Endpoint, Network, own_host
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.kvcache.split import UNSPLIT, Split
from twofold.scheduling.batchers import NEVER_REUSING
from twofold.scheduling.breaker import LONGEST_S
from twofold.scheduling.handoffs import HANDOFF_POLICIES
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, FORECASTING_ROUTERS, LIVE_ROUTERS
from twofold.serving.cluster_plan import plan_cluster
from twofold.serving.config import EngineConfig, ServiceConfig, StoreConfig, TokenBudget, WorkerConfig
from twofold.serving.gateway.tokenizer import load_tokenizer
from twofold.serving.model_source import find_model
from twofold.serving.plan import join_terms, plan_workers
from twofold.serving.splits import check_splits, with_chunks, with_splits
from twofold.serving.worker.engines import ENGINES, check_vllm
from twofold.simulation.cluster_file import load_cluster
from twofold.simulation.spec import ClusterSpec
from twofold.transport.registry import DEFAULT_TRANSPORT, check_transport

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of `twofold serve` that say what to serve; None where one is not given."""

    model: str | None = None
    prefill: int | None = None
    decode: int | None = None
    colocated: int | None = None
    cluster: Path | None = None
    catalog: tuple[Path, ...] = ()
    router: str | None = None
    tp: int | None = None
    pp: int | None = None
    prefill_tp: int | None = None
    prefill_pp: int | None = None
    decode_tp: int | None = None
    decode_pp: int | None = None
    pipeline_chunk: int | None = None
    handoff: str | None = None
    transport: str | None = None
    kv_checksums: bool = False
    pin_cores: bool | None = None
    listen_workers: str | None = None
    cluster_key: Path | None = None
    journal: Path | None = None
    max_restart_delay: float = LONGEST_S
    engine: str = "torch"
    dtype: str | None = None
    device: str | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    swap_space: int | None = None
    store: StoreConfig | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    prefix_caching: bool | None = None
    cache_retention_share: float | None = None
    kv_eviction: str | None = None
    max_num_batched_tokens: TokenBudget | None = None
    enable_chunked_prefill: bool | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    log_format: str = "text"
    profile: Path | None = None
    replan: ReplanFlags | None = None
    ray: RayFlags | None = None
    overload: OverloadFlags | None = None
    inline_tbt: float | None = None

    @property
    def emulated(self) -> bool:
        return self.engine == "emulated"

    @property
    def pinned(self) -> bool:
        """Workers that compute here get cores of their own unless it is said otherwise; others sleep on any."""
        if self.ray is not None:
            return False
        return not self.emulated if self.pin_cores is None else self.pin_cores

    @property
    def over_hosts(self) -> bool:
        """Whether workers may be on other hosts."""
        return self.listen_workers is not None or self.ray is not None


def service_of(flags: Flags) -> ServiceConfig:
    """The service that the flags ask for, without a place for its sockets; raises ConfigurationError."""
    _check_choice("--engine", flags.engine, tuple(ENGINES))
    _refuse_idle_flags(flags)
    config = _from_flags(flags) if flags.cluster is None else _from_cluster(flags, flags.cluster)
    check_splits(config)
    _check_reuse(flags, config)
    config = _with_eviction(flags, config)
    _check_store(flags, config)
    _check_inline(flags, config)
    config = msgspec.structs.replace(config, store=flags.store)
    config = msgspec.structs.replace(config, inline=inline_config(config, flags.inline_tbt, flags.profile))
    config = msgspec.structs.replace(config, forecast=forecast_config(config, flags.profile))
    if flags.replan is not None:
        config = msgspec.structs.replace(
            config, replan=replan_config(config, flags.replan, others_join=flags.listen_workers is not None)
        )
    if flags.overload is not None:
        config = msgspec.structs.replace(config, overload=overload_config(config, flags.overload))
    return config


def _check_store(flags: Flags, config: ServiceConfig) -> None:
    if flags.store is None:
        return
    if any(worker.split != UNSPLIT for worker in config.workers):
        raise ConfigurationError("--kv-store-dram is for workers of one process: leave out --tp and --pp")
    if not config.engine.prefix_caching:
        raise ConfigurationError(
            "--kv-store-dram keeps what --prefix-caching finds: leave out --no-prefix-caching"
        )
    for flag, value in (("--swap-space", config.engine.swap_bytes), ("--journal", config.journal_dir)):
        _refuse(flag, value, "excludes --kv-store-dram")


def _check_inline(flags: Flags, config: ServiceConfig) -> None:
    if flags.inline_tbt is None:
        return
    if not flags.colocated:
        raise ConfigurationError("--inline-tbt is for workers that do both phases: give --colocated N")
    if any(worker.split != UNSPLIT for worker in config.workers):
        raise ConfigurationError("--inline-tbt knows workers of one process: leave out --tp and --pp")
    for flag, value in (
        ("--swap-space", flags.swap_space),
        ("--journal", flags.journal),
        ("--enable-chunked-prefill", flags.enable_chunked_prefill or None),
        ("--replan", flags.replan),
    ):
        _refuse(flag, value, "excludes --inline-tbt")


def _check_reuse(flags: Flags, config: ServiceConfig) -> None:
    batchers = {worker.batcher for worker in config.workers}
    if flags.prefix_caching and batchers and batchers <= NEVER_REUSING:
        raise ConfigurationError(
            f"--prefix-caching is not for the batcher {min(batchers)}, which takes prompts as long as they are"
        )


def _with_eviction(flags: Flags, config: ServiceConfig) -> ServiceConfig:
    """What is kept of prompts, and what goes first; raises ConfigurationError where nothing is."""
    for flag, value in (
        ("--kv-eviction", flags.kv_eviction),
        ("--cache-retention-share", flags.cache_retention_share),
    ):
        if not config.engine.prefix_caching:
            _refuse(flag, value, "is for what --prefix-caching keeps, and that is switched off")
    check_eviction(flags.kv_eviction)
    engine = msgspec.structs.replace(
        config.engine,
        eviction=flags.kv_eviction or config.engine.eviction,
        retained_share=config.engine.retained_share
        if flags.cache_retention_share is None
        else flags.cache_retention_share,
    )
    return msgspec.structs.replace(config, engine=engine)


def public_name(flags: Flags, config: ServiceConfig) -> str:
    """The name of the model in the API: of its directory, or its id."""
    source = Path(config.engine.model)
    return source.name if flags.model is None or Path(flags.model).is_dir() else flags.model


def _from_flags(flags: Flags) -> ServiceConfig:
    router = flags.router or ("jsq" if flags.replan is None else DEFAULT_ROUTER)
    handoff = flags.handoff or "layer-wise"
    _check_choice("--router", router, LIVE_ROUTERS)
    _check_choice("--handoff", handoff, tuple(HANDOFF_POLICIES))
    if router not in FIXED_ROLE_ROUTERS:
        why = f"is for workers that keep their roles: it excludes --router {router}"
        _refuse("--swap-space", flags.swap_space, why)
    network, colocated = _network(flags), flags.colocated or 0
    others_join = network is not None
    if network is None and flags.ray is not None:
        network = ray_network(flags.ray)
    unsplit = colocated > 0 or (flags.colocated == 0 and others_join)  # all workers may be those that join
    default = 0 if unsplit else 1
    kinds = {
        "chunked_prefill": flags.enable_chunked_prefill is not False,
        "inlines": flags.inline_tbt is not None,
        "roles_move": router not in FIXED_ROLE_ROUTERS,
    }
    workers = plan_workers(
        prefill=default if flags.prefill is None else flags.prefill,
        decode=default if flags.decode is None else flags.decode,
        colocated=colocated,
        token_budget=flags.max_num_batched_tokens,
        pin_cores=flags.pinned,
        others_join=others_join,
        **kinds,
    )
    terms = join_terms(colocated=unsplit, token_budget=flags.max_num_batched_tokens, **kinds)
    return ServiceConfig(
        engine=_model_engine(
            flags, flags.block_size or _block_size(flags), flags.max_num_seqs or 64, flags.swap_space
        ),
        workers=with_chunks(with_splits(workers, _splits(flags)), flags.pipeline_chunk),
        run_dir="",
        router=router,
        handoff=handoff,
        transport=_transport(flags),
        kv_checksums=flags.kv_checksums,
        journal_dir=_journal(flags.journal),
        max_restart_delay_s=flags.max_restart_delay,
        log_format=flags.log_format,
        network=network,
        terms=None if network is None else terms,
    )


def _splits(flags: Flags) -> dict[Role, Split]:
    """How the workers of each role are divided; raises ConfigurationError for flags that are about none."""
    for flag, value in _degrees(flags)[2:]:
        if flags.colocated:
            _refuse(flag, value, "is for a service in two phases: with --colocated write --tp and --pp")
    tensor, pipeline = flags.tp or 1, flags.pp or 1
    return {
        Role.PREFILL: Split(flags.prefill_tp or tensor, flags.prefill_pp or pipeline),
        Role.DECODE: Split(flags.decode_tp or tensor, flags.decode_pp or pipeline),
        Role.MIXED: Split(tensor, pipeline),
    }


def _degrees(flags: Flags) -> list[tuple[str, int | None]]:
    """What was said of tensor and pipeline ranks: of all workers, and then of those of a phase."""
    return [
        ("--tp", flags.tp),
        ("--pp", flags.pp),
        ("--prefill-tp", flags.prefill_tp),
        ("--prefill-pp", flags.prefill_pp),
        ("--decode-tp", flags.decode_tp),
        ("--decode-pp", flags.decode_pp),
    ]


def _network(flags: Flags) -> Network | None:
    """Where workers of other hosts join, if they may; raises ConfigurationError."""
    if flags.listen_workers is None or flags.cluster_key is None:
        _refuse("--cluster-key", flags.cluster_key, "is for --listen-workers: give that too")
        why = "lets other hosts in: say who may with --cluster-key FILE (twofold keygen makes one)"
        _refuse("--listen-workers", flags.listen_workers, why)
        return None
    given = Endpoint.parse(flags.listen_workers, "--listen-workers")
    endpoint = Endpoint(own_host(given.host, "--listen-workers"), given.port)
    read_key(flags.cluster_key)
    key_file = str(flags.cluster_key.absolute())
    return Network(host=HOME, address=endpoint.host, key_file=key_file, controller=str(endpoint))


def _from_cluster(flags: Flags, file: Path) -> ServiceConfig:
    _refuse("--listen-workers", flags.listen_workers, "is not for --cluster, whose file names all workers")
    _refuse("--cluster-key", flags.cluster_key, "is for --listen-workers")
    catalog = load_catalog(flags.catalog)
    spec = load_cluster(file, catalog=catalog)
    try:
        workers = plan_cluster(spec, catalog, pin_cores=flags.pinned)
    except ConfigurationError as error:
        raise ConfigurationError(f"cluster {file}: {error}") from error
    _refuse_contradictions(flags, file, spec, workers)
    return ServiceConfig(
        engine=_emulated_engine(flags, spec)
        if flags.emulated
        else _model_engine(flags, spec.block_size, spec.max_seqs, spec.swap_space_bytes),
        workers=with_chunks(with_splits(workers, _splits(flags)), flags.pipeline_chunk),
        run_dir="",
        router=spec.router,
        handoff=spec.handoff,
        transport=_transport(flags),
        kv_checksums=flags.kv_checksums,
        journal_dir=_journal(flags.journal),
        max_restart_delay_s=flags.max_restart_delay,
        log_format=flags.log_format,
        cluster=spec,
        catalog=tuple(str(path.absolute()) for path in flags.catalog),
    )


def _block_size(flags: Flags) -> int:
    """vLLM's blocks on a CPU are multiples of 32."""
    return 32 if flags.engine == "vllm" and (flags.device or "cpu") == "cpu" else 16


def _model_engine(flags: Flags, block_size: int, max_num_seqs: int, swap_bytes: int | None) -> EngineConfig:
    dtype = flags.dtype or "auto"
    _check_choice("--dtype", dtype, DTYPES)
    if flags.model is None:
        raise ConfigurationError("give MODEL: a model directory or a hub id, or use --engine emulated")
    return EngineConfig(
        engine=flags.engine,
        model=str(find_model(flags.model)),
        tokenizer=_tokenizer(flags.tokenizer)[0],
        dtype=dtype,
        device=flags.device or "cpu",
        block_size=block_size,
        kv_cache_bytes=flags.kv_cache_memory_bytes,
        swap_bytes=swap_bytes,
        max_model_len=flags.max_model_len,
        max_num_seqs=max_num_seqs,
        prefix_caching=flags.prefix_caching is not False,
    )


def _emulated_engine(flags: Flags, spec: ClusterSpec) -> EngineConfig:
    tokenizer, known_tokens = _tokenizer(flags.tokenizer)
    return EngineConfig(
        engine="emulated",
        model=spec.model,
        tokenizer=tokenizer,
        vocab_size=flags.vocab_size or known_tokens,  # its tokens should mean something to its tokenizer
        block_size=spec.block_size,
        max_model_len=flags.max_model_len,
        max_num_seqs=spec.max_seqs,
        prefix_caching=flags.prefix_caching is True,  # the simulation of its machines has none
    )


def _transport(flags: Flags) -> str:
    transport = flags.transport or ("curve" if flags.over_hosts else DEFAULT_TRANSPORT)
    check_transport(transport)
    return transport


def _tokenizer(directory: Path | None) -> tuple[str | None, int | None]:
    """The directory, if there is a tokenizer in it, and how many tokens that knows."""
    if directory is None:
        return None, None
    loaded = load_tokenizer(directory)
    if loaded is None:
        raise ConfigurationError(f"--tokenizer {directory} is not a directory with a tokenizer")
    return str(directory.absolute()), loaded.backend.get_vocab_size()


def _refuse_idle_flags(flags: Flags) -> None:
    """Flags that would change nothing are mistakes."""
    check_ray(flags)
    others = (flags.replan, flags.overload, flags.inline_tbt)
    if all(each is None for each in others) and flags.router not in FORECASTING_ROUTERS:
        why = "is for --replan, --overload, --inline-tbt and the routers " + ", ".join(FORECASTING_ROUTERS)
        _refuse("--profile", flags.profile, f"{why}: give one of them too")
    if flags.pipeline_chunk is not None:
        why = "is for iterations of whole prompts: with --pipeline-chunk those have as many tokens as a chunk"
        _refuse("--max-num-batched-tokens", flags.max_num_batched_tokens, why)
    if not flags.emulated:
        _refuse("--vocab-size", flags.vocab_size, "is for --engine emulated: this one has a model that knows")
        if flags.cluster is None:
            _refuse("--catalog", flags.catalog or None, "describes the machines of --cluster: give that too")
        if flags.engine == "vllm":
            _refuse_for_vllm(flags)
        return
    if flags.cluster is None:
        raise ConfigurationError(
            "--engine emulated needs --cluster FILE: the machines whose time it is to take"
        )
    _refuse("MODEL", flags.model, "is not needed: the file of --cluster names the model to emulate")
    for name, value in (
        ("--dtype", flags.dtype),
        ("--device", flags.device),
        ("--transport", flags.transport),
        ("--kv-checksums", flags.kv_checksums or None),
        ("--kv-store-dram", flags.store),
        *_degrees(flags),
        ("--pipeline-chunk", flags.pipeline_chunk),
    ):
        _refuse(name, value, "means nothing to --engine emulated, which computes nothing")
    size = flags.kv_cache_memory_bytes
    _refuse("--kv-cache-memory-bytes", size, "is for --engine torch: an emulated machine has its own memory")


def _refuse_for_vllm(flags: Flags) -> None:
    """What vLLM does in its own way, or not at all."""
    for name, value in (
        ("--swap-space", flags.swap_space),
        ("--kv-store-dram", flags.store),
        ("--kv-eviction", flags.kv_eviction),
        ("--cache-retention-share", flags.cache_retention_share),
        ("--journal", flags.journal),
        ("--pipeline-chunk", flags.pipeline_chunk),
        ("--inline-tbt", flags.inline_tbt),
        *_degrees(flags),
    ):
        _refuse(name, value, "is for --engine torch: vLLM has a scheduler and a block pool of its own")
    check_vllm()


def _refuse(flag: str, value: object, why: str) -> None:
    if value is not None:
        raise ConfigurationError(f"{flag} {why}")


def _refuse_contradictions(
    flags: Flags, file: Path, spec: ClusterSpec, workers: tuple[WorkerConfig, ...]
) -> None:
    """A flag may repeat what the file says, and not deny it."""
    roles = [worker.role for worker in workers]
    chunked = any(worker.batcher == "chunked-prefill" for worker in workers)
    for flag, given, said in (
        ("--prefill", flags.prefill, roles.count(Role.PREFILL)),
        ("--decode", flags.decode, roles.count(Role.DECODE)),
        ("--colocated", flags.colocated, roles.count(Role.MIXED)),
        ("--router", flags.router, spec.router),
        ("--handoff", flags.handoff, spec.handoff),
        ("--block-size", flags.block_size, spec.block_size),
        ("--max-num-seqs", flags.max_num_seqs, spec.max_seqs),
        ("--max-num-batched-tokens", flags.max_num_batched_tokens, spec.token_budget),
        ("--swap-space", flags.swap_space, spec.swap_space_bytes),
    ):
        if given is not None and given != said:
            raise ConfigurationError(
                f"{flag} {given} contradicts --cluster {file}, which says {said}: change one of them"
            )
    if flags.enable_chunked_prefill not in {None, chunked}:
        raise ConfigurationError(
            f"--enable-chunked-prefill contradicts --cluster {file}, whose pools name their batchers: leave it out"
        )


def _journal(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--journal {path} is not a directory to write to: {error.strerror}"
        ) from error
    return str(path)


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{flag} {value!r} is unknown: choose one of {', '.join(choices)}")
