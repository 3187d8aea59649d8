"""The nursery: one process that prepares the engine once, and forks every worker from there.

It reads a ServiceConfig and then orders (see `Order`) from its standard input and reports on its standard output
(see `Report`), one JSON object a line. It ends, and its workers with it, when told to (SIGTERM), when its
standard input closes, or when the process that started it dies, however that happens.

Preparing may take long (torch is imported and a model loaded) and is shared by all workers. Before a fork there
must be no other threads and no CUDA context.
"""

import ctypes
import logging
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from twofold.errors import UserError
from twofold.serving.config import STORE, ServiceConfig
from twofold.serving.launch.child_process import CommandPipe, Report, die_with_parent, read_line, take_stdout
from twofold.serving.store.server import run_store
from twofold.serving.telemetry.logs import configure_logs
from twofold.serving.worker.engines import ENGINES, EngineFactory
from twofold.serving.worker.process import WorkerProcesses, worker_processes

log = logging.getLogger(__name__)

KEEP_S = 0.5  # from the end of a process that is kept to its next start


def main() -> None:
    die_with_parent(signal.SIGTERM, os.getppid())
    say = take_stdout()
    config = msgspec.json.decode(read_line(sys.stdin.fileno()), type=ServiceConfig)
    configure_logs(config.log_format)

    def report(entry: Report) -> None:
        say(msgspec.json.encode(entry))

    try:
        nursery = _raise_workers(config, report)
    except UserError as error:
        report(Report(failure=str(error)))
        sys.exit(2)
    nursery.watch()
    # Nobody else can, if the process that made it was killed.
    shutil.rmtree(config.run_dir, ignore_errors=True)
    sys.stderr.flush()
    # An interpreter with torch in it takes seconds to end in good order, and somebody waits for us.
    os._exit(0)


Reporter = Callable[[Report], None]


def _raise_workers(config: ServiceConfig, report: Reporter) -> "ForkServer":
    """Prepare the engine and fork the workers."""
    prepared = ENGINES[config.engine.engine](config, lambda stage: report(Report(stage=stage)))
    facts = Report(
        stage="starting workers",
        max_model_len=prepared.max_model_len,
        vocab_size=prepared.vocab_size,
        model=prepared.model,
    )
    report(facts)
    runs = {spec.instance: partial(worker_processes, config, spec, prepared) for spec in config.workers}
    nursery = ForkServer(runs, report, config.worker_inbox, _kept(config, prepared))
    for spec in config.workers:
        nursery.start(spec.instance)
    return nursery


def _kept(config: ServiceConfig, prepared: EngineFactory) -> dict[str, Callable[[], None]]:
    """What runs beside the workers, as long as there are any."""
    layout = prepared.kv_layout
    if config.store is None or layout is None:
        return {}
    return {STORE: partial(run_store, config, prepared.model, layout)}


def _become_worker(instance: str, nursery: int, run: Callable[[], None]) -> NoReturn:
    """What a forked child does instead of returning."""
    code = 1
    try:
        die_with_parent(signal.SIGKILL, nursery)
        _set_title(instance)
        run()
        code = 0
    except UserError as error:
        sys.stderr.write(f"twofold: {instance}: {error}\n")
    except BaseException:
        log.exception("%s failed", instance)
    finally:
        sys.stderr.flush()
        os._exit(code)


class ForkServer:
    """Forks workers, and ends them when told to; `runs` makes what each of them does, `inbox_of` names its socket.

    A worker may have several processes. When one of them ends all are ended, and when all have, the worker has. Those
    that are `kept` are started by themselves, also again when they end, which is nobody else's business.
    """

    def __init__(
        self,
        runs: Mapping[str, Callable[[], WorkerProcesses]],
        report: Reporter,
        inbox_of: Callable[[str, int], str],
        kept: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self._kept = kept or {}
        self._runs = {name: partial(_alone, run) for name, run in self._kept.items()} | dict(runs)
        self._due_s = dict.fromkeys(self._kept, 0.0)  # when those that are kept and do not run may be started
        self._report = report
        self._inbox_of = inbox_of
        self._pids: dict[int, str] = {}
        self._codes: dict[str, int] = {}  # of workers that are ending: that of their first process to end
        self._pid = os.getpid()
        self._ending = self._finishing = False
        self._orders = CommandPipe()

    def start(self, instance: str) -> None:
        """Fork a worker, with all of its ranks."""
        processes = self._runs[instance]()
        for rank, run in enumerate(processes.runs):
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                _become_worker(f"{instance}.{rank}" if rank else instance, self._pid, run)
            self._pids[pid] = instance
        processes.forked()

    def kill(self, instance: str) -> None:
        """End a worker by force, also one that is stopped; it is reported like any that ends."""
        for pid, name in self._pids.items():
            if name == instance:
                os.kill(pid, signal.SIGKILL)

    def watch(self) -> None:
        """Report workers that end and do as ordered, until told to end them all."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        with selectors.DefaultSelector() as selector:
            selector.register(wake_read, selectors.EVENT_READ)
            selector.register(self._orders, selectors.EVENT_READ)
            while not self._over():
                self._keep()
                for key, _ in selector.select(timeout=KEEP_S):
                    if key.fd == wake_read:
                        os.read(wake_read, 4096)
                    else:
                        self._read_orders()
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)

    def _over(self) -> bool:
        self._reap()
        return self._ending or (self._finishing and not set(self._pids.values()) - set(self._kept))

    def _keep(self) -> None:
        now = time.monotonic()
        for name in [name for name, due_s in self._due_s.items() if now >= due_s]:
            del self._due_s[name]
            self.start(name)

    def _end(self, _signal: int, _frame: object) -> None:
        self._ending = True

    def _reap(self) -> None:
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            instance = self._pids.pop(pid)
            # A process that is killed leaves its socket's file, also where nobody has heard of it yet.
            Path(self._inbox_of(instance, pid).removeprefix("ipc://")).unlink(missing_ok=True)
            self._codes.setdefault(instance, os.waitstatus_to_exitcode(status))
            if instance in self._pids.values():
                self.kill(instance)  # the ranks that are left can do nothing without it
            elif instance in self._kept:
                log.error("%s ended with code %d: it is started again", instance, self._codes.pop(instance))
                self._due_s[instance] = time.monotonic() + KEEP_S
            else:
                self._report(Report(exited=instance, code=self._codes.pop(instance)))

    def _read_orders(self) -> None:
        for order in self._orders.read():
            self._finishing = self._finishing or order.finish
            if order.kill is not None:
                self.kill(order.kill)
            if order.start is not None:
                self.start(order.start)
        self._ending = self._ending or self._orders.ended


def _alone(run: Callable[[], None]) -> WorkerProcesses:
    return WorkerProcesses([run], lambda: None)


def _set_title(name: str) -> None:
    """The name that `ps` and `top` show for this process (15 characters at most)."""
    pr_set_name = 15
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_name, name.encode()[:15], 0, 0, 0)


if __name__ == "__main__":
    main()
