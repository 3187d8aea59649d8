"""Overload rules by name: one file and one line each."""

from collections.abc import Callable

from twofold.errors import ConfigurationError
from twofold.scheduling.admission.overload import (
    BaselineRejection,
    EarlyRejection,
    NeverReject,
    OverloadRule,
    PredictedRejection,
)

NONE = "none"

OVERLOADS: dict[str, Callable[[], OverloadRule]] = {
    NONE: NeverReject,
    "baseline": BaselineRejection,
    "early": EarlyRejection,
    "predicted": PredictedRejection,
}


def create_overload(name: str) -> OverloadRule:
    """Raises ConfigurationError for a name that is not there."""
    if name not in OVERLOADS:
        raise ConfigurationError(f"there is no overload rule {name!r}: there are {', '.join(OVERLOADS)}")
    return OVERLOADS[name]()
