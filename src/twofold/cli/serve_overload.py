"""The flags of `twofold serve --overload`, and the overload control that they ask for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.cli.serve_simulated import simulated_workers
from twofold.cluster.overload import overload_control
from twofold.cluster.profiles import instance_profiles
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.scheduling.cluster.pools import Pools
from twofold.serving.config import OverloadConfig, ServiceConfig
from twofold.slo import Slo

_BLIND: Final = ("round-robin", "random")  # they place a request elsewhere than where it was just judged


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadFlags:
    """The rule, and what it goes by; None where a flag is not given."""

    rule: str
    slo: str | None = None
    profile: Path | None = None


def overload_config(config: ServiceConfig, flags: OverloadFlags) -> OverloadConfig:
    """Raises ConfigurationError where there can be no overload control for this service."""
    if config.network is not None:
        raise ConfigurationError("--overload knows the workers of one host: leave --listen-workers out")
    if config.router in _BLIND:
        raise ConfigurationError(
            "--overload asks where a request would go: leave out "
            f"--router {config.router}, which says another every time"
        )
    if flags.slo is None:
        raise ConfigurationError(
            "--overload refuses what would miss the SLO: give --slo, as in ttft=2,tpot=0.1"
        )
    overload = OverloadConfig(
        rule=flags.rule,
        cluster=simulated_workers(config, flags.profile, "--overload"),
        slo=Slo.parse(flags.slo),
        catalog=config.catalog,
    )
    kinds = instance_profiles(overload.cluster, load_catalog([Path(file) for file in overload.catalog]))
    overload_control(
        overload.rule, overload.cluster, kinds, overload.slo, Pools()
    )  # refuses what it cannot judge
    return overload
