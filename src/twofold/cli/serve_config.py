"""What the flags of `twofold serve` amount to: a service, taken from the flags or from a cluster file."""

from pathlib import Path

import msgspec

from twofold.cli.serve_engine import emulated_engine, model_engine, usual_block_size, with_eviction
from twofold.cli.serve_flags import Flags
from twofold.cli.serve_forecast import forecast_config
from twofold.cli.serve_inline import inline_config
from twofold.cli.serve_overload import overload_config
from twofold.cli.serve_ray import ray_network
from twofold.cli.serve_refusals import (
    check_choice,
    check_inline,
    check_repeats,
    check_reuse,
    check_store,
    check_use,
    refuse,
)
from twofold.cli.serve_replan import DEFAULT_ROUTER, replan_config
from twofold.cluster.file import load_cluster
from twofold.engine.registry import ENGINES
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.kvcache.sharding import Sharding
from twofold.scheduling.cluster.handoff_policy import HANDOFF_POLICIES
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, LIVE_ROUTERS
from twofold.security.key import read_key
from twofold.security.network import HOME, HostNetwork, TcpEndpoint, own_host
from twofold.serving.config import ServiceConfig
from twofold.serving.launch.worker_plan import (
    check_splits,
    join_terms,
    plan_cluster,
    plan_workers,
    with_chunks,
    with_splits,
)
from twofold.transport.registry import DEFAULT_TRANSPORT, check_transport


def service_of(flags: Flags) -> ServiceConfig:
    """The service that the flags ask for, without a place for its sockets; raises ConfigurationError."""
    check_choice("--engine", flags.engine, tuple(ENGINES))
    check_use(flags)
    config = _from_flags(flags) if flags.cluster is None else _from_cluster(flags, flags.cluster)
    check_splits(config)
    check_reuse(flags, config)
    config = with_eviction(flags, config)
    check_store(flags, config)
    check_inline(flags, config)
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


def public_name(flags: Flags, config: ServiceConfig) -> str:
    """The name of the model in the API: of its directory, or its id."""
    source = Path(config.engine.model)
    return source.name if flags.model is None or Path(flags.model).is_dir() else flags.model


def _from_flags(flags: Flags) -> ServiceConfig:
    router = flags.router or ("jsq" if flags.replan is None else DEFAULT_ROUTER)
    handoff = flags.handoff or "layer-wise"
    check_choice("--router", router, LIVE_ROUTERS)
    check_choice("--handoff", handoff, tuple(HANDOFF_POLICIES))
    if router not in FIXED_ROLE_ROUTERS:
        why = f"is for workers that keep their roles: it excludes --router {router}"
        refuse("--swap-space", flags.swap_space, why)
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
        max_num_batched_tokens=flags.max_num_batched_tokens,
        pin_cores=flags.pinned,
        others_join=others_join,
        **kinds,
    )
    terms = join_terms(colocated=unsplit, max_num_batched_tokens=flags.max_num_batched_tokens, **kinds)
    return ServiceConfig(
        engine=model_engine(
            flags, flags.block_size or usual_block_size(flags), flags.max_num_seqs or 64, flags.swap_space
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


def _from_cluster(flags: Flags, file: Path) -> ServiceConfig:
    refuse("--listen-workers", flags.listen_workers, "is not for --cluster, whose file names all workers")
    refuse("--cluster-key", flags.cluster_key, "is for --listen-workers")
    catalog = load_catalog(flags.catalog)
    spec = load_cluster(file, catalog=catalog)
    try:
        workers = plan_cluster(spec, catalog, pin_cores=flags.pinned)
    except ConfigurationError as error:
        raise ConfigurationError(f"cluster {file}: {error}") from error
    check_repeats(flags, file, spec, workers)
    return ServiceConfig(
        engine=emulated_engine(flags, spec)
        if flags.emulated
        else model_engine(flags, spec.block_size, spec.max_num_seqs, spec.swap_space_bytes),
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


def _splits(flags: Flags) -> dict[Role, Sharding]:
    """How the workers of each role are divided; raises ConfigurationError for flags that are about none."""
    for flag, value in flags.degrees[2:]:
        if flags.colocated:
            refuse(flag, value, "is for a service in two phases: with --colocated write --tp and --pp")
    tensor, pipeline = flags.tp or 1, flags.pp or 1
    return {
        Role.PREFILL: Sharding(flags.prefill_tp or tensor, flags.prefill_pp or pipeline),
        Role.DECODE: Sharding(flags.decode_tp or tensor, flags.decode_pp or pipeline),
        Role.MIXED: Sharding(tensor, pipeline),
    }


def _network(flags: Flags) -> HostNetwork | None:
    """Where workers of other hosts join, if they may; raises ConfigurationError."""
    if flags.listen_workers is None or flags.cluster_key is None:
        refuse("--cluster-key", flags.cluster_key, "is for --listen-workers: give that too")
        why = "lets other hosts in: say who may with --cluster-key FILE (twofold keygen makes one)"
        refuse("--listen-workers", flags.listen_workers, why)
        return None
    given = TcpEndpoint.parse(flags.listen_workers, "--listen-workers")
    endpoint = TcpEndpoint(own_host(given.host, "--listen-workers"), given.port)
    read_key(flags.cluster_key)
    key_file = str(flags.cluster_key.absolute())
    return HostNetwork(host=HOME, address=endpoint.host, key_file=key_file, controller=str(endpoint))


def _transport(flags: Flags) -> str:
    transport = flags.transport or ("curve" if flags.over_hosts else DEFAULT_TRANSPORT)
    check_transport(transport)
    return transport


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
