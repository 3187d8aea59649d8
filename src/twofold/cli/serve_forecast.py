"""What routers of `twofold serve` predict by, if the one that is asked for does."""

from pathlib import Path
from typing import Final

from twofold.cli.serve_simulated import simulated_workers
from twofold.cluster.profiles import instance_profiles
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.scheduling.routers import FORECASTING_ROUTERS
from twofold.serving.config import ForecastConfig, ServiceConfig

_BY_PREFIX: Final = ("local-prefix", "conductor")


def forecast_config(config: ServiceConfig, profile: Path | None) -> ForecastConfig | None:
    """Raises ConfigurationError where the router predicts, and nobody knows by what."""
    if config.router not in FORECASTING_ROUTERS:
        return None
    flag = f"--router {config.router}"
    if config.journal_dir is not None:
        raise ConfigurationError(f"{flag} goes by what journals do not tell: leave out --journal")
    if config.router in _BY_PREFIX and not config.engine.prefix_caching:
        raise ConfigurationError(f"{flag} looks for what --prefix-caching keeps: serve with that")
    if profile is None and config.cluster is None and not _colocated(config):
        return ForecastConfig()
    if profile is not None and not config.workers:
        raise ConfigurationError(
            "--profile is of this host, which has no workers: those of others measure themselves"
        )
    cluster = simulated_workers(config, profile, f"{flag} of a colocated service")
    instance_profiles(
        cluster, load_catalog([Path(file) for file in config.catalog])
    )  # refuses what it does not know
    return ForecastConfig(cluster=cluster, catalog=config.catalog)


def _colocated(config: ServiceConfig) -> bool:
    """Whether workers do both phases: those do not measure how fast they prefill."""
    joining = () if config.terms is None else config.terms.batchers
    return Role.MIXED in {*joining, *(worker.role for worker in config.workers)}
