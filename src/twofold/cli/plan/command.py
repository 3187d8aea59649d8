"""`twofold plan`: search for the best machines for a workload by simulation, with and without disaggregation."""

from twofold.cli.plan.settings import PlanSettings
from twofold.cli.settings import command


@command
def plan(settings: PlanSettings) -> None:
    """Find the best machines for a workload: how many, of which kind, and whether to disaggregate.

    Every answer comes from simulations, and is shown with the error of their performance model.
    """
    from twofold.cli.plan.run import run  # noqa: PLC0415  (slow to import)

    run(settings)
