"""Twofold plans, simulates and serves LLMs in two phases, prefill and decode, on separate pools."""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["PlanResult", "Simulation", "Slo", "Trace", "UserError", "__version__", "plan", "simulate"]


def __getattr__(name: str) -> object:
    """Import the Python API on first use; `__init__.pyi` has its types."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("twofold.api"), name)


def __dir__() -> list[str]:
    return __all__
