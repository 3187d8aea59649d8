"""From flags to the controllers of a simulation, and how late they know of the load."""

from typing import NamedTuple

import msgspec

from twofold.cluster.spec import ClusterSpec, ControlSpec
from twofold.errors import ConfigurationError
from twofold.scheduling.cluster.shared import OwnLoad


class ControlFlags(NamedTuple):
    """What was given; None is what the cluster says, or what `ControlSpec` has."""

    controllers: int | None
    reports_every_s: float | None
    report_delay_s: float | None
    own_load: str | None

    def given_to(self, spec: ClusterSpec) -> ClusterSpec:
        """The cluster with these controllers; as it was where no flag was given. Raises ConfigurationError."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        if not given:
            return spec
        if self.own_load is not None:
            if self.own_load not in list(OwnLoad):
                raise ConfigurationError(f"--own-load {self.own_load} is none of {', '.join(OwnLoad)}")
            given["own_load"] = OwnLoad(self.own_load)
        before = spec.control if isinstance(spec.control, ControlSpec) else ControlSpec()
        return msgspec.structs.replace(spec, control=msgspec.structs.replace(before, **given))
