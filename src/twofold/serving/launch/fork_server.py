"""The fork server: a process that loads the model once, and then forks the processes of all workers.

It reads commands from standard input, and writes reports to standard output. It kills all workers when it exits. When
it forks, it must have a single thread and no CUDA context.
"""

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from twofold.errors import UserError
from twofold.serving.config import STORE, ServiceConfig
from twofold.serving.launch import child_process
from twofold.serving.launch.model_source import ModelFacts
from twofold.serving.store.server import run_store
from twofold.serving.telemetry.logs import configure_logs
from twofold.serving.worker.engines import EngineFactory, prepare_engine
from twofold.serving.worker.process import WorkerProcesses, worker_processes

log = logging.getLogger(__name__)

DAEMON_RESTART_S = 0.5  # restart delay of daemons


def main() -> None:
    config, report = child_process.begin(ServiceConfig)
    configure_logs(config.log_format)
    try:
        server = _start_workers(config, report)
    except UserError as error:
        report(child_process.Report(failure=str(error)))
        sys.exit(2)
    server.watch()
    # The process that created the directory may have been killed.
    shutil.rmtree(config.run_dir, ignore_errors=True)
    sys.stderr.flush()
    # A regular exit takes seconds with torch loaded, and the parent waits for this process.
    os._exit(0)


def _start_workers(config: ServiceConfig, report: child_process.SendReport) -> "ForkServer":
    prepared = prepare_engine(config, lambda stage: report(child_process.Report(stage=stage)))
    facts = ModelFacts(prepared.max_model_len, prepared.vocab_size, prepared.model, prepared.device)
    report(child_process.Report(stage="starting workers", facts=facts))
    runs = {spec.instance: partial(worker_processes, config, spec, prepared) for spec in config.workers}
    server = ForkServer(runs, report, config.worker_inbox, _daemons(config, prepared))
    for spec in config.workers:
        server.start(spec.instance)
    return server


def _daemons(config: ServiceConfig, prepared: EngineFactory) -> dict[str, Callable[[], None]]:
    layout = prepared.kv_layout
    if config.store is None or layout is None:
        return {}
    return {STORE: partial(run_store, config, prepared.model, layout)}


def _become_worker(instance: str, server: int, run: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        child_process.die_with_parent(signal.SIGKILL, server)
        child_process.set_title(instance)
        run()
        code = 0
    except UserError as error:
        sys.stderr.write(f"twofold: {instance}: {error}\n")
    except BaseException:
        log.exception("%s failed", instance)
    finally:
        sys.stderr.flush()
        os._exit(code)


class ForkServer(child_process.WorkerStarter):
    """Forks and kills worker processes on command.

    If one process of a worker exits, the remaining processes of the worker are killed. `runs` maps the name of
    a worker to a function that returns the main functions of the worker's processes. `daemons` maps the name of
    a helper process, such as the KV store, to the main function of the helper process.
    """

    poll_s = DAEMON_RESTART_S

    def __init__(
        self,
        runs: Mapping[str, Callable[[], WorkerProcesses]],
        report: child_process.SendReport,
        inbox_of: Callable[[str, int], str],
        daemons: Mapping[str, Callable[[], None]],
    ) -> None:
        super().__init__(report)
        self._daemons = daemons
        self._runs = {name: partial(WorkerProcesses, [run]) for name, run in daemons.items()} | dict(runs)
        self._due_s = dict.fromkeys(daemons, 0.0)  # start times of daemons that do not run
        self._inbox_of = inbox_of
        self._pids: dict[int, str] = {}
        self._codes: dict[str, int] = {}  # exit code of the first process that ended, by worker
        self._pid = os.getpid()
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)  # interrupts the wait for commands

    def start(self, instance: str) -> None:
        """Fork the processes of a worker."""
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
        """Send SIGKILL to all processes of a worker."""
        for pid, name in self._pids.items():
            if name == instance:
                os.kill(pid, signal.SIGKILL)

    def execute(self, command: child_process.WorkerCommand) -> None:
        if command.kill is not None:
            self.kill(command.kill)
        if command.start is not None:
            self.start(command.start)

    def poll(self) -> bool:
        self._reap()
        now = time.monotonic()
        for name in [name for name, due_s in self._due_s.items() if now >= due_s]:
            del self._due_s[name]
            self.start(name)
        return not set(self._pids.values()) <= set(self._daemons)

    def kill_all(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)

    def _reap(self) -> None:
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            instance = self._pids.pop(pid)
            # A killed process leaves its socket file behind.
            Path(self._inbox_of(instance, pid).removeprefix("ipc://")).unlink(missing_ok=True)
            self._codes.setdefault(instance, os.waitstatus_to_exitcode(status))
            if instance in self._pids.values():
                self.kill(instance)  # the other ranks cannot continue alone
            elif instance in self._daemons:
                log.error("%s ended with code %d: restarting it", instance, self._codes.pop(instance))
                self._due_s[instance] = time.monotonic() + DAEMON_RESTART_S
            else:
                self._report(child_process.Report(exited=instance, code=self._codes.pop(instance)))


if __name__ == "__main__":
    main()
