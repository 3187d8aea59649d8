"""The latency model of DistServe's simulator: to reproduce its figures.

Milliseconds, on A100-80GB; l are the tokens of each prompt of a batch, PP the pipeline parallelism:

    prefill = (a + b·Σl + c·Σl²) / PP + PP            + 2 + 1e-4·Σl
    decode  = (a + b·Σ(context + 1) + c·batch) / PP   + 2 + 1e-4·Σcontext

These are the times of one of PP stages. The second part is the overhead of the first stage of each iteration; the
others take only the first part, and nothing to be sent activations. Decode has one set of coefficients below 95
sequences and another from there on, which can make 95 sequences faster than 94.

Ambiguous in the original: it takes the context of a decode before the token it makes, and adds 1. The KV tokens of
`DecodeCost` are taken as that context. It has no mixed iterations; here decodes add to a prefill what they cost
beyond a and the overhead of an iteration, which is an assumption.
"""

from functools import cache

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.specs import Machine, Model
from twofold.performance.base import uncontended_latency
from twofold.performance.coefficients import data_bytes
from twofold.performance.cost import DecodeCost, ModelAccuracy
from twofold.performance.instance import (
    Pipeline,
    check_tensor_parallel,
    instance_name,
    memory_share,
    profile_name,
    stage_layers,
)
from twofold.performance.power import PoweredModel, instance_power

ENGINES = ("distserve", "vllm")
_LARGE_BATCH = 95
_OVERHEAD_MS, _OVERHEAD_TOKEN_MS = 2.0, 1e-4


class LatencyCoefficients(msgspec.Struct, frozen=True, array_like=True):
    """a, b, c of one line, in milliseconds."""

    a: float
    b: float
    c: float


class PublishedLatency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the table: a model at one tensor parallelism on one engine."""

    engine: str
    model: str
    tensor_parallel: int
    prefill: LatencyCoefficients
    decode_small: LatencyCoefficients
    decode_large: LatencyCoefficients


class PublishedLatencies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """performance/data/distserve-published.toml."""

    accelerator: str
    source: str
    date: str
    latency: list[PublishedLatency]
    capacity: dict[str, list[tuple[int, int, int]]]


class DistservePublishedModel(PoweredModel):
    """One of `stages` stages, by the formula of this module with the coefficients of one line of the table."""

    def __init__(
        self,
        latency: PublishedLatency,
        model: Model,
        machine: Machine,
        tensor_parallel: int,
        *,
        stages: int = 1,
        first: bool = True,
    ) -> None:
        kind = "distserve-published" + ("-vllm" if latency.engine == "vllm" else "")
        self.name = instance_name(kind, model, machine, tensor_parallel)
        self.error = ModelAccuracy(
            prefill=None,
            decode=None,
            basis=f"the latency model of DistServe's simulator for {latency.engine}",
        )
        self._latency, self._parts = latency, stages
        self._overhead_ms = _OVERHEAD_MS if first else 0.0
        self._overhead_token_ms = _OVERHEAD_TOKEN_MS if first else 0.0
        used = memory_share(model, machine, tensor_parallel, self.decode_cost(1).base_s * stages)
        super().__init__(instance_power(machine, tensor_parallel, memory_share=used))

    def prefill_s(self, tokens: int, squares: int) -> float:
        line = self._latency.prefill
        stage_ms = (line.a + line.b * tokens + line.c * squares) / self._parts + self._parts
        return (stage_ms + self._overhead_ms + self._overhead_token_ms * tokens) / 1e3

    def decode_cost(self, sequences: int) -> DecodeCost:
        line = self._decode(sequences)
        base_ms = (line.a + (line.b + line.c) * sequences) / self._parts + self._overhead_ms
        return DecodeCost(base_ms / 1e3, (line.b / self._parts + self._overhead_token_ms) / 1e3)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        line = self._decode(sequences)
        sequences_ms = ((line.b + line.c) * sequences + line.b * context) / self._parts
        return self.prefill_s(tokens, squares) + (sequences_ms + self._overhead_token_ms * context) / 1e3

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        return uncontended_latency(self, prompt_tokens, output_tokens)

    def _decode(self, sequences: int) -> LatencyCoefficients:
        small = sequences < _LARGE_BATCH
        return self._latency.decode_small if small else self._latency.decode_large


def distserve_published(
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    *,
    engine: str = "distserve",
) -> DistservePublishedModel:
    """Raises ConfigurationError, naming what there is, for a pair or an engine that is not in the table."""
    line = _line(model, machine, tensor_parallel, engine)
    return DistservePublishedModel(line, model, machine, tensor_parallel)


def distserve_pipeline(
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    pipeline_parallel: int,
    *,
    engine: str = "distserve",
) -> Pipeline:
    """The same as a pipeline of so many stages; also raises ConfigurationError for more stages than layers."""
    stage_layers(model, pipeline_parallel)
    line = _line(model, machine, tensor_parallel, engine)
    first, later = (
        DistservePublishedModel(
            line, model, machine, tensor_parallel, stages=pipeline_parallel, first=is_first
        )
        for is_first in (True, False)
    )
    return Pipeline(f"{first.name} PP{pipeline_parallel}", first.error, first, later, pipeline_parallel)


def published_capacity(model: str, tensor_parallel: int, pipeline_parallel: int) -> int | None:
    """Tokens that an instance has room for as the authors measured it; None for what is not in their table."""
    for *degrees, tokens in _latencies().capacity.get(model, ()):
        if degrees == [tensor_parallel, pipeline_parallel]:
            return tokens
    return None


def _line(model: Model, machine: Machine, tensor_parallel: int, engine: str) -> PublishedLatency:
    check_tensor_parallel(machine, tensor_parallel)
    if engine not in ENGINES:
        raise ConfigurationError(f"DistServe published no engine {engine!r}: there is {', '.join(ENGINES)}")
    table = _latencies()
    known = [line for line in table.latency if line.engine == engine]
    accelerator = profile_name(machine)
    wanted = (table.accelerator, model.name, tensor_parallel)
    for line in known:
        if (accelerator, line.model, line.tensor_parallel) == wanted:
            return line
    there = ", ".join(f"{line.model} TP{line.tensor_parallel}" for line in known)
    raise ConfigurationError(
        f"DistServe published nothing of {model.name} on {accelerator} TP{tensor_parallel}: on {table.accelerator} "
        f"there is {there}; the performance models `roofline` and `auto` would estimate it"
    )


@cache
def _latencies() -> PublishedLatencies:
    return msgspec.toml.decode(data_bytes("distserve-published.toml"), type=PublishedLatencies)
