"""From a cluster's description to the workers of a service."""

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.scheduling.routers import LIVE_ROUTERS
from twofold.serving.config import WorkerConfig
from twofold.serving.plan import own_cores
from twofold.simulation.cores import share_cores
from twofold.simulation.kinds import kinds_of
from twofold.simulation.seats import seats_of
from twofold.simulation.spec import ClusterSpec


def plan_cluster(spec: ClusterSpec, catalog: Catalog, *, pin_cores: bool) -> tuple[WorkerConfig, ...]:
    """One worker for each instance, by the names that the simulator gives them.

    Raises ConfigurationError for a cluster that cannot be, or that only a simulator can run.
    """
    check_servable(spec)
    kinds = kinds_of(spec, catalog)
    seats = list(seats_of(kinds))
    return tuple(
        WorkerConfig(
            instance=seat.name,
            role=seat.kind.pool.role,
            batcher=seat.kind.batcher,
            max_num_batched_tokens=seat.kind.max_num_batched_tokens,
            cores=cores if pin_cores else (),
            threads=len(cores),
        )
        for seat, cores in zip(seats, share_cores(own_cores(), len(seats)), strict=True)
    )


def check_servable(spec: ClusterSpec) -> None:
    """Raise ConfigurationError for what the simulator can do and a service cannot."""
    if spec.router not in LIVE_ROUTERS:
        raise ConfigurationError(
            f"the router {spec.router} is for simulations: serve with router {', '.join(LIVE_ROUTERS)}"
        )
    if spec.rules != "twofold":
        raise ConfigurationError(
            f"the rules {spec.rules} are those of a simulation: serve with rules twofold"
        )
    if any(pool.pipeline_parallel > 1 for pool in spec.pools):
        raise ConfigurationError(
            "pipelines are simulated only: serve instances of one stage (pipeline_parallel 1)"
        )
    if spec.inline_tbt_s is not None:
        raise ConfigurationError(
            "an emulated service does not inline prompts by expected times: leave out inline_tbt_s, or serve a model "
            "with --inline-tbt"
        )
    if not isinstance(spec.cells, msgspec.UnsetType) or not isinstance(spec.control, msgspec.UnsetType):
        raise ConfigurationError(
            "cells and control are for simulations: a service has one controller, and each of its hosts is a cell"
        )
    if spec.failures:
        raise ConfigurationError("failures are simulated only: a service is served without them")
