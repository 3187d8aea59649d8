"""Emulated services that start quickly, because they are forked from a process that has already imported Twofold."""

import multiprocessing
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from twofold.bench.services import STOP_S, ServedProcess, free_port, wait_ready

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["support.forked_service", "twofold.cli.serve.run"])


@contextmanager
def forked_service(*flags):
    """Run `twofold serve` with `flags` while the context is open, and yield its URL."""
    with forked_process(*flags) as process:
        yield process.url


@contextmanager
def forked_process(*flags):
    """Run `twofold serve` with `flags` while the context is open, and yield its URL and the pid of its gateway."""
    port = free_port()
    arguments = ["twofold", "serve", "--port", str(port), *map(str, flags)]
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile() as log:
        child = FORKS.Process(target=_main, args=(arguments, log.name))
        child.start()
        try:
            assert wait_ready(SimpleNamespace(poll=lambda: child.exitcode), url), Path(log.name).read_text()
            yield ServedProcess(url, child.pid)
        finally:
            child.terminate()
            child.join(STOP_S)
            child.kill()
            child.join()


def _main(arguments, log):
    from twofold.cli.main import main

    with Path(log).open("ab") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    sys.argv = arguments
    main()
