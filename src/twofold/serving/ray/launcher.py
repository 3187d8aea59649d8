"""The launcher `ray`: starts the process that speaks to Ray, as the local one starts the nursery."""

from twofold.serving.launcher import Launcher
from twofold.serving.ray.job import RayJob


class RayLauncher(Launcher):
    """Workers on the nodes of a Ray cluster, each on a host of its own that joins the service."""

    joins = True

    def __init__(self, job: RayJob) -> None:
        super().__init__("twofold.serving.ray.driver", job)
