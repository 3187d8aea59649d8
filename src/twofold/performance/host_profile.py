"""Host profile: measured performance of a live service on one host, for simulations of services on that host.

`twofold calibrate live` writes the profile as YAML; `twofold simulate --profile` and `twofold verify` read it. Times
are in seconds. The engine packs all tokens of an iteration into one matrix. With n prompt tokens and b decodes in an
iteration, S the squares of its prompts (see `PerformanceModel.prefill_s`) and C the KV tokens read by its decodes:

    iteration(n, S, b, C) = base + f(n + b) + q·S + s·b + c·C

- f, the time of the linear layers, is piecewise linear with bends at 3, 4, 8, 32, 128 and 512 tokens: small matrices
  use a processor less efficiently, and CPU libraries switch to a slower path from the fourth row on. No slope is
  negative, so a larger batch is never faster.
- q is attention within prompts, c attention of decodes over their context, s the remaining cost of a decode.
- The same formula covers prefill, decode and mixed iterations, because the engine runs all three with the same code.
- Compute and memory reads slow down differently on a shared host: `decode_factor` multiplies the time of iterations
  without prompts.
- The first iteration after an idle period takes `cold_s` longer: the core slept, and other processes used the caches.
"""

from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.hardware.specs import Accelerator, Machine, Model
from twofold.performance.base import NO_POWER, PerformanceModel
from twofold.performance.cost import DecodeCost, ModelAccuracy

COLD_AFTER_S: Final = 0.03  # of idling
BENDS: Final = (0, 3, 4, 8, 32, 128, 512)


class PackedTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of the iteration time, in seconds, for the formula of this module.

    `token_s` has the slope of f after each bend. Errors are mean absolute relative errors on held-out iterations.
    """

    base_s: float
    token_s: tuple[float, ...]
    square_s: float
    sequence_s: float
    context_s: float
    cold_s: float = 0.0
    decode_factor: float = 1.0
    prefill_error: float | None = None
    decode_error: float | None = None
    mixed_error: float | None = None
    iterations: int = 0

    def seconds(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        """Return the seconds of an iteration: `tokens` prompt tokens, `sequences` decodes over `context` KV tokens."""
        packed = spread(tokens + sequences)
        linear_s = sum(slope * part for slope, part in zip(self.token_s, packed, strict=True))
        attention_s = self.square_s * squares + self.context_s * context
        seconds = self.base_s + linear_s + attention_s + self.sequence_s * sequences
        return seconds if tokens else seconds * self.decode_factor

    def slower(self, factor: float, decodes: float | None = None) -> "PackedTimes":
        """Return a copy with times multiplied by `factor`, or by `decodes` (if set) in iterations without prompts."""
        return msgspec.structs.replace(
            self,
            base_s=self.base_s * factor,
            token_s=tuple(slope * factor for slope in self.token_s),
            square_s=self.square_s * factor,
            sequence_s=self.sequence_s * factor,
            context_s=self.context_s * factor,
            cold_s=self.cold_s * factor,
            decode_factor=self.decode_factor * (1.0 if decodes is None else decodes / factor),
        )


def spread(tokens: float) -> list[float]:
    """Split `tokens` into one part per linear segment of f in the module's formula, that is, at the bends."""
    ends = (*BENDS, float("inf"))
    return [min(max(tokens - low, 0), high - low) for low, high in pairwise(ends)]


class PackedModel(PerformanceModel):
    """Performance model of one worker on a profiled host. Power is 0, because it was not measured."""

    def __init__(self, name: str, times: PackedTimes) -> None:
        self.name, self.power = name, NO_POWER
        self.times = times
        self.error = ModelAccuracy(
            prefill=times.prefill_error,
            decode=times.decode_error,
            basis=f"a fit to {times.iterations} iterations of a live worker",
        )

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self.times.seconds(tokens, squares, 0, 0)

    def decode_cost(self, sequences: int) -> DecodeCost:
        times = self.times
        return DecodeCost(times.seconds(0, 0, sequences, 0), times.context_s * times.decode_factor)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        return self.times.seconds(tokens, squares, sequences, context)


HOST = "host"  # machine name in cluster specs: one worker on one share of the cores


class GatewayTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU seconds of the gateway, and delays between clients and workers on the same host.

    A request costs `request_s` plus `prompt_token_s` per prompt token, and reaches a worker `request_delay_s` later.
    The output of an iteration costs `step_s` plus `token_s` per token, and reaches the clients `step_delay_s` later.
    """

    request_s: float
    prompt_token_s: float
    request_delay_s: float
    step_s: float
    token_s: float
    step_delay_s: float


class HostLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed of KV transfers between two workers of the host. `latency_s` is the fixed cost of a transfer; `sync_s` is
    the synchronization that a layer-wise hand-off adds after the first token.
    """

    bytes_per_s: float
    latency_s: float
    sync_s: float


class ContentionFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors by which other workers of the host slow down an iteration.

    `crowded` applies while all other cores are busy, because cores share memory bandwidth and caches. `shared` applies
    while an iteration of the other phase runs on the same core, in addition to the time lost by taking turns.
    """

    crowded: float = 1.0
    shared: float = 1.0


class HostProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured performance of a host that serves one model: engine, KV transfers, gateway and contention.

    The service may use `cores` cores; each worker computes with `threads` threads. `kv_capacity_tokens` is the default
    KV capacity of a worker.
    """

    model: Model
    cores: int
    threads: int
    engine: PackedTimes
    link: HostLink
    front: GatewayTimes
    prefill: ContentionFactors
    decode: ContentionFactors
    kv_capacity_tokens: int
    source: str
    date: str

    def slower(self, prompts: float, decodes: float) -> "HostProfile":
        """Return this profile with slower iterations.

        `prompts` multiplies the times of the gateway and of iterations with prompts, `decodes` those of other
        iterations.
        """
        front = {name: getattr(self.front, name) * prompts for name in self.front.__struct_fields__}
        engine = self.engine.slower(prompts, decodes)
        return msgspec.structs.replace(self, engine=engine, front=GatewayTimes(**front))

    def extend(self, catalog: Catalog) -> Catalog:
        """Return a copy of the catalog that also contains this host, as a machine, and its model."""
        return msgspec.structs.replace(
            catalog,
            machines={**catalog.machines, HOST: self.machine},
            models={**catalog.models, self.model.name: self.model},
        )

    @property
    def machine(self) -> Machine:
        """One worker's share of the host as a catalog machine. Price and power are 0, because they are unknown."""
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
    """Read a host profile. Raises ConfigurationError if the file is missing or malformed."""
    try:
        return msgspec.yaml.decode(Path(path).read_bytes(), type=HostProfile)
    except OSError as error:
        raise ConfigurationError(f"cannot read profile {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"{path} is not a host profile of `twofold calibrate live`: {reason}") from error


def dump_host_profile(profile: HostProfile) -> str:
    """Format a host profile as the text of its YAML file."""
    heading = "# Measured by `twofold calibrate live`. Times in seconds; see twofold.performance.host_profile.\n"
    return heading + msgspec.yaml.encode(profile).decode()
