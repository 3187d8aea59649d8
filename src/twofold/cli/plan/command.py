"""`twofold plan`: search by simulation for the best machines for a workload, with and without disaggregation."""

from twofold.cli.plan.settings import PlanSettings
from twofold.cli.settings import command


@command
def plan(settings: PlanSettings) -> None:
    """Find the best machines for a workload: how many, of which kind, and whether to disaggregate.

    Plans are simulated. Results are shown with the error of the simulation's performance model.
    """
    from twofold.cli.plan.run import run  # noqa: PLC0415  (slow to import)

    run(settings)
