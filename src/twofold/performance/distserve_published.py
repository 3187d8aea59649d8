"""Latency model of DistServe's simulator, for reproducing the paper's figures.

An iteration runs either prompts of lengths l, or B decodes with known context lengths. In a pipeline of PP
stages, each stage takes, in milliseconds,

    prefill = (a + b·Σl + c·Σl²) / PP + PP
    decode  = (a + b·Σ(context + 1) + c·B) / PP

Each formula has its own published coefficients a, b and c. The first stage takes 2 + 1e-4·Σl milliseconds
more in prefill, and 2 + 1e-4·Σcontext milliseconds more in decode.
"""

from functools import cache

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.specs import Machine, Model
from twofold.performance.base import PerformanceModel
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
from twofold.performance.power import instance_power

ENGINES = ("distserve", "vllm")
_LARGE_BATCH = 95
_OVERHEAD_MS, _OVERHEAD_TOKEN_MS = 2.0, 1e-4


class LatencyCoefficients(msgspec.Struct, frozen=True, array_like=True):
    """Coefficients a, b and c of the prefill formula or of the decode formula, in milliseconds."""

    a: float
    b: float
    c: float


class PublishedLatency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of DistServe's prefill and decode time formulas for an LLM, engine and tensor-parallel degree."""

    engine: str
    model: str
    tensor_parallel: int
    prefill: LatencyCoefficients
    decode_small: LatencyCoefficients
    decode_large: LatencyCoefficients  # for 95 or more sequences


class PublishedLatencies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of performance/data/distserve-published.toml: coefficients of latency formulas, and KV capacities."""

    accelerator: str
    source: str
    date: str
    latency: list[PublishedLatency]
    capacity: dict[str, list[tuple[int, int, int]]]


class DistservePublishedModel(PerformanceModel):
    """Performance model of one pipeline stage, with coefficients published by DistServe."""

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
            prefill=None, decode=None, basis=f"the latency model of DistServe's simulator for {latency.engine}"
        )
        self._latency, self._parts = latency, stages  # sending activations takes no time
        self._overhead_ms = _OVERHEAD_MS if first else 0.0
        self._overhead_token_ms = _OVERHEAD_TOKEN_MS if first else 0.0
        used = memory_share(model, machine, tensor_parallel, self.decode_cost(1).base_s * stages)
        self.power = instance_power(machine, tensor_parallel, memory_share=used)

    def prefill_s(self, tokens: int, squares: int) -> float:
        line = self._latency.prefill
        stage_ms = (line.a + line.b * tokens + line.c * squares) / self._parts + self._parts
        return (stage_ms + self._overhead_ms + self._overhead_token_ms * tokens) / 1e3

    def decode_cost(self, sequences: int) -> DecodeCost:
        line = self._decode(sequences)
        base_ms = (line.a + (line.b + line.c) * sequences) / self._parts + self._overhead_ms
        return DecodeCost(base_ms / 1e3, (line.b / self._parts + self._overhead_token_ms) / 1e3)

    # DistServe's simulator has no mixed iterations. Here, one takes the prefill time plus the decode time without the
    # coefficient a and the 2 ms.
    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        line = self._decode(sequences)
        sequences_ms = ((line.b + line.c) * sequences + line.b * context) / self._parts
        return self.prefill_s(tokens, squares) + (sequences_ms + self._overhead_token_ms * context) / 1e3

    def _decode(self, sequences: int) -> LatencyCoefficients:
        small = sequences < _LARGE_BATCH
        return self._latency.decode_small if small else self._latency.decode_large


def distserve_published(
    model: Model, machine: Machine, tensor_parallel: int, *, engine: str = "distserve"
) -> DistservePublishedModel:
    """Return the latency model that DistServe's simulator uses.

    Raises ConfigurationError if no coefficients are published for the given LLM, machine, tensor-parallel
    degree and engine.
    """
    line = _line(model, machine, tensor_parallel, engine)
    return DistservePublishedModel(line, model, machine, tensor_parallel)


def distserve_pipeline(
    model: Model, machine: Machine, tensor_parallel: int, pipeline_parallel: int, *, engine: str = "distserve"
) -> Pipeline:
    """Return DistServe's latency model of a pipeline. Raises ConfigurationError without published coefficients."""
    stage_layers(model, pipeline_parallel)
    line = _line(model, machine, tensor_parallel, engine)
    first, later = (
        DistservePublishedModel(line, model, machine, tensor_parallel, stages=pipeline_parallel, first=is_first)
        for is_first in (True, False)
    )
    return Pipeline(f"{first.name} PP{pipeline_parallel}", first.error, first, later, pipeline_parallel)


def published_capacity(model: str, tensor_parallel: int, pipeline_parallel: int) -> int | None:
    """Return the KV capacity in tokens that DistServe's authors measured, or None if it is unpublished."""
    for *degrees, tokens in _latencies().capacity.get(model, ()):
        if degrees == [tensor_parallel, pipeline_parallel]:
            return tokens
    return None


def _line(model: Model, machine: Machine, tensor_parallel: int, engine: str) -> PublishedLatency:
    check_tensor_parallel(machine, tensor_parallel)
    if engine not in ENGINES:
        raise ConfigurationError(f"unknown DistServe engine {engine!r}: choose one of {', '.join(ENGINES)}")
    table = _latencies()
    known = [line for line in table.latency if line.engine == engine]
    accelerator = profile_name(machine)
    wanted = (table.accelerator, model.name, tensor_parallel)
    for line in known:
        if (accelerator, line.model, line.tensor_parallel) == wanted:
            return line
    there = ", ".join(f"{line.model} TP{line.tensor_parallel}" for line in known)
    raise ConfigurationError(
        f"no published latency of {model.name} on {accelerator} TP{tensor_parallel}, only on {table.accelerator} of "
        f"{there}: use `roofline` or `auto` for an estimate"
    )


@cache
def _latencies() -> PublishedLatencies:
    return msgspec.toml.decode(data_bytes("distserve-published.toml"), type=PublishedLatencies)
