"""The flags of `twofold serve --replan`, and what of a service is simulated to search for its plans."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.hardware.hf_config import read_model
from twofold.performance.host_profile import HOST, read_host_profile
from twofold.planning.splits import SplitPlanner
from twofold.scheduling.replanning import Rules
from twofold.serving.config import ReplanConfig, ServiceConfig
from twofold.simulation.spec import ClusterSpec, PoolSpec
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


def replan_config(config: ServiceConfig, flags: ReplanFlags) -> ReplanConfig:
    """Raises ConfigurationError where there can be no plans for this service, or nothing to search them by."""
    if config.network is not None:
        raise ConfigurationError("--replan knows the workers of one host: leave --listen-workers out")
    if flags.slo is None:
        raise ConfigurationError("--replan needs an SLO to aim at: give --slo, as in ttft=2,tpot=0.1")
    attainment = DEFAULT_ATTAINMENT if flags.attainment is None else flags.attainment
    if not 0.0 < attainment <= 1.0:
        raise ConfigurationError(f"--attainment {attainment:g} is no share: give more than 0, at most 1")
    replan = ReplanConfig(
        cluster=_simulated(config, flags.profile),
        slo=Slo.parse(flags.slo),
        attainment=attainment,
        replicas=flags.retire,
        rules=Rules() if flags.min_between_s is None else Rules(min_between_s=flags.min_between_s),
        catalog=config.catalog,
    )
    catalog = load_catalog([Path(file) for file in replan.catalog])
    SplitPlanner(replan.cluster, catalog, replan.slo)  # refuses what can have no plan
    return replan


def _simulated(config: ServiceConfig, profile: Path | None) -> ClusterSpec:
    """The cluster of the service: that of its file, or workers on a host that was measured."""
    if config.cluster is not None:
        if profile is not None:
            raise ConfigurationError("--profile is not for --cluster, whose file may name a profile itself")
        return config.cluster
    if profile is None:
        raise ConfigurationError(
            "--replan needs to know how fast workers are: give --profile FILE, as `twofold calibrate live` writes it"
        )
    host, known = read_host_profile(profile), read_model(Path(config.engine.model))
    if (known.name, known.parameters) != (host.model.name, host.model.parameters):
        raise ConfigurationError(
            f"{profile} is a profile of {host.model.name}, and the model is {known.name}: calibrate with it"
        )
    size = config.engine.kv_cache_bytes
    kinds = groupby(config.workers, key=lambda worker: (worker.role, worker.batcher))
    return ClusterSpec(
        pools=tuple(
            PoolSpec(machines=len(list(same)), machine=HOST, role=role, batcher=batcher)
            for (role, batcher), same in kinds
        ),
        model=host.model.name,
        router=config.router,
        handoff=config.handoff,
        token_budget=config.workers[0].token_budget,
        max_seqs=config.engine.max_num_seqs,
        block_size=config.engine.block_size,
        kv_capacity_tokens=host.kv_capacity_tokens if size is None else size // host.model.kv_bytes_per_token,
        profile=str(profile.absolute()),
    )
