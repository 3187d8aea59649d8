"""The nursery: one process that imports torch and loads the model once, and forks every worker from there.

It reads a ServiceConfig as one line of JSON from its standard input and reports on its standard output, one
JSON object a line (see `Report`). It ends, and its workers with it, when told to (SIGTERM), when its
standard input closes, or when the process that started it dies, however that happens.

Before a fork there must be no other threads and no CUDA context: the model is loaded with a single thread
and onto the CPU, and workers move it to their device.
"""

import ctypes
import logging
import os
import selectors
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import msgspec

from twofold.errors import ConfigurationError, UserError
from twofold.serving.config import EngineConfig, ServiceConfig
from twofold.serving.logs import configure_logs
from twofold.serving.reports import Report

PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with_parent(signal.SIGTERM, os.getppid())
    report = _take_stdout()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServiceConfig)
    configure_logs(config.log_format)
    try:
        workers = _raise_workers(config, report)
    except UserError as error:
        report(Report(failure=str(error)))
        sys.exit(2)
    _watch(workers, report)
    # Nobody else can, if the process that made it was killed.
    shutil.rmtree(config.run_dir, ignore_errors=True)


Reporter = Callable[[Report], None]


def _take_stdout() -> Reporter:
    """Keep the standard output for reports; whatever else is printed here or in a worker goes to stderr."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(entry: Report) -> None:
        pipe.write(msgspec.json.encode(entry) + b"\n")

    return report


def _raise_workers(config: ServiceConfig, report: Reporter) -> dict[int, str]:
    """Load the model and fork the workers; returns instance ids by pid."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # our own stages say what happens
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # no OpenMP pool may exist when workers are forked
    report(Report(stage="importing torch"))
    import torch  # noqa: PLC0415  (slow, and reported as a stage of its own)

    torch.set_num_threads(1)
    from twofold.engine.torch.loader import load_model  # noqa: PLC0415
    from twofold.serving.memory_plan import available_memory, plan_memory  # noqa: PLC0415

    check_device(config.engine.device)
    report(Report(stage="loading the model"))
    model = load_model(config.engine.model, dtype=config.engine.dtype)
    plan = plan_memory(
        model.layout(config.engine.block_size),
        kv_cache_bytes=config.engine.kv_cache_bytes,
        max_model_len=_context_length(config.engine, model.max_model_len),
        workers=len(config.workers),
        available_bytes=available_memory(),
    )
    report(Report(stage="starting workers", max_model_len=plan.max_model_len, vocab_size=model.vocab_size))
    from twofold.serving.worker.process import run_worker  # noqa: PLC0415

    workers: dict[int, str] = {}
    nursery = os.getpid()
    for spec in config.workers:
        pid = os.fork()
        if pid == 0:
            _become_worker(spec.instance, nursery, partial(run_worker, config, spec, model, plan))
        workers[pid] = spec.instance
    return workers


def check_device(name: str) -> None:
    """Refuse a device that this torch cannot have, without touching any: workers are yet to be forked."""
    import torch  # noqa: PLC0415

    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ConfigurationError(f"--device {name!r} is unknown: write cpu, cuda or cuda:N") from error
    if kind not in {"cpu", "cuda"}:
        raise ConfigurationError(f"--device {name!r} is not supported: write cpu, cuda or cuda:N")
    if kind == "cuda" and torch.version.cuda is None:
        raise ConfigurationError(
            f"--device {name!r} needs a torch with CUDA, and {torch.__version__} has none"
        )


def _context_length(engine: EngineConfig, model_len: int) -> int:
    if engine.max_model_len is None:
        return model_len
    if engine.max_model_len > model_len:
        raise ConfigurationError(
            f"--max-model-len {engine.max_model_len:,} is more than the model's {model_len:,}"
        )
    return engine.max_model_len


def _become_worker(instance: str, nursery: int, run: Callable[[], None]) -> NoReturn:
    """What a forked child does instead of returning."""
    code = 1
    try:
        _die_with_parent(signal.SIGKILL, nursery)
        _set_title(instance)
        run()
        code = 0
    except UserError as error:
        sys.stderr.write(f"twofold: {instance}: {error}\n")
    except BaseException:
        logging.getLogger(__name__).exception("%s failed", instance)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch(workers: dict[int, str], report: Reporter) -> None:
    """Report workers that end, until told to end them all."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    ending = False

    def end(_signal: int, _frame: object) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
    with selectors.DefaultSelector() as selector:
        selector.register(wake_read, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while workers and not ending:
            _reap(workers, report)
            for key, _ in selector.select(timeout=1.0):
                if key.fd == wake_read:
                    os.read(wake_read, 4096)
                else:
                    ending = ending or not sys.stdin.buffer.readline()
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    for pid in workers:
        os.waitpid(pid, 0)


def _reap(workers: dict[int, str], report: Reporter) -> None:
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        report(Report(exited=workers.pop(pid), code=os.waitstatus_to_exitcode(status)))


def _die_with_parent(with_signal: signal.Signals, parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)


def _set_title(name: str) -> None:
    """The name that `ps` and `top` show for this process (15 characters at most)."""
    pr_set_name = 15
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_name, name.encode()[:15], 0, 0, 0)


if __name__ == "__main__":
    main()
