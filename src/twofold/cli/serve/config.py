"""Conversion of the flags of `twofold serve` to the configuration of a service."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from twofold.cli.serve.checks import PHASE_SIZES, check_inline, check_repeats, check_reuse, check_store, check_use
from twofold.cli.serve.engine_args import engine_args, lora_adapters
from twofold.cli.serve.predictions import (
    DEFAULT_REPLAN_ROUTER,
    forecast_config,
    inline_config,
    overload_config,
    replan_config,
)
from twofold.cli.serve.ray import ray_network
from twofold.cli.serve.settings import ServeSettings
from twofold.cli.settings import refuse
from twofold.cluster.file import load_cluster
from twofold.cluster.spec import ClusterSpec
from twofold.engine.registry import ENGINES
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.kvcache.sharding import Sharding
from twofold.scheduling.routers import APPENDING_ROUTERS, FIXED_ROLE_ROUTERS
from twofold.security.key import read_key
from twofold.security.network import HOME, HostNetwork, TcpEndpoint, own_host
from twofold.serving.config import EngineConfig, ServiceConfig, WorkerConfig
from twofold.serving.gateway.tokenizer import load_tokenizer
from twofold.serving.launch.model_source import find_model
from twofold.serving.launch.worker_plan import (
    BatchPolicies,
    check_splits,
    plan_cluster,
    plan_workers,
    with_chunks,
    with_splits,
)
from twofold.transport.registry import DEFAULT_TRANSPORT, check_transport


def service_config(settings: ServeSettings) -> ServiceConfig:
    """Convert the flags to the configuration of a service. Raises ConfigurationError for invalid flags."""
    check_use(settings)
    config = _from_flags(settings) if settings.cluster is None else _from_cluster(settings, settings.cluster)
    check_splits(config)
    check_reuse(settings, config)
    config = _with_prefix_cache(settings, config)
    check_store(config)
    check_inline(settings, config)
    config = msgspec.structs.replace(config, inline=inline_config(config, settings))
    config = msgspec.structs.replace(config, forecast=forecast_config(config, settings.profile))
    replan, overload = replan_config(config, settings), overload_config(config, settings)
    return msgspec.structs.replace(config, replan=replan, overload=overload)


def public_name(settings: ServeSettings, config: ServiceConfig) -> str:
    """Return the model's name in the API: --served-model-name, else the name of its directory, else its hub id."""
    if settings.served_model_name is not None:
        return settings.served_model_name
    source = Path(config.engine.model)
    return source.name if settings.model is None or Path(settings.model).is_dir() else settings.model


def _from_flags(settings: ServeSettings) -> ServiceConfig:
    router = settings.router or (DEFAULT_REPLAN_ROUTER if settings.replan else "jsq")
    roles_move = router not in FIXED_ROLE_ROUTERS
    if roles_move:
        refuse(settings, "swap_space", f"needs workers with fixed roles: it excludes --router {router}")
    network, colocated = _network(settings), settings.colocated or 0
    others_join = network is not None
    if network is None and settings.launcher == "ray":
        network = ray_network(settings)
    unsplit = colocated > 0 or (settings.colocated == 0 and others_join)  # all workers may join from other hosts
    default = 0 if unsplit else 1
    policies = BatchPolicies(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        chunked_prefill=settings.enable_chunked_prefill is not False,
        inlines=settings.inline_tbt is not None,
        roles_move=roles_move,
        appends=router in APPENDING_ROUTERS,
        batchers=settings.batcher or {},
    )
    workers = plan_workers(
        policies,
        prefill=default if settings.prefill is None else settings.prefill,
        decode=default if settings.decode is None else settings.decode,
        colocated=colocated,
        pin_cores=settings.pinned,
        others_join=others_join,
    )
    terms = policies.terms(colocated=unsplit)
    block_size = settings.block_size or ENGINES[settings.engine].block_size
    return _config(
        settings,
        _model_engine(settings, block_size, settings.max_num_seqs or 64, settings.swap_space),
        workers,
        router=router,
        handoff=settings.handoff or "layer-wise",
        network=network,
        terms=None if network is None else terms,
    )


def _from_cluster(settings: ServeSettings, file: Path) -> ServiceConfig:
    refuse(settings, "listen_workers", "excludes --cluster, whose file names all workers")
    refuse(settings, "cluster_key", "needs --listen-workers")
    refuse(settings, "batcher", "excludes --cluster, whose pools name their batchers")
    catalog = load_catalog(settings.catalog)
    spec = load_cluster(file, catalog=catalog)
    try:
        workers = plan_cluster(spec, catalog, pin_cores=settings.pinned)
    except ConfigurationError as error:
        raise ConfigurationError(f"cluster {file}: {error}") from error
    check_repeats(settings, file, spec, workers)
    return _config(
        settings,
        _emulated_engine(settings, spec)
        if settings.emulated
        else _model_engine(settings, spec.block_size, spec.max_num_seqs, spec.swap_space_bytes),
        workers,
        router=spec.router,
        handoff=spec.handoff,
        cluster=spec,
        catalog=tuple(str(path.absolute()) for path in settings.catalog),
    )


