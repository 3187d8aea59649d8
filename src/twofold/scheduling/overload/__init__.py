"""Overload rules by name: one file and one line each."""

from collections.abc import Callable

from twofold.errors import ConfigurationError
from twofold.scheduling.overload.baseline import Baseline
from twofold.scheduling.overload.early import Early
from twofold.scheduling.overload.none import Never
from twofold.scheduling.overload.predicted import Predicted
from twofold.scheduling.overload.rule import Overload

NONE = "none"

OVERLOADS: dict[str, Callable[[], Overload]] = {
    NONE: Never,
    "baseline": Baseline,
    "early": Early,
    "predicted": Predicted,
}


def create_overload(name: str) -> Overload:
    """Raises ConfigurationError for a name that is not there."""
    if name not in OVERLOADS:
        raise ConfigurationError(f"there is no overload rule {name!r}: there are {', '.join(OVERLOADS)}")
    return OVERLOADS[name]()
