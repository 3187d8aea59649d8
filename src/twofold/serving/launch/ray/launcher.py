"""Launcher for Ray clusters, the actor class of its workers, and the inputs of the driver and host processes."""

import subprocess
import sys

import msgspec

from twofold.instance import Role
from twofold.serving.config import EngineConfig
from twofold.serving.launch.launcher import Launcher


class HostJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a worker's host process, which joins the service at `controller` with this one worker.

    `key` is the text of the cluster key file, `model` a directory or hub id, `threads` the number of compute threads.
    """

    controller: str
    key: str
    model: str
    worker: str
    role: Role
    threads: int
    log_format: str


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the Ray driver: all workers of a service on the Ray cluster at `address`.

    Each worker takes a `bundle` of resources. Nodes with equal values of `link_label` share a fast link.
    """

    address: str
    bundle: dict[str, float]
    link_label: str
    engine: EngineConfig
    hosts: tuple[HostJob, ...]


class WorkerHost:
    """Ray actor that runs the host process of one worker.

    The host process is a new interpreter, because a process with Ray's threads must not fork. The host process ends
    with the actor.
    """

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
