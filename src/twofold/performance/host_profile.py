"""Times of an engine that packs all tokens of an iteration into one matrix, fitted to iterations of a live worker.

With n prompt tokens and b decodes in an iteration, S the squares of its prompts (see `PerformanceModel.prefill_s`) and
C the KV tokens that its decodes read:

    iteration(n, S, b, C) = base + f(n + b) + q·S + s·b + c·C

- f, what the linear layers take, is made of straight lines that bend at 3, 4, 8, 32, 128 and 512 tokens: small matrices
  use a processor less well than large ones, and from the fourth row on a CPU's library takes another, slower way than
  for three. No slope is below 0, so no larger batch is faster.
- q is attention within prompts, c attention of decodes over what they read, s what a decode costs besides.
- One formula serves prefill, decode and mixed iterations alike, as one code runs them.
- Computing and reading memory have speeds of their own on a host that others share: `decode_factor` is how many times
  longer iterations without prompts take than the formula says.
- A worker that ran nothing for a while takes `cold_s` longer for its next iteration: a core that slept, and caches that
  others filled meanwhile.

What was measured of a live service on one host: all that a simulation needs to run the same service in its place.

`twofold calibrate live` writes it (YAML); `twofold simulate --profile` and `twofold verify` read it. Times are seconds.
"""

from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.hardware.specs import Accelerator, Machine, Model
from twofold.performance.base import PerformanceModel, uncontended_latency
from twofold.performance.cost import DecodeCost, ModelAccuracy

COLD_AFTER_S: Final = 0.03  # without work
BENDS: Final = (0, 3, 4, 8, 32, 128, 512)


class PackedTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds: see the module for the formula. `token_s` are the slopes of f from each of its bends on.

    Errors are mean absolute relative errors of iterations that the fit had not seen, by kind.
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
        """An iteration of `tokens` prompt tokens beside `sequences` decodes that read `context` KV tokens."""
        packed = spread(tokens + sequences)
        linear_s = sum(slope * part for slope, part in zip(self.token_s, packed, strict=True))
        attention_s = self.square_s * squares + self.context_s * context
        seconds = self.base_s + linear_s + attention_s + self.sequence_s * sequences
        return seconds if tokens else seconds * self.decode_factor

    def slower(self, factor: float, decodes: float | None = None) -> "PackedTimes":
        """All times that many times longer; with `decodes` those of iterations without prompts that many times."""
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
    """How many of the tokens lie between one bend and the next."""
    ends = (*BENDS, float("inf"))
    return [min(max(tokens - low, 0), high - low) for low, high in pairwise(ends)]


class PackedModel(PerformanceModel):
    """The formula of this module for one worker of a host. What it draws was not measured, and counts as nothing."""

    def __init__(self, name: str, times: PackedTimes) -> None:
        self.name = name
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

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        return uncontended_latency(self, prompt_tokens, output_tokens)

    @property
    def idle_w(self) -> float:
        return 0.0

    def prefill_w(self, tokens: int) -> float:  # noqa: ARG002 (nobody measured it)
        return 0.0

    def decode_w(self, sequences: int) -> float:  # noqa: ARG002
        return 0.0


HOST = "host"  # what clusters call the machine of a profile: one share of its cores, with one worker on it


class GatewayTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class ContentionFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    front: GatewayTimes
    prefill: ContentionFactors
    decode: ContentionFactors
    kv_capacity_tokens: int
    source: str
    date: str

    def slower(self, prompts: float, decodes: float) -> "HostProfile":
        """The same host while iterations with prompts, and those of decodes alone, take that many times longer.

        The gateway computes, as prompts do.
        """
        front = {name: getattr(self.front, name) * prompts for name in self.front.__struct_fields__}
        engine = self.engine.slower(prompts, decodes)
        return msgspec.structs.replace(self, engine=engine, front=GatewayTimes(**front))

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
