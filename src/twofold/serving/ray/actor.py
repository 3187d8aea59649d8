"""What runs on a node of the Ray cluster: an actor that keeps the host of one worker in a process of its own.

An actor's process has threads of Ray's, so nothing may be forked from it (the nursery forks): the host is a fresh
interpreter, and ends with the actor.
"""

import subprocess
import sys


class WorkerHost:
    """The actor; `run` lasts as long as the host."""

    def run(self, job: bytes) -> tuple[int, str]:
        """Run the host of a HostJob (as JSON): its exit status, and the sentence that it ended with, if any."""
        command = [sys.executable, "-m", "twofold.serving.ray.host"]
        pipe = subprocess.PIPE
        # Popen forks in C and starts another program at once, which threads do not harm.
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:  # noqa: S603  (ours)
            said, _ = process.communicate(job + b"\n")
        return process.returncode, said.decode(errors="replace").strip()
