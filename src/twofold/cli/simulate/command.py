"""`twofold simulate`: run a workload on a simulated cluster and report latency, throughput, energy and cost."""

from twofold.cli.settings import command
from twofold.cli.simulate.settings import SimulateSettings


@command
def simulate(settings: SimulateSettings) -> None:
    """Simulate a workload on a cluster: latency, throughput, energy, cost and SLO attainment.

    Times are predicted by a performance model. Results that depend on that model are shown with its error.
    """
    from twofold.cli.simulate.run import run  # noqa: PLC0415  (slow to import)

    run(settings)
