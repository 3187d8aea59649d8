"""A service process that belongs to a single test, so that the test may break it."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

from twofold.bench.services import free_port, wait_ready

ROUTE = ("-m", "twofold.cli.main", "route")  # alternative `program`


@contextmanager
def running_service(model, *flags, port=None, program=("-m", "twofold.cli.main", "serve"), log=os.devnull):
    """Run `twofold serve` or another program, with its log in the file `log`; yield the process and the URL."""
    port = free_port() if port is None else port
    given = [] if model is None else [str(model)]
    command = [sys.executable, *program, *given, *flags, "--port", str(port)]
    with Path(log).open("ab") as stderr:  # the process has its own descriptor
        process = subprocess.Popen(command, stderr=stderr)
    try:
        assert wait_ready(process, f"http://127.0.0.1:{port}")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def ended(processes, tries=6000):
    """Wait until all processes have ended; return False on timeout."""
    for _ in range(tries):
        if not any(_running(process) for process in processes):
            return True
        time.sleep(0.1)
    return False


def _running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children(process):
    """Return the fork server and the workers of a service."""
    return psutil.Process(process.pid).children(recursive=True)


def named(process, pattern):
    """Return a process's running descendants with names that match the regex `pattern`."""
    return [child for child in children(process) if re.fullmatch(pattern, _name(child)) and _running(child)]


def _name(process):
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
