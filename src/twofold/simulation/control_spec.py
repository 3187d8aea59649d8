"""What a cluster's description says of those who route: how many there are, and how late they know of the load."""

import msgspec

from twofold.errors import ConfigurationError
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, FORECASTING_ROUTERS
from twofold.scheduling.shared_cluster import OwnLoad

MOST_CONTROLLERS = 10_000
_MOST_SECONDS = 1e6
CONTROL_ROUTERS = tuple(name for name in FIXED_ROLE_ROUTERS if name not in FORECASTING_ROUTERS)


class ControlSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`controllers` that requests are dealt among; each routes by what is reported to it and by its own requests.

    Every instance, or with a router of cells every cell, says what it has `reports_every_s` seconds after it last did,
    if that is something else by then; at once with 0. It is heard `report_delay_s` later. `own_load` is what a
    controller knows of its own requests meanwhile. Raises ConfigurationError for what cannot be.
    """

    controllers: int = 1
    reports_every_s: float = 0.2
    report_delay_s: float = 0.0
    own_load: OwnLoad = OwnLoad.FOLLOWED

    def __post_init__(self) -> None:
        if not 1 <= self.controllers <= MOST_CONTROLLERS:
            raise ConfigurationError(
                f"controllers must be from 1 to {MOST_CONTROLLERS}, not {self.controllers}"
            )
        for field in ("reports_every_s", "report_delay_s"):
            seconds = getattr(self, field)
            if not 0.0 <= seconds <= _MOST_SECONDS:
                raise ConfigurationError(f"{field} cannot be {seconds}: it is in seconds, and 0 is at once")


def check_control(router: str) -> None:
    """Raise ConfigurationError where a router cannot go by reports."""
    if router not in CONTROL_ROUTERS:
        raise ConfigurationError(
            f"the router {router} does not go by reports: several controllers, and reports that are late, are for the "
            f"routers {', '.join(CONTROL_ROUTERS)}"
        )
