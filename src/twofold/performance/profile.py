"""Measured performance of an instance, stored by `twofold characterize` in a YAML file.

An iteration with n prompt tokens, and b decodes that read C tokens of KV cache, takes, in seconds,

    base + f(n + b) + q·S + s·b + l·max(b − t, 0) + c·C
         + p, if n > 0
         + m, if n > 0 and b > 0

S is the sum over the prompts of (h + k)² − h², for k prompt tokens computed after h earlier tokens. t is a number of
decodes, stored as `large`. The piecewise linear function f and the other coefficients are fitted to measurements.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from twofold.errors import ConfigurationError, require
from twofold.hardware.catalog import Catalog
from twofold.hardware.specs import Accelerator, Machine, Model
from twofold.performance.base import NO_POWER, InstancePower, PerformanceModel
from twofold.performance.coefficients import power_law
from twofold.performance.cost import DecodeCost, MeasuredSizes, ModelAccuracy

# - f is the time of the linear layers for all tokens together. f is piecewise linear, with measured bends: kernels use
#   small matrices less efficiently, and CPU libraries switch kernels at certain sizes. No slope is negative.
# - p is an additional fixed cost of iterations with prompts, for example if only pure decode iterations run as a
#   captured graph. m is an additional fixed cost of iterations with both prompts and decodes.
# - q is the cost of attention within prompts, and c the cost of attention for each KV token that decodes read. s is the
#   remaining cost of a decode, and l the additional cost of each decode beyond `large` decodes.
# - On a shared host, compute and memory reads slow down by different factors. `decode_factor` therefore multiplies the
#   time of iterations without prompts.
# - The first iteration after i idle seconds takes `cold_s` · i / (i + `cold_half_s`) longer: other users of the host
#   have replaced the weights in its caches.

COLD_AFTER_S: Final = 0.03  # of idling


class IterationTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of this module's formula for the iteration time in seconds, fitted to measurements."""

    base_s: float
    bends: tuple[int, ...]  # numbers of tokens at which the slope of f changes, starting with 0
    token_s: tuple[float, ...]  # slopes of f, each after one of the bends
    square_s: float
    sequence_s: float
    context_s: float
    prompt_s: float = 0.0
    mixed_s: float = 0.0
    large: int = 0
    large_s: float = 0.0
    cold_s: float = 0.0
    cold_half_s: float = 0.0
    decode_factor: float = 1.0
    # Median absolute relative errors on held-out measurements.
    prefill_error: float | None = None
    decode_error: float | None = None
    mixed_error: float | None = None
    iterations: int = 0
    # Largest measured sizes; 0: unknown.
    max_prompt_tokens: int = 0
    max_sequences: int = 0

    def seconds(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        """Return the seconds of an iteration with `tokens` prompt tokens and `sequences` decodes."""
        parts = spread(tokens + sequences, self.bends)
        linear_s = sum(slope * part for slope, part in zip(self.token_s, parts, strict=True))
        attention_s = self.square_s * squares + self.context_s * context
        decodes_s = self.sequence_s * sequences + self.large_s * max(sequences - self.large, 0)
        seconds = self.base_s + linear_s + attention_s + decodes_s
        if not tokens:
            return seconds * self.decode_factor
        return seconds + self.prompt_s + (self.mixed_s if sequences else 0.0)

    def cold_start_s(self, idle_s: float) -> float:
        """Return the seconds by which an iteration takes longer after `idle_s` seconds without iterations."""
        # In this form, an infinite idle time costs `cold_s`.
        return self.cold_s / (1.0 + self.cold_half_s / idle_s) if idle_s > COLD_AFTER_S else 0.0

    def slower(self, factor: float, decodes: float | None = None) -> "IterationTimes":
        """Return a copy whose iteration times are multiplied by `factor`.

        If a second factor `decodes` is given, the times of iterations without prompts are multiplied by `decodes`
        instead.
        """
        times = ("base_s", "square_s", "sequence_s", "context_s", "prompt_s", "mixed_s", "large_s", "cold_s")
        return msgspec.structs.replace(
            self,
            **{name: getattr(self, name) * factor for name in times},
            token_s=tuple(slope * factor for slope in self.token_s),
            decode_factor=self.decode_factor * (1.0 if decodes is None else decodes / factor),
        )


def spread(tokens: float, bends: tuple[int, ...]) -> list[float]:
    """Return the number of tokens in each segment of a piecewise linear function of `tokens`.

    `bends` lists the token counts at which the segments start, in ascending order. The last segment has no end.
    """
    ends = (*bends, float("inf"))
    return [min(max(tokens - low, 0), high - low) for low, high in pairwise(ends)]


class MeasuredModel(PerformanceModel):
    """Performance model of one measured instance."""

    def __init__(
        self, name: str, times: IterationTimes, basis: str = "measured", power: InstancePower = NO_POWER
    ) -> None:
        self.name, self.power = name, power
        self.times = times
        basis = f"{basis}, {times.iterations} distinct iterations"
        sizes = MeasuredSizes(prompt_tokens=times.max_prompt_tokens, sequences=times.max_sequences)
        self.error = ModelAccuracy(
            prefill=times.prefill_error,
            decode=times.decode_error,
            basis=basis,
            measured=sizes if times.max_sequences else None,
        )

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self.times.seconds(tokens, squares, 0, 0)

    def decode_cost(self, sequences: int) -> DecodeCost:
        times = self.times
        return DecodeCost(times.seconds(0, 0, sequences, 0), times.context_s * times.decode_factor)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        return self.times.seconds(tokens, squares, sequences, context)

    def cold_start_s(self, idle_s: float) -> float:
        return self.times.cold_start_s(idle_s)


HOST: Final = "host"  # machine name in cluster specs: one worker on one share of the cores
UNKNOWN_LINK: Final = 12.5e9  # bytes per second between machines with no measured link: 100 Gb/s


class GatewayTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU times of the gateway, and delays between clients and workers, in seconds."""

    request_s: float  # CPU time per request
    prompt_token_s: float  # CPU time per prompt token
    request_delay_s: float  # until the request reaches a worker
    step_s: float  # CPU time per iteration
    token_s: float  # CPU time per output token
    step_delay_s: float  # until the output of an iteration reaches clients


class KvLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed of KV transfers between two instances."""

    bytes_per_s: float
    latency_s: float  # of a transfer, in addition to the time for its bytes
    sync_s: float = 0.0  # of a layer-wise hand-off, after the first token
    # False: clients measured the speed by the delay of the second token, so hand-offs are simulated as serialized.
    layer_wise: bool = True


class ContentionFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors by which other workers on the same host slow down an iteration."""

    crowded: float = 1.0  # while workers keep all other cores busy
    # While the other phase (prefill or decode) runs on the same core, in addition to the time lost by taking turns.
    shared: float = 1.0


class SharedHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU host whose cores are shared by the workers and the gateway of a service."""

    cores: int
    threads: int  # of each worker
    front: GatewayTimes
    prefill: ContentionFactors  # of iterations with prompts
    decode: ContentionFactors  # of all other iterations


class MeasuredPower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured power of an instance's accelerators in prefill and in decode, as shares of their TDP."""

    tdp_w: float
    prefill_share: float
    decode_share: float
    source: str


class MachineCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price and power of one instance's machine, as stated by the user, or 0 if unknown."""

    price_per_h: float = 0.0
    tdp_w: float = 0.0
    idle_w: float = 0.0


class MeasuredProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured performance of one instance of a model: iteration times, KV capacity and KV transfers."""

    model: Model
    engine: str  # describes the software
    times: IterationTimes
    kv_capacity_tokens: int
    source: str
    date: str
    machine: str = HOST  # name of the hardware in cluster specs
    tensor_parallel: int = 1
    max_num_batched_tokens: int | None = None  # limit of the engine in the measurement
    max_num_seqs: int | None = None  # limit of the engine in the measurement
    request_s: float = 0.0  # time of a request outside the engine
    link: KvLink | None = None  # None: no KV transfer was measured
    host: SharedHost | None = None  # None: each instance has its own accelerators
    power: MeasuredPower | None = None
    costs: MachineCosts = MachineCosts()

    @property
    def shared_host(self) -> SharedHost:
        """CPU host shared by all instances. Raises ConfigurationError if the profile describes no host."""
        if self.host is None:
            raise ConfigurationError(f"the profile of {self.source} has no shared host: measure a service on this host")
        return self.host

    def slower(self, prompts: float, decodes: float) -> "MeasuredProfile":
        """Return a copy with scaled iteration and gateway times.

        The factor `prompts` multiplies gateway times and the times of iterations with prompts. The factor `decodes`
        multiplies the times of iterations without prompts.
        """
        host = self.host
        if host is not None:
            front = {name: getattr(host.front, name) * prompts for name in host.front.__struct_fields__}
            host = msgspec.structs.replace(host, front=GatewayTimes(**front))
        return msgspec.structs.replace(self, times=self.times.slower(prompts, decodes), host=host)

    def contending(self, instances: int, prompts: float, decodes: float) -> "MeasuredProfile":
        """Return a copy for `instances` instances on one host, which slow each other down while all are busy.

        The times of iterations with prompts increase by the factor `prompts`, those of other iterations by `decodes`.
        """
        front = GatewayTimes(
            request_s=0.0, prompt_token_s=0.0, request_delay_s=self.request_s, step_s=0.0, token_s=0.0, step_delay_s=0.0
        )
        prefill, decode = (ContentionFactors(crowded=factor) for factor in (prompts, decodes))
        host = SharedHost(cores=instances, threads=1, front=front, prefill=prefill, decode=decode)
        return msgspec.structs.replace(self, host=host)

    def extend(self, catalog: Catalog) -> Catalog:
        """Return a copy of `catalog` that also contains the machine and the LLM of this profile."""
        return msgspec.structs.replace(
            catalog,
            machines={**catalog.machines, self.machine: self.as_machine()},
            models={**catalog.models, self.model.name: self.model},
        )

    def as_machine(self) -> Machine:
        """Return the hardware of one instance as an entry for the hardware catalog."""
        count, network = self.tensor_parallel, UNKNOWN_LINK if self.link is None else self.link.bytes_per_s
        # Just enough memory for the weights and the KV.
        memory = self.model.weight_bytes + self.kv_capacity_tokens * self.model.kv_bytes_per_token
        accelerator = Accelerator(
            name=self.machine,
            memory_bytes=-(-memory // count),
            memory_bytes_per_s=1.0,
            flops_per_s=1.0,
            interconnect_bytes_per_s=network,
            tdp_w=0.0 if self.power is None else self.power.tdp_w / count,
            source=self.source,
            date=self.date,
        )
        return Machine(
            name=self.machine,
            accelerator=accelerator,
            count=count,
            network_bytes_per_s=network,
            price_per_h=self.costs.price_per_h,
            tdp_w=self.costs.tdp_w,
            idle_w=self.costs.idle_w,
            source=self.source,
            date=self.date,
        )

    def performance(self) -> MeasuredModel:
        """Return the performance model of one instance."""
        name = f"{self.model.name} on {self.machine}" + (f", {self.engine}" if self.engine else "")
        return MeasuredModel(name, self.times, f"measured {self.date}", self._power())

    def _power(self) -> InstancePower:
        if self.power is None:
            return NO_POWER
        law, power = power_law(), self.power
        return InstancePower(
            idle_w=self.costs.idle_w,
            overhead_w=max(self.costs.tdp_w - power.tdp_w, 0.0),
            accelerators_w=power.tdp_w * power.prefill_share,
            cap=1.0,
            decode_share=min(power.decode_share / power.prefill_share, 1.0),
            sequence_share=law.sequence,
            saturation_tokens=law.saturation_tokens,
        )


def load_profiles(paths: Sequence[str]) -> tuple[MeasuredProfile, ...]:
    """Read the measured profiles of a cluster. Raises ConfigurationError if two profiles conflict."""
    found = tuple(load_profile(path) for path in paths)
    names = Counter(each.machine for each in found)
    for each, path in zip(found, paths, strict=True):
        require(names[each.machine] == 1, f"two profiles measured {each.machine}: name each by --hardware")
        require(len(found) == 1 or each.host is None, f"{path} measured a shared host, which excludes other profiles")
    return found


def load_profile(path: Path | str) -> MeasuredProfile:
    """Read a measured profile. Raises ConfigurationError if the file is missing or malformed."""
    try:
        return msgspec.yaml.decode(Path(path).read_bytes(), type=MeasuredProfile)
    except OSError as error:
        raise ConfigurationError(f"cannot read profile {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"{path} is not a profile of `twofold characterize`: {reason}") from error


def profile_of(path: Path, model: Model) -> MeasuredProfile:
    """Read a measured profile. Raises ConfigurationError if it was not measured with `model`."""
    found = load_profile(path)
    require(
        (model.name, model.parameters) == (found.model.name, found.model.parameters),
        f"{path} is a profile of {found.model.name}, and the model is {model.name}: calibrate with it",
    )
    return found


def dump_profile(profile: MeasuredProfile) -> str:
    """Return a measured profile as the text of a YAML file."""
    heading = "# Measured by `twofold characterize`. Times in seconds; see twofold.performance.profile.\n"
    return heading + msgspec.yaml.encode(profile).decode()
