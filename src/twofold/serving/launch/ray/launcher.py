"""Launcher of workers on a Ray cluster."""

import subprocess
import sys

import msgspec

from twofold.instance import Role
from twofold.serving.config import EngineConfig
from twofold.serving.launch.launcher import Launcher


class HostJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the process that runs one worker of the service on a Ray node."""

    controller: str
    key: str
    model: str
    worker: str
    role: Role
    threads: int
    log_format: str


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the Ray driver. `bundle` maps resource names to the amounts that each worker needs."""

    address: str
    bundle: dict[str, float]
    link_label: str  # nodes with the same value of this label share a fast network
    engine: EngineConfig
    hosts: tuple[HostJob, ...]


class WorkerHost:
    """Ray actor that runs a child process, in which one worker of the service runs."""

    def run(self, job: bytes) -> tuple[int, str]:
        """Run a child process with the input `job` (a HostJob in JSON); return its exit status and its output."""
        command = [sys.executable, "-m", "twofold.serving.launch.ray.host"]
        pipe = subprocess.PIPE
        # Unlike the actor, a new interpreter may fork. Popen forks in C, which is safe beside other threads.
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:  # noqa: S603  (our own module)
            output, _ = process.communicate(job + b"\n")
        return process.returncode, output.decode(errors="replace").strip()


class RayLauncher(Launcher):
    """Launcher of workers on a Ray cluster."""

    joins = True

    def __init__(self, job: RayJob) -> None:
        super().__init__("twofold.serving.launch.ray.driver", job)
