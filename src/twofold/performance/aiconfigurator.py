"""Performance model from measured times of operators: those of PyPI's `aiconfigurator-core` (NVIDIA, Apache-2.0).

The package has times of matrix products, attention, expert layers and communication, measured on GPUs with the
kernels of vLLM, SGLang and TensorRT-LLM. It sums them to the time of an iteration of a model with a certain
parallelism. This module tabulates the sums, because a simulation needs millions of iterations. With n prompt tokens
of attention work S (see `PerformanceModel.prefill_s`), and b decodes that read C tokens of KV cache,

    prefill(n, S)      = linear(n) + attention(√S)
    decode(b, C)       = base(b) + slope(b)·C
    mixed(n, S, b, C)  = linear(n + b) + attention(√S) + read(b) + slope(b)·C

linear(n) is the time of all operators except attention for n tokens, attention(n) the attention of one prompt of n
tokens, and read(b) + slope(b)·C the attention of the decodes. `EngineModel` adds what an engine spends outside these
operators, by constants that bench/silicon/compare.py fits to measured deployments.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import msgspec

from twofold.errors import ConfigurationError, require
from twofold.hardware.specs import Machine, Model
from twofold.performance.base import PerformanceModel
from twofold.performance.coefficients import data_bytes
from twofold.performance.cost import DecodeCost, ModelAccuracy
from twofold.performance.instance import check_tensor_parallel, instance_name, memory_share
from twofold.performance.power import instance_power

EXTRA: Final = "aiconfigurator"  # extra of this package that installs the measured times
BACKENDS: Final = ("vllm", "sglang", "trtllm")
_PLAIN: Final = "bfloat16"
_DENSE: Final = 8192  # arguments up to which a curve has a value for each integer
_LONGEST: Final = 131_072  # tokens
_MOST: Final = 1024  # decodes of a batch
_PER_OCTAVE: Final = 4
_CONTEXTS: Final = (256, 8192)  # tokens of each decode, between which the time is linear


class EngineConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of an engine's iterations outside the measured operators."""

    operators: float = 1.0  # factor of the measured operators, some of which overlap
    step_s: float = 0.0  # of an iteration
    sequence_s: float = 0.0  # of each sequence in an iteration


class CatalogNames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of aiconfigurator.toml: names of the catalog in aiconfigurator-core; constants and errors of engines."""

    systems: dict[str, str]  # by accelerator
    models: dict[str, str]
    engines: dict[str, EngineConstants]
    decode_errors: dict[str, float]  # median relative error of TPOT, by engine


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: a model on a system, with its software and its parallelism.

    With attention data parallelism, each rank has its own requests, and all ranks share the experts.
    """

    model: str  # Hugging Face id
    system: str  # such as h200_sxm
    backend: str  # one of BACKENDS
    version: str | None = None  # of the backend; None: the package's current one
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    attention_data_parallel: int = 1
    expert_tensor_parallel: int | None = None  # None: as attention, without expert parallelism
    expert_parallel: int = 1
    gemm: str | None = None  # quantization; None: that of the checkpoint
    experts: str | None = None  # quantization of experts; None: that of the checkpoint
    attention: str | None = None  # of attention and KV; None: that of the checkpoint, or else bfloat16
    draft_tokens: int = 0  # of each iteration, from multi-token prediction

    @property
    def spread(self) -> str:
        """Suffix of the parallelism, such as `-EP8`, or nothing without expert parallelism."""
        return f"-EP{self.expert_parallel}" if self.expert_parallel > 1 else ""


class Curve:
    """Piecewise linear function of a number of tokens or sequences, through measured points."""

    def __init__(self, points: Sequence[int], values: Sequence[float]) -> None:
        """Both sequences are in ascending order of points; the first point is 0 or 1."""
        self._points, self._values = list(points), list(values)
        self._dense = [self._at(x) for x in range(min(_DENSE, points[-1]) + 1)]

    def __call__(self, x: int) -> float:
        """Return the value at `x`; beyond the last point, the last slope continues."""
        return self._dense[x] if x < len(self._dense) else self._at(x)

    def _at(self, x: int) -> float:
        points, values = self._points, self._values
        high = min(max(bisect_right(points, x), 1), len(points) - 1)
        low = high - 1
        share = (x - points[low]) / (points[high] - points[low])
        return values[low] + share * (values[high] - values[low])


