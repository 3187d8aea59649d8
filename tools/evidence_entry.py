"""Entries of the evidence: a claim, the benchmark that shows it, and the figures of its result."""

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from twofold.bench.real_data import data_folder

ROOT = Path(__file__).parent.parent
Value = int | float | str
VLLM = ".venv-vllm/bin/python"
WHEEL = ".venv-wheel/bin/python"
# Commands that install the interpreters of other environments.
_INSTALLS = {VLLM: "`make test-vllm` installs it", WHEEL: "`make wheel-venv` installs the compiled wheel there"}


class Figure(msgspec.Struct, frozen=True):
    """A figure as measured: a number in `unit`, a count (int), or a text."""

    value: Value
    unit: str = ""

    def __str__(self) -> str:
        """Return the figure with three significant digits, or two below one. Counts and texts are complete."""
        if isinstance(self.value, str):
            return self.value
        if self.unit == "s":
            return _seconds(self.value)
        if self.unit == "%":
            return f"{_digits(100 * self.value)}%"
        number = f"{self.value:,}" if isinstance(self.value, int) else _digits(self.value)
        return f"{number}{'' if self.unit in {'', '×'} else ' '}{self.unit}"


def times(value: float) -> Figure:
    return Figure(float(value), "×")


def share(value: float) -> Figure:
    return Figure(float(value), "%")


def seconds(value: float) -> Figure:
    return Figure(float(value), "s")


def rate(value: float) -> Figure:
    return Figure(float(value), "requests/s")


Figures = dict[str, Figure]
Need = Callable[[], str | None]  # returns why an entry cannot run here, or None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A claim and the command that shows it.

    `command` is a line for bash, run in the root of the repository; `--json FILE` is added to it, or `--json` alone if
    it prints its JSON (`stdout`). `read` gets the decoded JSON, or the printed text if `text`, and returns the figures
    by name. `summary` has the figures in braces. `page` explains the results, relative to docs/. `minutes` is the
    usual time on two cores.
    """

    name: str
    claim: str
    command: str
    summary: str
    page: str
    read: Callable[[Any], Figures]
    minutes: float = 1.0
    form: str = ""  # if the command is a short form, the complete one
    stdout: bool = False
    text: bool = False
    needs: tuple[Need, ...] = ()
    packages: tuple[str, ...] = ("torch", "transformers")

    @property
    def python(self) -> str:
        """The interpreter of another environment that the command begins with, or an empty string."""
        first = self.command.split()[0]
        return first if first in _INSTALLS else ""

    def missing(self) -> str | None:
        """Return the first unmet need as a sentence, or None."""
        needs = (*self.needs, file(self.python, _INSTALLS[self.python])) if self.python else self.needs
        return next((reason for need in needs if (reason := need()) is not None), None)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    cores: int
    memory_gib: int | None = None
    os: str = ""

    def __str__(self) -> str:
        memory = f", {self.memory_gib} GiB" if self.memory_gib is not None else ""
        return f"{self.cores} cores of {self.cpu}{memory}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an entry's last run. `load` is the load average when the run began, in processes."""

    command: str
    date: str
    machine: Machine
    versions: dict[str, str]
    figures: Figures
    seconds: float | None = None
    load: float | None = None
    note: str = ""


Records = Mapping[str, Record]


def data(relative: str) -> Need:
    """Need a file or folder of the public data."""
    known = "`make data` downloads it, or TWOFOLD_DATA names its folder"
    return lambda: None if (data_folder() / relative).exists() else f"{relative} is absent: {known}"


def module(name: str, install: str) -> Need:
    return lambda: None if importlib.util.find_spec(name) else f"the package {name} is absent: {install}"


def file(path: str, get: str) -> Need:
    """Need a file. Its path may have environment variables."""
    return lambda: None if (ROOT / os.path.expandvars(path)).exists() else f"{path} is absent: {get}"


def program(name: str, get: str) -> Need:
    return lambda: None if shutil.which(name) else f"{name} is absent: {get}"


def root() -> str | None:
    return None if os.geteuid() == 0 else "it creates network namespaces, which needs root"


def _digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    magnitude = math.floor(math.log10(abs(value)))
    places = max(0, (2 if magnitude >= 0 else 1) - magnitude)
    return f"{value:,.{places}f}".replace("-", "−")


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(value) * scale >= 1:
            return f"{_digits(value * scale)} {unit}"
    return f"{_digits(value)} s"
