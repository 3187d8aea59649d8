"""The flags of `twofold simulate --replan`, and the re-planning that they describe."""

import msgspec
from msgspec.structs import replace

from twofold.cluster.file import MAX_SECONDS
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.planning.splits import SplitPlanner
from twofold.scheduling.replan.replanner import Replanner, ReplanRules
from twofold.scheduling.replan.traffic import TrafficMonitor
from twofold.simulation.replanning import SimulatedReplanning
from twofold.slo import Slo, SlowdownSlo


class Replan(msgspec.Struct, frozen=True, kw_only=True):
    """`spare` machines may be started besides those of the cluster, and all may be retired if there are any.

    A search takes `search_s` simulated seconds, and an instance `start_up_s` to start; for the others see
    `ReplanRules`.
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
            if not 0.0 <= value <= MAX_SECONDS:
                raise ConfigurationError(
                    f"{flag} {value:g} cannot be: give seconds from 0 to {MAX_SECONDS:g}"
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
    ) -> SimulatedReplanning:
        """The re-planning of `spec`, spare machines and all; raises ConfigurationError where there can be none."""
        if not isinstance(slo, Slo):
            raise ConfigurationError(
                "--replan needs an SLO in seconds to aim at: give --slo, as in ttft=2,tpot=0.1"
            )
        rules = ReplanRules(
            min_gain=self.min_gain, min_between_s=self.min_between_s, start_up_s=self.start_up_s
        )
        planner = SplitPlanner(spec, catalog, slo, attainment=attainment, replicas=self.spare > 0)
        spare = instance_profiles(spec, catalog)[-1].instances if self.spare else 0
        return SimulatedReplanning(
            Replanner(TrafficMonitor(), rules), planner, search_s=self.search_s, spare=spare
        )