class OperatorTables:
    """Times of one engine in seconds, as the functions of this module's formulas."""

    def __init__(self, layout: EngineLayout, engine: Any = None) -> None:  # noqa: ANN401  (the package has no types)
        """Compute the tables: about two seconds. `engine`: the package's engine, if it is compiled already.

        Raises ConfigurationError if times of the engine are missing.
        """
        self._engine = engine or _compile(layout)
        self.estimated: set[str] = set()  # how times were estimated that were not measured
        try:
            self._tabulate()
        except (RuntimeError, ValueError, KeyError) as error:
            raise _unsupported(layout, error) from error
        self.version = layout.version or _version(layout.system, layout.backend) or "unknown"

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self.linear_s(tokens) + self.attention_s(round(squares**0.5))

    def decode_cost(self, sequences: int) -> DecodeCost:
        return DecodeCost(self.base_s(sequences), self.slope_s(sequences))

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        decodes_s = self.read_s(sequences) + self.slope_s(sequences) * context
        return self.linear_s(tokens + sequences) + self.attention_s(round(squares**0.5)) + decodes_s

    def _tabulate(self) -> None:
        lengths, batches = list(_steps(_LONGEST)), list(_steps(_MOST))
        prefills = [self._prefill(tokens) for tokens in lengths]
        self.linear_s = Curve(lengths, [linear for linear, _ in prefills])
        self.attention_s = Curve([0, *lengths], [0.0, *(attention for _, attention in prefills)])
        whole = [[self._decode(batch, context) for context in _CONTEXTS] for batch in batches]
        reads = [[self._read(batch, context) for context in _CONTEXTS] for batch in batches]
        tokens = _CONTEXTS[1] - _CONTEXTS[0]
        slopes = [max(0.0, (far - near) / (batch * tokens)) for (near, far), batch in zip(whole, batches, strict=True)]
        self.slope_s = Curve(batches, slopes)
        self.base_s = Curve(batches, list(_bases(whole, batches, slopes)))
        self.read_s = Curve(batches, list(_bases(reads, batches, slopes)))

    def _prefill(self, tokens: int) -> tuple[float, float]:
        """Return the seconds of a prompt of `tokens` tokens, without attention and of attention."""
        # The breakdown includes one decode, so only its share of attention is used.
        _, linear, attention, _ = self._engine.mixed_step_breakdown(tokens, 1, tokens, 2)
        whole_s = self._whole(1, tokens)
        share = attention / (linear + attention)
        return whole_s * (1.0 - share), whole_s * share

    def _whole(self, prompts: int, tokens: int) -> float:
        return self._seconds(self._engine.predict_prefill_latency(prompts, tokens))

    def _decode(self, batch: int, context: int) -> float:
        return self._seconds(self._engine.predict_decode_latency(batch, context))

    def _read(self, batch: int, context: int) -> float:
        return self._seconds(self._engine.mixed_step_breakdown(64, batch, context, 2)[3])

    def _seconds(self, milliseconds: float) -> float:
        found = self._engine.last_provenance()
        if found is not None:
            self.estimated.add(found)
        return milliseconds / 1e3


