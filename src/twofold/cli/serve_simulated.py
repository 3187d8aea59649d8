"""What of a service is simulated, by those of its parts that predict: its workers as a cluster."""

from itertools import groupby
from pathlib import Path

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.hardware.hf_config import read_model
from twofold.performance.host_profile import HOST, HostProfile, read_host_profile
from twofold.serving.config import ServiceConfig


def simulated_workers(config: ServiceConfig, profile: Path | None, flag: str) -> ClusterSpec:
    """The cluster of the service's file, or workers on a host that was measured; `flag` is what needs to know.

    Raises ConfigurationError where neither says how fast the workers are.
    """
    if config.cluster is not None:
        if profile is not None:
            raise ConfigurationError("--profile is not for --cluster, whose file may name a profile itself")
        return config.cluster
    path = needed_profile(profile, flag)
    host, size = measured_host(config, path), config.engine.kv_cache_bytes
    kinds = groupby(config.workers, key=lambda worker: (worker.role, worker.batcher))
    return ClusterSpec(
        pools=tuple(
            PoolSpec(machines=len(list(same)), machine=HOST, role=role, batcher=batcher)
            for (role, batcher), same in kinds
        ),
        model=host.model.name,
        router=config.router,
        handoff=config.handoff,
        max_num_batched_tokens=config.workers[0].max_num_batched_tokens,
        inline_tbt_s=None if config.inline is None else config.inline.tbt_s,
        max_num_seqs=config.engine.max_num_seqs,
        block_size=config.engine.block_size,
        kv_capacity_tokens=host.kv_capacity_tokens if size is None else size // host.model.kv_bytes_per_token,
        profile=str(path.absolute()),
    )


def needed_profile(profile: Path | None, flag: str) -> Path:
    """Raises ConfigurationError where there is none; `flag` is what needs to know."""
    if profile is None:
        raise ConfigurationError(
            f"{flag} needs to know how fast workers are: give --profile FILE, as `twofold calibrate live` writes it"
        )
    return profile


def measured_host(config: ServiceConfig, profile: Path) -> HostProfile:
    """What was measured of this service's model on its host; raises ConfigurationError where it is another model."""
    host, known = read_host_profile(profile), read_model(Path(config.engine.model))
    if (known.name, known.parameters) != (host.model.name, host.model.parameters):
        raise ConfigurationError(
            f"{profile} is a profile of {host.model.name}, and the model is {known.name}: calibrate with it"
        )
    return host
