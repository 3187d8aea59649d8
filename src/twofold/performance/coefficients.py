"""Coefficients of performance models, and the TOML files that store them.

A calibration file, written by `twofold calibrate fit`, has one `[[calibration]]` per model, accelerator and tensor
parallelism. TWOFOLD_CALIBRATION names additional files, separated as in PATH; they take precedence over the package's
calibrations. mypyc does not compile this module, because it does not support msgspec.
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
    """Read the package's data file performance/data/NAME."""
    return files("twofold.performance").joinpath("data", name).read_bytes()


ENVIRONMENT = "TWOFOLD_CALIBRATION"


class MeasuredPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of measured data: names the model, the accelerator and the tensor parallelism."""

    model: str
    accelerator: str
    tensor_parallel: int

    @property
    def pair(self) -> str:
        """Display name, such as `bloom-176b on h100-80gb TP8`."""
        return f"{self.model} on {self.accelerator} TP{self.tensor_parallel}"


class PrefillCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of the prefill formula in `twofold.performance.fitted`, in milliseconds."""

    floor_ms: float
    token_ms: float
    long_token_ms: float
    square_ms: float


class DecodeCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of the decode formula in `twofold.performance.fitted`, in milliseconds."""

    base_ms: float
    sequence_ms: float
    large_batch_ms: float
    context_ms: float


class Calibration(MeasuredPair, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted coefficients of one model on one accelerator, with their errors and origin.

    Errors are mean absolute relative errors on held-out configurations. Predictions beyond the `max_` values
    extrapolate the measurements. `decode_power` is the measured share of TDP that decode of one sequence draws.
    `dropped` lists the measurements excluded from the fit, with reasons.
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
    """Return all calibrations in order of precedence: `extra` files, TWOFOLD_CALIBRATION, then the package."""
    installed = (Path(name) for name in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if name)
    return [*(entry for path in (*extra, *installed) for entry in read_calibrations(path)), *packaged()]


@cache
def packaged() -> list[Calibration]:
    return msgspec.toml.decode(data_bytes("fitted.toml"), type=CalibrationFile).calibration


def to_toml(fits: Sequence[Calibration], heading: str) -> str:
    """Format calibrations as the text of a calibration file that starts with `heading` as a comment."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for fit in fits:
        lines += ["", "[[calibration]]", *_table(msgspec.to_builtins(fit))]
        for part in ("prefill", "decode"):
            lines += [f"[calibration.{part}]", *_table(msgspec.to_builtins(getattr(fit, part)))]
    return "\n".join(lines) + "\n"


def _table(values: dict[str, object]) -> Iterator[str]:
    """Yield a TOML line for each value that is not a table. Floats are formatted with repr, other values as JSON."""
    for key, value in values.items():
        if value is not None and not isinstance(value, dict):
            yield f"{key} = {value!r}" if isinstance(value, float) else f"{key} = {msgspec.json.encode(value).decode()}"


class PowerLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Power draw as shares of an accelerator's TDP, fitted by bench/splitwise/fit_power.py.

    Decode of one sequence draws `decode + memory · (share of memory bandwidth in use)`; each further sequence adds
    `sequence`. Prefill of `saturation_tokens` or more prompt tokens draws the full TDP.
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
    """Load the power law from the package's data."""
    return msgspec.toml.decode(data_bytes("power.toml"), type=PowerLaw)


class Knots(MeasuredPair, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Points of SplitwiseSim's prompt and token curves for one model and machine: seconds over tokens per batch."""

    tokens: list[int]
    prompt_s: list[float]
    token_s: list[float]


class KnotsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of splitwise-published.toml, written by bench/splitwise/derive_knots.py."""

    source: str
    date: str
    knots: list[Knots]


@cache
def published_knots() -> KnotsFile:
    """Load splitwise-published.toml from the package's data."""
    return msgspec.toml.decode(data_bytes("splitwise-published.toml"), type=KnotsFile)
