"""Routers that side_by_side.py measures: how each is started, and the CPU time that it takes."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from twofold.bench.services import free_port

sys.path.append(str(Path(__file__).parents[1] / "vllm"))
from compared import TWOFOLD

HERE = "127.0.0.1"
MODEL_NAME = "mock"
KEY = "a-key-of-the-benchmark"
CLUSTER = """
model: llama2-70b
router: jsq
pools:
  - {machines: 4, machine: dgx-h100, role: prefill}
  - {machines: 4, machine: dgx-h100, role: decode}
"""


@dataclass(frozen=True, slots=True)
class Behind:
    """URLs of the mock servers behind a router: one for both phases, or a prefill and a decode server."""

    urls: tuple[str, ...]

    @property
    def split(self) -> bool:
        return len(self.urls) > 1


@dataclass(frozen=True, slots=True)
class MeasuredRouter:
    """A router. `command` returns its command line from Python, model directory, servers and port."""

    package: str | None  # on PyPI, for a router with an environment of its own
    splits: bool  # whether it can route to prefill and decode servers of vLLM
    command: Callable[[Path, Path, Behind, int], list[str]]


def twofold_route(python: Path, model: Path, behind: Behind, port: int) -> list[str]:
    """Return the command of `twofold route` with an API key, a deadline, and metrics of an SLO."""
    flags = ["--model", str(model), "--served-model-name", MODEL_NAME, "--api-key", KEY]
    flags += ["--request-timeout", "300", "--slo", "ttft=2,tpot=0.1", "--port", str(port)]
    phases = ("--prefill", "--decode") if behind.split else ("--colocated",)
    flags += [text for phase, url in zip(phases, behind.urls, strict=True) for text in (phase, url)]
    return [str(python), *TWOFOLD[1:], "route", *flags]


def bare_proxy(python: Path, _model: Path, behind: Behind, port: int) -> list[str]:
    """Return the command of the proxy that forwards texts and does nothing else."""
    return [str(python), str(Path(__file__).parent / "bare_proxy.py"), "--port", str(port), "--server", *behind.urls]


def vllm_router(python: Path, _model: Path, behind: Behind, port: int) -> list[str]:
    """Return the command of vllm-router with its defaults, but its cheapest policy and no line per request."""
    command = [str(python), "-m", "vllm_router.launch_router", *_rust_flags(port, "warning")]
    if behind.split:
        prefill, decode = behind.urls
        return [*command, "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
    return [*command, "--worker-urls", *behind.urls]


def sglang_router(python: Path, _model: Path, behind: Behind, port: int) -> list[str]:
    """Return the command of sglang-router with the same settings as vllm-router."""
    return [str(python), "-m", "sglang_router.launch_router", *_rust_flags(port, "warn"), "--worker-urls", *behind.urls]


def _rust_flags(port: int, log_level: str) -> list[str]:
    flags = ["--host", HERE, "--port", str(port), "--prometheus-port", str(free_port())]
    return [*flags, "--policy", "round_robin", "--log-level", log_level]


ROUTERS = {
    "twofold route": MeasuredRouter(None, splits=True, command=twofold_route),
    "bare proxy": MeasuredRouter(None, splits=False, command=bare_proxy),
    "vllm-router": MeasuredRouter("vllm_router", splits=True, command=vllm_router),
    "sglang-router": MeasuredRouter("sglang_router", splits=False, command=sglang_router),
}


def emulated_service(model: Path, folder: Path, port: int, *more: str) -> list[str]:
    """Return the command of `twofold serve` with emulated workers and the flags `more`. Writes a file to `folder`."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(CLUSTER)
    flags = ["--engine", "emulated", "--cluster", str(cluster), "--tokenizer", str(model), "--max-model-len", "4096"]
    return [*TWOFOLD, "serve", *flags, "--served-model-name", MODEL_NAME, "--port", str(port), *more]


def release(environment: Path, package: str) -> str | None:
    """Return the version of a package in a virtual environment, or None if it is not installed there."""
    found = sorted(environment.glob(f"lib/python3*/site-packages/{package}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else None


def cpu_s(pid: int, *, tree: bool) -> float:
    """Return the CPU seconds of a process so far, and with `tree` also those of its children."""
    process = psutil.Process(pid)
    seconds = 0.0
    for each in [process, *(process.children(recursive=True) if tree else [])]:
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            seconds += times.user + times.system
    return seconds


def pin(pid: int, core: int, children_cores: Sequence[int]) -> None:
    """Pin all threads of a process to one core, and those of its children to others."""
    process = psutil.Process(pid)
    for each in process.children(recursive=True):
        _pin_threads(each.pid, children_cores)
    _pin_threads(pid, [core])


def _pin_threads(pid: int, cores: Sequence[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