def _steps(most: int) -> Iterator[int]:
    """Yield 1 to 4, and then a few integers in each octave up to `most`."""
    octave = 1
    while octave < most:
        step = max(1, octave // _PER_OCTAVE)
        yield from range(octave, 2 * octave, step)
        octave *= 2
    yield most


def _bases(rows: Sequence[Sequence[float]], batches: Sequence[int], slopes: Sequence[float]) -> Iterator[float]:
    for times, batch, slope in zip(rows, batches, slopes, strict=True):
        yield max(0.0, times[0] - slope * batch * _CONTEXTS[0])


def _compile(layout: EngineLayout) -> Any:  # noqa: ANN401  (the package has no types)
    """Return the package's engine. Raises ConfigurationError if times of the engine are missing."""
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle  # noqa: PLC0415  (an extra, and slow to import)
    except ImportError as error:
        raise _missing() from error
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    experts = layout.expert_tensor_parallel
    if experts is None:
        experts = layout.tensor_parallel * layout.attention_data_parallel // layout.expert_parallel
    failures: list[Exception] = []
    for attention in dict.fromkeys((layout.attention, layout.attention or _PLAIN)):
        try:
            engine = EngineHandle.compile(
                layout.model,
                layout.system,
                layout.backend,
                backend_version=layout.version,
                tp_size=layout.tensor_parallel,
                pp_size=layout.pipeline_parallel,
                attention_dp_size=layout.attention_data_parallel,
                moe_tp_size=experts,
                moe_ep_size=layout.expert_parallel,
                gemm_quant_mode=layout.gemm,
                moe_quant_mode=layout.experts,
                fmha_quant_mode=attention,
                kvcache_quant_mode=attention,
                nextn=layout.draft_tokens,
            )
            engine.predict_prefill_latency(1, 1)
            engine.predict_decode_latency(1, 1)
        except Exception as error:  # noqa: BLE001  (the package raises many types)
            failures.append(error)
        else:
            return engine
    raise _unsupported(layout, failures[0]) from failures[0]


def _unsupported(layout: EngineLayout, error: Exception) -> ConfigurationError:
    reason = str(error).partition("\n")[0]
    return ConfigurationError(
        f"aiconfigurator-core has no times of {layout.model} on {layout.system} with {layout.backend} "
        f"TP{layout.tensor_parallel}{layout.spread}: {reason}"
    )


def measured_versions() -> dict[str, dict[str, str | None]]:
    """Return the versions of the serving engines with measured operators, by accelerator and engine.

    Raises ConfigurationError if `aiconfigurator-core` is not installed.
    """
    return {
        accelerator: {backend: _version(system, backend) for backend in BACKENDS}
        for accelerator, system in catalog_names().systems.items()
    }


def _version(system: str, backend: str) -> str | None:
    try:
        from aiconfigurator_core.sdk.perf_database import get_version_slots  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise _missing() from error
    slots = get_version_slots(system, backend) or {}
    return slots.get("current")


def _missing() -> ConfigurationError:
    return ConfigurationError(
        f"the performance model {EXTRA} needs measured operator times: pip install twofold[{EXTRA}]"
    )


class EngineModel(PerformanceModel):
    """Iteration times of one engine, from tables of operator times and constants of the engine."""

    def __init__(self, tables: OperatorTables, constants: EngineConstants) -> None:
        self._tables, self._constants = tables, constants
        self._decode_costs = [self._decode_cost(sequences) for sequences in range(_MOST + 1)]

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self._constants.operators * self._tables.prefill_s(tokens, squares) + self._constants.step_s

    def decode_cost(self, sequences: int) -> DecodeCost:
        return self._decode_costs[sequences] if sequences <= _MOST else self._decode_cost(sequences)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        seconds = self._constants.operators * self._tables.mixed_s(tokens, squares, sequences, context)
        return seconds + self._constants.step_s + self._constants.sequence_s * sequences

    def _decode_cost(self, sequences: int) -> DecodeCost:
        cost, constants = self._tables.decode_cost(sequences), self._constants
        base_s = constants.operators * cost.base_s + constants.step_s + constants.sequence_s * sequences
        return DecodeCost(base_s, constants.operators * cost.context_s)


class OperatorModel(EngineModel):
    """Performance model of one instance, with the fitted constants of its engine."""

    def __init__(self, tables: OperatorTables, layout: EngineLayout, model: Model, machine: Machine) -> None:
        self.name = instance_name(f"{EXTRA} {layout.backend}", model, machine, layout.tensor_parallel) + layout.spread
        basis = f"operators of {layout.backend} {tables.version}, measured on {layout.system}"
        if tables.estimated:
            basis += f", some estimated ({', '.join(sorted(tables.estimated))})"
        names = catalog_names()
        super().__init__(tables, names.engines[layout.backend])
        self.error = ModelAccuracy(prefill=None, decode=names.decode_errors[layout.backend], basis=basis)
        used = memory_share(model, machine, layout.tensor_parallel, self.decode_cost(1).base_s)
        self.power = instance_power(machine, layout.tensor_parallel, memory_share=used)


@cache
def operator_tables(layout: EngineLayout) -> OperatorTables:
    """Return the tables of an engine. Raises ConfigurationError if times of the engine are missing."""
    return OperatorTables(layout)


def aiconfigurator(
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    backend: str = BACKENDS[0],
    expert_parallel: int | None = None,  # accelerators that share the experts, each with whole experts
) -> OperatorModel:
    """Return the performance model from measured operator times, of vLLM unless `backend` is another engine.

    With more accelerators for the experts than for the attention, it is the model of one of several instances that
    share the experts and have equal loads (attention data parallelism).

    Raises ConfigurationError if `aiconfigurator-core` is not installed, or has no times of the LLM or the machine.
    """
    check_tensor_parallel(machine, tensor_parallel)
    require(expert_parallel is None or model.expert_parameters > 0, f"{model.name} has no experts")
    layout = EngineLayout(
        model=_known("model", model.name, catalog_names().models),
        system=_known("accelerator", machine.accelerator.name, catalog_names().systems),
        backend=backend,
        tensor_parallel=tensor_parallel,
        attention_data_parallel=(expert_parallel or tensor_parallel) // tensor_parallel,
        expert_parallel=expert_parallel or 1,
    )
    return OperatorModel(operator_tables(layout), layout, model, machine)


def _known(kind: str, name: str, names: dict[str, str]) -> str:
    require(name in names, f"aiconfigurator-core has no times of {kind} {name}, only of {', '.join(names)}")
    return names[name]


@cache
def catalog_names() -> CatalogNames:
    """Return the names of the catalog's accelerators and models in aiconfigurator-core."""
    return msgspec.toml.decode(data_bytes("aiconfigurator.toml"), type=CatalogNames)
