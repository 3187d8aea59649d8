"""A service with a prefill worker, and a second host with a decode worker that joins the service."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from support.flags import ENGINE
from support.running_service import named
from twofold.bench.services import free_port, stop, wait_ready
from twofold.errors import ConfigurationError
from twofold.security.key import write_key

TWOFOLD = [sys.executable, "-m", "twofold.cli.main"]


class JoinedService:
    """A service and the hosts that join it."""

    def __init__(self, model, folder, hosts=None):
        self.model, self.folder, self.hosts = model, Path(folder), hosts
        self.addresses = ("127.0.0.1", "127.0.0.1") if hosts is None else hosts.addresses
        self.key = self.folder / "cluster.key"
        write_key(self.key)
        self.port, self.url = None, None
        self.controller = f"tcp://{self.addresses[0]}:{free_port()}"
        self.processes = []

    def serve(self, *flags, engine=ENGINE, program=None):
        """Start the service and return the process, without waiting for the service to be ready."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        listen = ["--listen-workers", self.controller, "--cluster-key", str(self.key)]
        command = [*TWOFOLD, "serve"] if program is None else [sys.executable, str(program)]
        command += [str(self.model), *engine, *flags, *listen, "--port", str(self.port)]
        self.service = self._start(0, command, "serve.log")
        return self.service

    def join(self, *flags, model=None, key=None, log="join.log", name="other"):
        """Start `twofold join` with `flags` and return its process."""
        address = ["--name", name, "--address", self.addresses[1]]
        command = [*TWOFOLD, "join", self.controller, "--cluster-key", str(key or self.key)]
        return self._start(1, [*command, "--model", str(model or self.model), *address, *flags], log)

    def wait(self):
        try:
            ready = wait_ready(self.service, self.url)
        except ConfigurationError as error:
            raise AssertionError(f"{error}: {self._all_logged()}") from error
        assert ready, self._all_logged()

    def wait_logged(self, log, text, after=0, tries=6000):
        """Wait until `text` is in a log file."""
        for _ in range(tries):
            if text in self.logged(log)[after:]:
                return
            time.sleep(0.1)
        raise AssertionError(f"{text!r} is not in the log: {self.logged(log)}")

    def logged(self, log):
        return (self.folder / log).read_text()

    def _all_logged(self):
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def close(self):
        for process in reversed(self.processes):
            stop(process)

    def _start(self, host, command, log):
        with (self.folder / log).open("w") as said:
            env = dict(os.environ)
            if self.hosts is not None:
                command = self.hosts.command(host, command)
                # UCX would otherwise detect a single host and bypass the link.
                env |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": self.hosts.devices[host]}
            process = subprocess.Popen(command, env=env, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
        # Workers use all cores of their host; two emulated hosts on one machine need separate cores.
        os.sched_setaffinity(process.pid, {sorted(os.sched_getaffinity(0))[-host]})
        self.processes.append(process)
        return process


@contextmanager
def joined_service(model, folder, *flags, there=("--decode", "1"), hosts=None, program=None):
    """Run a service that another host joins; yield when it is ready."""
    running = JoinedService(model, folder, hosts)
    try:
        running.serve(*flags, program=program)
        running.host = running.join(*there)
        running.wait()
        yield running
    finally:
        running.close()


def worker(process, name):
    """Return the descendant process of `process` that runs the worker `name`."""
    return named(process, f"{re.escape(name)}.*")[0]
