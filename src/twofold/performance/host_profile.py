"""What was measured of a live service on one host: all that a simulation needs to run the same service in its place.

`twofold calibrate live` writes it (YAML); `twofold simulate --profile` and `twofold verify` read it. Times are seconds.
"""

from pathlib import Path

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.hardware.machine import Accelerator, Machine
from twofold.hardware.model import Model
from twofold.performance.packed import PackedTimes

HOST = "host"  # what clusters call the machine of a profile: one share of its cores, with one worker on it


class FrontTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands between clients and workers, clients on the same host included.

    A request costs `request_s` of CPU time and `prompt_token_s` more for each token of its prompt, and reaches a worker
    `request_delay_s` after that: processes wake each other. What an iteration brought costs `step_s` and `token_s` for
    each of its tokens, and is with the clients `step_delay_s` after that.
    """

    request_s: float
    prompt_token_s: float
    request_delay_s: float
    step_s: float
    token_s: float
    step_delay_s: float


class HostLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way of KV between two workers: bytes per second, what starting a transfer costs, and what a layer-wise
    hand-off still takes after the first token beside its last layer."""

    bytes_per_s: float
    latency_s: float
    sync_s: float


class Slowdowns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many times longer an iteration takes because of others.

    `crowded` while all other cores are busy, with which it shares memory and caches; `shared` while it takes turns on
    its own core with an iteration of the other phase, beyond the turns themselves.
    """

    crowded: float = 1.0
    shared: float = 1.0


class HostProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host, its engine with one model, and all that lies around it.

    `cores` are those the service may use; `threads` of them computed in each worker. `kv_capacity_tokens` is the KV
    cache of a worker where nothing else is said.
    """

    model: Model
    cores: int
    threads: int
    engine: PackedTimes
    link: HostLink
    front: FrontTimes
    prefill: Slowdowns
    decode: Slowdowns
    kv_capacity_tokens: int
    source: str
    date: str

    def slower(self, prompts: float, decodes: float) -> "HostProfile":
        """The same host while iterations with prompts, and those of decodes alone, take that many times longer.

        The gateway computes, as prompts do.
        """
        front = {name: getattr(self.front, name) * prompts for name in self.front.__struct_fields__}
        engine = self.engine.slower(prompts, decodes)
        return msgspec.structs.replace(self, engine=engine, front=FrontTimes(**front))

    def extend(self, catalog: Catalog) -> Catalog:
        """The catalog with this host and its model in it."""
        return msgspec.structs.replace(
            catalog,
            machines={**catalog.machines, HOST: self.machine},
            models={**catalog.models, self.model.name: self.model},
        )

    @property
    def machine(self) -> Machine:
        """The share of the host that one worker has. What it costs and draws was not measured and counts as 0."""
        accelerator = Accelerator(
            name=HOST,
            memory_bytes=self.model.weight_bytes + self.kv_capacity_tokens * self.model.kv_bytes_per_token,
            memory_bytes_per_s=1.0,
            flops_per_s=1.0,
            interconnect_bytes_per_s=self.link.bytes_per_s,
            tdp_w=0.0,
            source=self.source,
            date=self.date,
        )
        return Machine(
            name=HOST,
            accelerator=accelerator,
            count=1,
            network_bytes_per_s=self.link.bytes_per_s,
            price_per_h=0.0,
            tdp_w=0.0,
            idle_w=0.0,
            source=self.source,
            date=self.date,
        )


def read_host_profile(path: Path | str) -> HostProfile:
    """Raises ConfigurationError where the file is missing or not what `twofold calibrate live` writes."""
    try:
        return msgspec.yaml.decode(Path(path).read_bytes(), type=HostProfile)
    except OSError as error:
        raise ConfigurationError(f"cannot read profile {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"{path} is no profile as `twofold calibrate live` writes it: {reason}"
        ) from error


def dump_host_profile(profile: HostProfile) -> str:
    """The text of a profile file."""
    heading = (
        "# Measured by `twofold calibrate live`. Times in seconds; see twofold.performance.host_profile.\n"
    )
    return heading + msgspec.yaml.encode(profile).decode()
