"""`twofold plan`: search for the best machines for a workload by simulation, with and without disaggregation."""

from twofold.cli.plan.settings import PlanSettings
from twofold.cli.settings import command


@command
def plan(settings: PlanSettings) -> None:
    """Find the best machines for a workload: how many, of which kind, and whether to disaggregate.

    The results come from simulations, and are shown with the error of the performance model that the simulations use.
    """
    from twofold.cli.plan.run import run  # noqa: PLC0415  (slow to import)

    run(settings)
