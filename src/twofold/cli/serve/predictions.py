"""Configuration of features that predict iteration times: --overload, --replan, --inline-tbt and some routers."""

from pathlib import Path
from typing import Final

from twofold.cli.serve.settings import ServeSettings
from twofold.cluster.overload import overload_control
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError, require
from twofold.hardware.catalog import load_catalog
from twofold.hardware.hf_config import read_model
from twofold.instance import Role
from twofold.performance.profile import MeasuredProfile, profile_of
from twofold.planning.splits import SplitPlanner
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.replan.replanner import ReplanRules
from twofold.scheduling.routers import FORECASTING_ROUTERS, ROUTERS
from twofold.serving.config import ForecastConfig, InlineConfig, OverloadConfig, ReplanConfig, ServiceConfig
from twofold.serving.launch.worker_plan import pools_of

DEFAULT_REPLAN_ROUTER: Final = "jsq-planned"
DEFAULT_ATTAINMENT: Final = 0.9


def overload_config(config: ServiceConfig, settings: ServeSettings) -> OverloadConfig | None:
    """Return the configuration of --overload; None without it. Raises ConfigurationError for invalid flags."""
    if settings.overload is None:
        return None
    require(config.network is None, "--overload predicts workers of one host: leave out --listen-workers")
    if not ROUTERS[config.router].kind.repeats_routes:
        raise ConfigurationError(
            f"--overload predicts where a request is placed: --router {config.router} places it elsewhere each time"
        )
    if settings.slo is None:
        raise ConfigurationError("--overload rejects requests that miss the SLO: give --slo, as in ttft=2,tpot=0.1")
    overload = OverloadConfig(
        rule=settings.overload,
        cluster=simulated_workers(config, settings.profile, "--overload"),
        slo=settings.slo,
        catalog=config.catalog,
    )
    profiles = instance_profiles(overload.cluster, load_catalog(config.catalog))
    overload_control(overload.rule, overload.cluster, profiles, overload.slo, Pools())  # checks the cluster
    return overload


def replan_config(config: ServiceConfig, settings: ServeSettings) -> ReplanConfig | None:
    """Return the configuration of --replan; None without it. Raises ConfigurationError for invalid flags."""
    if not settings.replan:
        return None
    require(settings.listen_workers is None, "--replan predicts workers of one host: leave out --listen-workers")
    if settings.slo is None:
        raise ConfigurationError("--replan needs --slo, as in ttft=2,tpot=0.1")
    interval_s = settings.min_between
    replan = ReplanConfig(
        cluster=simulated_workers(config, settings.profile, "--replan"),
        slo=settings.slo,
        attainment=settings.attainment or DEFAULT_ATTAINMENT,
        replicas=settings.retire,
        rules=ReplanRules() if interval_s is None else ReplanRules(min_between_s=interval_s),
        catalog=config.catalog,
    )
    SplitPlanner(replan.cluster, load_catalog(config.catalog), replan.slo)  # checks the cluster
    return replan


def forecast_config(config: ServiceConfig, profile: Path | None) -> ForecastConfig | None:
    """Return the configuration of the router's time predictions; None if the router uses none.

    Raises ConfigurationError if other flags make predictions impossible.
    """
    if config.router not in FORECASTING_ROUTERS:
        return None
    flag = f"--router {config.router}"
    require(config.journal_dir is None, f"{flag} uses predictions, which journals do not record: leave out --journal")
    if ROUTERS[config.router].kind.reads_prefix_caches and not config.engine.prefix_caching:
        raise ConfigurationError(f"{flag} needs --enable-prefix-caching")
    if profile is None and config.cluster is None and not _colocated(config):
        return ForecastConfig()  # prefill workers measure their speed when they start
    if profile is not None and not config.workers:
        raise ConfigurationError(
            "--profile describes this host, which has no workers; workers of other hosts measure themselves"
        )
    cluster = simulated_workers(config, profile, f"{flag} of a colocated service")
    instance_profiles(cluster, load_catalog(config.catalog))  # checks the cluster
    return ForecastConfig(cluster=cluster, catalog=config.catalog)


def inline_config(config: ServiceConfig, settings: ServeSettings) -> InlineConfig | None:
    """Return the configuration of inlined prefill; None without --inline-tbt. Raises ConfigurationError."""
    if settings.inline_tbt is None:
        return None
    require(config.network is None, "--inline-tbt predicts workers of one host: leave out --listen-workers")
    host = _measured_host(config, _required(settings.profile, "--inline-tbt"))
    alone, shared = len(config.workers) == 1, host.shared_host
    # Several workers are predicted as on a host with all workers busy.
    times = host.times if alone else host.times.slower(shared.prefill.crowded, shared.decode.crowded)
    return InlineConfig(times=times, tbt_s=settings.inline_tbt)


def simulated_workers(config: ServiceConfig, profile: Path | None, flag: str) -> ClusterSpec:
    """Return a spec to simulate the workers, from cluster file or host profile, else raise ConfigurationError."""
    if config.cluster is not None:
        require(profile is None, "--profile excludes --cluster, whose file may name a profile")
        return config.cluster
    path = _required(profile, flag)
    host, size = _measured_host(config, path), config.engine.kv_cache_bytes
    return ClusterSpec(
        pools=pools_of(config.workers, host.machine),
        model=host.model.name,
        router=config.router,
        handoff=config.handoff,
        max_num_batched_tokens=config.workers[0].max_num_batched_tokens,
        inline_tbt_s=None if config.inline is None else config.inline.tbt_s,
        max_num_seqs=config.engine.max_num_seqs,
        block_size=config.engine.block_size,
        kv_capacity_tokens=host.kv_capacity_tokens if size is None else size // host.model.kv_bytes_per_token,
        profiles=(str(path.absolute()),),
    )


def _colocated(config: ServiceConfig) -> bool:
    joining = () if config.terms is None else config.terms.batchers
    return Role.MIXED in {*joining, *(worker.role for worker in config.workers)}


def _required(profile: Path | None, flag: str) -> Path:
    if profile is None:
        raise ConfigurationError(f"{flag} needs --profile FILE, as written by `twofold calibrate live`")
    return profile


def _measured_host(config: ServiceConfig, profile: Path) -> MeasuredProfile:
    return profile_of(profile, read_model(Path(config.engine.model)))