def _config(
    settings: ServeSettings,
    engine: EngineConfig,
    workers: Sequence[WorkerConfig],
    **more: Any,  # noqa: ANN401  (fields of ServiceConfig)
) -> ServiceConfig:
    return ServiceConfig(
        engine=engine,
        workers=with_chunks(with_splits(workers, _shardings(settings)), settings.pipeline_chunk),
        run_dir="",
        transport=_transport(settings),
        kv_checksums=settings.kv_checksums,
        journal_dir=_journal(settings.journal),
        max_restart_delay_s=settings.max_restart_delay,
        log_format=settings.log_format,
        store=settings.store_config(),
        **more,
    )


def _model_engine(settings: ServeSettings, block_size: int, max_num_seqs: int, swap_bytes: int | None) -> EngineConfig:
    if settings.model is None:
        raise ConfigurationError("give MODEL: a model directory or a hub id, or use --engine emulated")
    return EngineConfig(
        engine=settings.engine,
        model=str(find_model(settings.model)),
        tokenizer=_tokenizer(settings.tokenizer)[0],
        dtype=settings.dtype or "auto",
        device=settings.device or "auto",
        block_size=block_size,
        kv_cache_bytes=settings.kv_cache_memory_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        swap_bytes=swap_bytes,
        engine_args=engine_args(settings),
        adapters=lora_adapters(settings),
        max_model_len=settings.max_model_len,
        max_num_seqs=max_num_seqs,
        prefix_caching=settings.enable_prefix_caching is not False,
    )


def _emulated_engine(settings: ServeSettings, spec: ClusterSpec) -> EngineConfig:
    """Return the configuration of an emulated engine for the model in `spec`. Raises ConfigurationError."""
    tokenizer, vocab_size = _tokenizer(settings.tokenizer)
    return EngineConfig(
        engine="emulated",
        model=spec.model,
        tokenizer=tokenizer,
        vocab_size=settings.vocab_size or vocab_size,  # so that the tokenizer can decode the output
        block_size=spec.block_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        prefix_caching=settings.enable_prefix_caching is True,  # the simulated machines have none
    )


def _with_prefix_cache(settings: ServeSettings, config: ServiceConfig) -> ServiceConfig:
    engine = config.engine
    if not engine.prefix_caching:
        refuse(settings, "kv_eviction cache_retention_share", "needs --enable-prefix-caching")
    share = settings.cache_retention_share
    engine = msgspec.structs.replace(
        engine,
        eviction=settings.kv_eviction or engine.eviction,
        retained_share=engine.retained_share if share is None else share,
    )
    return msgspec.structs.replace(config, engine=engine)


def _tokenizer(directory: Path | None) -> tuple[str | None, int | None]:
    if directory is None:
        return None, None
    loaded = load_tokenizer(directory)
    if loaded is None:
        raise ConfigurationError(f"--tokenizer {directory} is not a directory with a tokenizer")
    return str(directory.absolute()), loaded.backend.get_vocab_size()


def _shardings(settings: ServeSettings) -> dict[Role, Sharding]:
    """Return each role's tensor and pipeline parallelism. Raises ConfigurationError for contradictory flags."""
    if settings.colocated:
        refuse(settings, PHASE_SIZES, "is for a service with separate phases: with --colocated use --tp and --pp")
    tensor, pipeline = settings.tp or 1, settings.pp or 1
    return {
        Role.PREFILL: Sharding(settings.prefill_tp or tensor, settings.prefill_pp or pipeline),
        Role.DECODE: Sharding(settings.decode_tp or tensor, settings.decode_pp or pipeline),
        Role.MIXED: Sharding(tensor, pipeline),
    }


def _network(settings: ServeSettings) -> HostNetwork | None:
    if settings.listen_workers is None or settings.cluster_key is None:
        refuse(settings, "cluster_key", "needs --listen-workers")
        why = "needs --cluster-key FILE, which authenticates other hosts (twofold keygen writes one)"
        refuse(settings, "listen_workers", why)
        return None
    given = TcpEndpoint.parse(settings.listen_workers, "--listen-workers")
    endpoint = TcpEndpoint(own_host(given.host, "--listen-workers"), given.port)
    read_key(settings.cluster_key)
    key_file = str(settings.cluster_key.absolute())
    return HostNetwork(host=HOME, address=endpoint.host, key_file=key_file, controller=str(endpoint))


def _transport(settings: ServeSettings) -> str:
    over_hosts = settings.listen_workers is not None or settings.launcher == "ray"
    transport = settings.transport or ("curve" if over_hosts else DEFAULT_TRANSPORT)
    check_transport(transport)
    return transport


def _journal(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--journal {path} is not a directory to write to: {error.strerror}") from error
    return str(path)
