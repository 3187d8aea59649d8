"""`twofold doctor`: show what this machine has for Twofold, what is missing, and what to run."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from twofold import __version__
from twofold.cli.options import JSON
from twofold.cli.settings import Settings, command
from twofold.engine.registry import package_version
from twofold.reporting.output import JsonReport, table
from twofold.serving.launch.memory_plan import available_memory
from twofold.simulation import kernel

_EXTRAS: Final = {
    "vllm": ("vllm", "--engine vllm"),
    "nixl": ("nixl-cu12", "--transport nixl"),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "--transport mooncake"),
    "ray": ("ray", "--launcher ray"),
    "aiconfigurator": ("aiconfigurator-core", "--performance aiconfigurator"),
    "otel": ("opentelemetry-sdk", "--otlp-endpoint"),
}


class DoctorSettings(Settings):
    """All flags of `twofold doctor`."""

    json: bool = JSON.field(False)


class DoctorFinding(msgspec.Struct, frozen=True):
    """State of one part of the machine or installation, and what to do about it (empty: nothing)."""

    part: str
    found: str
    advice: str = ""


class DoctorReport(JsonReport, frozen=True, kw_only=True):
    """JSON report of `twofold doctor`."""

    findings: list[DoctorFinding]
    run: list[str]


@command
def doctor(settings: DoctorSettings) -> None:
    """Show what this machine has, what is missing, and what to run."""
    gpus = _gpus()
    extras = (_package(name, f"pip install 'twofold[{extra}]', for {use}") for extra, (name, use) in _EXTRAS.items())
    findings = [*_machine(), *_engine(gpus), *extras]
    report = DoctorReport(findings=findings, run=next_commands())
    if settings.json:
        typer.echo(report.json())
        return
    shown = table(None, ("", "found", "to do"))
    for each in report.findings:
        shown.add_row(each.part, escape(each.found), escape(each.advice))
    Console().print(shown)
    typer.echo("Run:")
    for line in report.run:
        typer.echo(f"  {line}")


def _machine() -> Iterator[DoctorFinding]:
    pure = str(kernel.__file__).endswith(".py")
    yield DoctorFinding("Twofold", f"{__version__}, Python {platform.python_version()}")
    advice = "make compile, in a checkout: several times as fast" if pure else ""
    yield DoctorFinding("simulator", "pure Python" if pure else "compiled", advice)
    cores, memory = len(os.sched_getaffinity(0)), available_memory() / 2**30
    yield DoctorFinding("host", f"{cores} cores, {memory:.1f} GiB available")


def _gpus() -> list[str]:
    """Return the name and memory of each GPU that torch can use."""
    if find_spec("torch") is None:
        return []
    import torch  # noqa: PLC0415  (slow to import)

    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in found]


def _engine(gpus: list[str]) -> Iterator[DoctorFinding]:
    yield _package("torch", "pip install 'twofold[serve]', to serve models")
    hidden = package_version("torch") is not None and not gpus and shutil.which("nvidia-smi") is not None
    advice = "install a torch for CUDA: this one finds no GPU, and nvidia-smi is there" if hidden else ""
    yield DoctorFinding("GPUs", "; ".join(gpus) or "none: workers run on the CPU", advice)


def _package(name: str, advice: str) -> DoctorFinding:
    found = package_version(name)
    return DoctorFinding(name, found or "not installed", "" if found else advice)


def next_commands() -> list[str]:
    """Return commands to try next on this machine."""
    plan = "twofold plan azure-conv --model llama-3.1-8b --machines h100 --max-machines 1 --slo ttft=1s,tpot=50ms"
    if package_version("torch") is None:
        return [plan]
    return ["twofold serve $(twofold model get smollm2) --prefill 1 --decode 1", "twofold chat", plan]
