"""Registry of performance models by name."""

from collections.abc import Callable
from functools import partial

from twofold.errors import ConfigurationError, require
from twofold.hardware.specs import Machine, Model
from twofold.performance.aiconfigurator import aiconfigurator
from twofold.performance.base import PerformanceModel
from twofold.performance.distserve_published import distserve_pipeline, distserve_published
from twofold.performance.fitted import fitted, is_fitted
from twofold.performance.instance import by_layers, check_expert_parallel
from twofold.performance.roofline import roofline
from twofold.performance.splitwise_published import splitwise_published

Factory = Callable[[Model, Machine, int], PerformanceModel]


def auto(model: Model, machine: Machine, tensor_parallel: int) -> PerformanceModel:
    """Return the fitted performance model if this LLM was measured on these accelerators, else a roofline estimate."""
    measured = is_fitted(model, machine, tensor_parallel)
    return (fitted if measured else roofline)(model, machine, tensor_parallel)


def aiconfigurator_sglang(model: Model, machine: Machine, tensor_parallel: int) -> PerformanceModel:
    """Return the performance model from measured operator times of SGLang."""
    return aiconfigurator(model, machine, tensor_parallel, backend="sglang")


def aiconfigurator_trtllm(model: Model, machine: Machine, tensor_parallel: int) -> PerformanceModel:
    """Return the performance model from measured operator times of TensorRT-LLM."""
    return aiconfigurator(model, machine, tensor_parallel, backend="trtllm")


def distserve_published_vllm(model: Model, machine: Machine, tensor_parallel: int) -> PerformanceModel:
    """Return DistServe's performance model of vLLM."""
    # Only for LLMs that DistServe published, on A100-80GB.
    return distserve_published(model, machine, tensor_parallel, engine="vllm")


PERFORMANCE_MODELS: dict[str, Factory] = {
    "auto": auto,
    "fitted": fitted,
    "roofline": roofline,
    "aiconfigurator": aiconfigurator,
    "aiconfigurator-sglang": aiconfigurator_sglang,
    "aiconfigurator-trtllm": aiconfigurator_trtllm,
    "splitwise-published": splitwise_published,
    "distserve-published": distserve_published,
    "distserve-published-vllm": distserve_published_vllm,
}

# Models of instances with expert parallelism, and their engines.
EXPERT_PARALLEL = {"aiconfigurator": "vllm", "aiconfigurator-sglang": "sglang", "aiconfigurator-trtllm": "trtllm"}

PipelineFactory = Callable[[Model, Machine, int, int], PerformanceModel]

# Models published with their own pipelines, or (None) without any. All others divide their times by layers.
_PIPELINES: dict[str, PipelineFactory | None] = {
    "splitwise-published": None,
    "distserve-published": distserve_pipeline,
    "distserve-published-vllm": partial(distserve_pipeline, engine="vllm"),
}


def performance_model(
    name: str,
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    pipeline_parallel: int = 1,
    expert_parallel: int | None = None,
    *,
    boundary_bytes_per_s: float | None = None,  # of activations between stages
) -> PerformanceModel:
    """Create the performance model named `name`. Raises ConfigurationError for an unsupported configuration."""
    factory = PERFORMANCE_MODELS.get(name)
    if factory is None:
        raise ConfigurationError(f"unknown performance model {name!r}: choose one of {', '.join(PERFORMANCE_MODELS)}")
    if expert_parallel is not None:
        known = ", ".join(EXPERT_PARALLEL)
        require(name in EXPERT_PARALLEL, f"{name} has no times of expert parallelism: use one of {known}")
        check_expert_parallel(machine, tensor_parallel, expert_parallel, pipeline_parallel)
        return aiconfigurator(model, machine, tensor_parallel, EXPERT_PARALLEL[name], expert_parallel)
    if pipeline_parallel == 1:
        return factory(model, machine, tensor_parallel)
    if name not in _PIPELINES:
        whole = factory(model, machine, tensor_parallel)
        return by_layers(whole, model, machine, tensor_parallel, pipeline_parallel, boundary_bytes_per_s)
    published = _PIPELINES[name]
    if published is None:
        raise ConfigurationError(
            f"{name} does not support pipelines: use pipeline parallelism 1 or another performance model"
        )
    return published(model, machine, tensor_parallel, pipeline_parallel)
