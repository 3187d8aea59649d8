"""`twofold simulate`: run a workload on a simulated cluster and report latency, throughput, energy and cost."""

from twofold.cli.settings import command
from twofold.cli.simulate.settings import SimulateSettings


@command
def simulate(settings: SimulateSettings) -> None:
    """Simulate a workload on a cluster: latency, throughput, energy, cost and SLO attainment.

    Times come from a performance model; figures that depend on it are shown with the error of that model.
    """
    from twofold.cli.simulate.run import run  # noqa: PLC0415  (slow to import)

    run(settings)
