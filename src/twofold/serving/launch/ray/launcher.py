"""Launcher for Ray clusters, the actor class of its workers, and the inputs of the driver and host processes."""

import subprocess
import sys

import msgspec

from twofold.instance import Role
from twofold.serving.config import EngineConfig
from twofold.serving.launch.launcher import Launcher


class HostJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a worker's host process: the service's address, the text of the cluster key file, and the worker."""

    controller: str
    key: str
    model: str
    worker: str
    role: Role
    threads: int
    log_format: str


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the Ray driver: all workers of a service. Each worker takes a `bundle` of resources. Nodes with the same
    value of the label `link_label` share a fast network.
    """

    address: str
    bundle: dict[str, float]
    link_label: str
    engine: EngineConfig
    hosts: tuple[HostJob, ...]


class WorkerHost:
    """Ray actor that runs the host process of one worker in a new interpreter, which, unlike the actor, may fork."""

    def run(self, job: bytes) -> tuple[int, str]:
        """Run the host process of a HostJob (as JSON) until its end; return its exit status and last message."""
        command = [sys.executable, "-m", "twofold.serving.launch.ray.host"]
        pipe = subprocess.PIPE
        # Popen forks and executes in C, which is safe beside other threads.
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:  # noqa: S603  (our own module)
            output, _ = process.communicate(job + b"\n")
        return process.returncode, output.decode(errors="replace").strip()


class RayLauncher(Launcher):
    """Launcher of workers on a Ray cluster. Each worker runs in its own host process, which joins the service."""

    joins = True

    def __init__(self, job: RayJob) -> None:
        super().__init__("twofold.serving.launch.ray.driver", job)
