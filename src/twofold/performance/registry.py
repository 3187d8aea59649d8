"""The performance models by name: one line each."""

from collections.abc import Callable

from twofold.errors import ConfigurationError
from twofold.hardware.machine import Machine
from twofold.hardware.model import Model
from twofold.performance.base import PerformanceModel
from twofold.performance.distserve_published import distserve_published
from twofold.performance.fitted import fitted, is_fitted
from twofold.performance.roofline import roofline
from twofold.performance.splitwise_published import splitwise_published

Factory = Callable[[Model, Machine, int], PerformanceModel]


def auto(model: Model, machine: Machine, tensor_parallel: int) -> PerformanceModel:
    """Fitted where the pair was measured, else the roofline, whose error says `estimated`."""
    measured = is_fitted(model, machine, tensor_parallel)
    return (fitted if measured else roofline)(model, machine, tensor_parallel)


PERFORMANCE_MODELS: dict[str, Factory] = {
    "auto": auto,
    "fitted": fitted,
    "roofline": roofline,
    "splitwise-published": splitwise_published,
    "distserve-published": distserve_published,
}


def performance_model(name: str, model: Model, machine: Machine, tensor_parallel: int) -> PerformanceModel:
    """The times and power of `model` on `tensor_parallel` accelerators of `machine`.

    Raises ConfigurationError for a name that is not there, for a machine with fewer accelerators, and for a
    pair that the named model knows nothing of.
    """
    factory = PERFORMANCE_MODELS.get(name)
    if factory is None:
        raise ConfigurationError(
            f"there is no performance model {name!r}: there is {', '.join(PERFORMANCE_MODELS)}"
        )
    return factory(model, machine, tensor_parallel)
