"""The flags of `twofold serve --replan`, and what its plans are searched by."""

from dataclasses import dataclass
from pathlib import Path

from twofold.cli.serve_simulated import simulated_workers
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.planning.splits import SplitPlanner
from twofold.scheduling.replan.replanner import ReplanRules
from twofold.serving.config import ReplanConfig, ServiceConfig
from twofold.slo import Slo

DEFAULT_ROUTER = "jsq-planned"
DEFAULT_ATTAINMENT = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanFlags:
    """What `--replan` goes by; None where a flag is not given."""

    profile: Path | None = None
    slo: str | None = None
    attainment: float | None = None
    retire: bool = False
    min_between_s: float | None = None


def replan_config(config: ServiceConfig, flags: ReplanFlags, *, others_join: bool = False) -> ReplanConfig:
    """Raises ConfigurationError where there can be no plans for this service, or nothing to search them by.

    Nobody knows how fast workers are that `others_join` with.
    """
    if others_join:
        raise ConfigurationError(
            "--replan knows the workers that the service starts itself: leave --listen-workers out"
        )
    if flags.slo is None:
        raise ConfigurationError("--replan needs an SLO to aim at: give --slo, as in ttft=2,tpot=0.1")
    attainment = DEFAULT_ATTAINMENT if flags.attainment is None else flags.attainment
    if not 0.0 < attainment <= 1.0:
        raise ConfigurationError(f"--attainment {attainment:g} is no share: give more than 0, at most 1")
    replan = ReplanConfig(
        cluster=simulated_workers(config, flags.profile, "--replan"),
        slo=Slo.parse(flags.slo),
        attainment=attainment,
        replicas=flags.retire,
        rules=ReplanRules()
        if flags.min_between_s is None
        else ReplanRules(min_between_s=flags.min_between_s),
        catalog=config.catalog,
    )
    catalog = load_catalog([Path(file) for file in replan.catalog])
    SplitPlanner(replan.cluster, catalog, replan.slo)  # refuses what can have no plan
    return replan
