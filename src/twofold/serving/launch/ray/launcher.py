"""What the processes of the Ray launcher are told when they start.

What runs on a node of the Ray cluster: an actor that keeps the host of one worker in a process of its own.

An actor's process has threads of Ray's, so nothing may be forked from it (the nursery forks): the host is a fresh
interpreter, and ends with the actor.

The launcher `ray`: starts the process that speaks to Ray, as the local one starts the nursery.
"""

import subprocess
import sys

import msgspec

from twofold.instance import Role
from twofold.serving.config import EngineConfig
from twofold.serving.launch.launcher import Launcher


class HostJob(msgspec.Struct, frozen=True, kw_only=True):
    """The host of one worker: where the service takes it, and what it brings.

    `key` is the text of the file with the cluster key, `model` a directory or a hub id as the operator wrote it, and
    `threads` how many it computes on.
    """

    controller: str
    key: str
    model: str
    worker: str
    role: Role
    threads: int
    log_format: str


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """All workers of a service on the Ray cluster at `address`.

    Each takes a `bundle` of resources. Nodes with the same value of the label `link_label` are near each other.
    """

    address: str
    bundle: dict[str, float]
    link_label: str
    engine: EngineConfig
    hosts: tuple[HostJob, ...]


class WorkerHost:
    """The actor; `run` lasts as long as the host."""

    def run(self, job: bytes) -> tuple[int, str]:
        """Run the host of a HostJob (as JSON): its exit status, and the sentence that it ended with, if any."""
        command = [sys.executable, "-m", "twofold.serving.launch.ray.host"]
        pipe = subprocess.PIPE
        # Popen forks in C and starts another program at once, which threads do not harm.
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:  # noqa: S603  (ours)
            said, _ = process.communicate(job + b"\n")
        return process.returncode, said.decode(errors="replace").strip()


class RayLauncher(Launcher):
    """Workers on the nodes of a Ray cluster, each on a host of its own that joins the service."""

    joins = True

    def __init__(self, job: RayJob) -> None:
        super().__init__("twofold.serving.launch.ray.driver", job)
