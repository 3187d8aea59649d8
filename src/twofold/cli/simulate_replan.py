"""The flags of `twofold simulate --replan`, and the re-planning that they describe."""

import msgspec
from msgspec.structs import replace

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.planning.splits import SplitPlanner
from twofold.scheduling.replanning import Replanner, Rules
from twofold.scheduling.traffic import TrafficWatch
from twofold.simulation.cluster_file import MOST_SECONDS
from twofold.simulation.kinds import kinds_of
from twofold.simulation.replanning import Replanning
from twofold.simulation.spec import ClusterSpec
from twofold.slo import Slo, SlowdownSlo


class Replan(msgspec.Struct, frozen=True, kw_only=True):
    """`spare` machines may be started besides those of the cluster, and all may be retired if there are any.

    A search takes `search_s` simulated seconds, and an instance `start_up_s` to start; for the others see `Rules`.
    """

    spare: int
    search_s: float
    start_up_s: float
    min_gain: float
    min_between_s: float

    def require_sensible(self) -> None:
        """Raise ConfigurationError for numbers that cannot be."""
        for flag, value in (
            ("--search-time", self.search_s),
            ("--start-up-time", self.start_up_s),
            ("--min-between", self.min_between_s),
        ):
            if not 0.0 <= value <= MOST_SECONDS:
                raise ConfigurationError(
                    f"{flag} {value:g} cannot be: give seconds from 0 to {MOST_SECONDS:g}"
                )
        if not 0.0 <= self.min_gain <= 1.0:
            raise ConfigurationError(f"--min-gain {self.min_gain:g} is no share: give one from 0 to 1")

    def with_spare(self, spec: ClusterSpec) -> ClusterSpec:
        """The cluster with its spare machines, which come last."""
        if not self.spare:
            return spec
        spare = replace(spec.pools[0], machines=self.spare, role=Role.DECODE)
        return replace(spec, pools=(*spec.pools, spare))

    def of(
        self, spec: ClusterSpec, catalog: Catalog, slo: Slo | SlowdownSlo | None, attainment: float
    ) -> Replanning:
        """The re-planning of `spec`, spare machines and all; raises ConfigurationError where there can be none."""
        if not isinstance(slo, Slo):
            raise ConfigurationError(
                "--replan needs an SLO in seconds to aim at: give --slo, as in ttft=2,tpot=0.1"
            )
        rules = Rules(min_gain=self.min_gain, min_between_s=self.min_between_s, start_up_s=self.start_up_s)
        planner = SplitPlanner(spec, catalog, slo, attainment=attainment, replicas=self.spare > 0)
        spare = kinds_of(spec, catalog)[-1].instances if self.spare else 0
        return Replanning(Replanner(TrafficWatch(), rules), planner, search_s=self.search_s, spare=spare)
