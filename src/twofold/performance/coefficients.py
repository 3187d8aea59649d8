"""Coefficients of performance models, and the TOML files that contain them.

A calibration file has one `[[calibration]]` per model, accelerator and tensor parallelism; `twofold calibrate fit`
writes it. TWOFOLD_CALIBRATION names additional files, separated as in PATH, which take precedence over the package's.
These structs are not compiled: mypyc does not support msgspec.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from twofold.errors import ConfigurationError


@cache
def data_bytes(name: str) -> bytes:
    """The content of performance/data/NAME."""
    return files("twofold.performance").joinpath("data", name).read_bytes()


ENVIRONMENT = "TWOFOLD_CALIBRATION"


class MeasuredPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model and the accelerators on which it was measured."""

    model: str
    accelerator: str
    tensor_parallel: int

    @property
    def pair(self) -> str:
        """Display name, such as `bloom-176b on h100-80gb TP8`."""
        return f"{self.model} on {self.accelerator} TP{self.tensor_parallel}"


class PrefillCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds, for the formula in `twofold.performance.fitted`."""

    floor_ms: float
    token_ms: float
    long_token_ms: float
    square_ms: float


class DecodeCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds, for the formula in `twofold.performance.fitted`."""

    base_ms: float
    sequence_ms: float
    large_batch_ms: float
    context_ms: float


class Calibration(MeasuredPair, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one fit. Errors are mean absolute relative errors on held-out configurations.

    The formula extrapolates beyond the measured `max_` values. `decode_power` is the measured share of TDP that
    decode of one sequence draws. `dropped` lists the rows left out of the fit, with reasons.
    """

    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    prefill_error: float | None = None
    decode_error: float | None = None
    max_prefill_tokens: int
    max_prompt_tokens: int
    max_sequences: int
    rows: int
    basis: str
    source: str
    date: str
    decode_power: float | None = None
    dropped: list[str] = []


class CalibrationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    calibration: list[Calibration]


def read_calibrations(path: Path) -> list[Calibration]:
    """Read a calibration file. Raises ConfigurationError if it is missing or malformed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read calibration file {path}: {error.strerror}") from error
    try:
        return msgspec.toml.decode(content, type=CalibrationFile).calibration
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a calibration file of `twofold calibrate fit`: {error}") from error


def calibrations(extra: Sequence[Path] = ()) -> list[Calibration]:
    """All calibrations: from `extra` files, then the environment, then the package."""
    installed = (Path(name) for name in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if name)
    return [*(entry for path in (*extra, *installed) for entry in read_calibrations(path)), *packaged()]


@cache
def packaged() -> list[Calibration]:
    return msgspec.toml.decode(data_bytes("fitted.toml"), type=CalibrationFile).calibration


def to_toml(fits: Sequence[Calibration], heading: str) -> str:
    """Text of a calibration file with `heading` as its first comment."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for fit in fits:
        lines += ["", "[[calibration]]", *_table(msgspec.to_builtins(fit))]
        for part in ("prefill", "decode"):
            lines += [f"[calibration.{part}]", *_table(msgspec.to_builtins(getattr(fit, part)))]
    return "\n".join(lines) + "\n"


def _table(values: dict[str, object]) -> Iterator[str]:
    """Encode TOML lines. Strings, numbers and lists of strings match JSON, except whole floats."""
    for key, value in values.items():
        if value is not None and not isinstance(value, dict):
            yield f"{key} = {value!r}" if isinstance(value, float) else f"{key} = {msgspec.json.encode(value).decode()}"


class PowerLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of an accelerator's TDP, fitted by bench/splitwise/fit_power.py.

    Decode of one sequence draws `decode + memory · (share of memory bandwidth in use)`, and each further sequence
    `sequence` more. Prefill draws TDP from `saturation_tokens` on.
    """

    decode: float
    memory: float
    sequence: float
    saturation_tokens: int
    decode_error: float
    prefill_error: float
    source: str
    date: str


@cache
def power_law() -> PowerLaw:
    """The packaged power law."""
    return msgspec.toml.decode(data_bytes("power.toml"), type=PowerLaw)


class Knots(MeasuredPair, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Medians of one profiled pair: seconds of prompt and token time at each number of batched tokens."""

    tokens: list[int]
    prompt_s: list[float]
    token_s: list[float]


class KnotsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output of bench/splitwise/derive_knots.py."""

    source: str
    date: str
    knots: list[Knots]


@cache
def published_knots() -> KnotsFile:
    """The packaged knots."""
    return msgspec.toml.decode(data_bytes("splitwise-published.toml"), type=KnotsFile)
