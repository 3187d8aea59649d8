"""Coefficients of performance models, and the TOML files that store them."""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.suggestions import read_text


@cache
def data_bytes(name: str) -> bytes:
    """Return the bytes of the file `name` in the package's folder performance/data."""
    return files("twofold.performance").joinpath("data", name).read_bytes()


# Lists further calibration files, separated as in PATH, which take precedence over the package's.
ENVIRONMENT = "TWOFOLD_CALIBRATION"


class MeasuredPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of data that were measured for one LLM, accelerator and tensor parallelism."""

    model: str
    accelerator: str
    tensor_parallel: int

    @property
    def pair(self) -> str:
        """Display name of the model and accelerator, such as `bloom-176b on h100-80gb TP8`."""
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
    """Fitted coefficients of one LLM on one accelerator, with prediction errors and origin."""

    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    prefill_error: float | None = None  # mean absolute relative error on held-out configurations
    decode_error: float | None = None  # mean absolute relative error on held-out configurations
    max_prefill_tokens: int  # largest measured sizes
    max_prompt_tokens: int
    max_sequences: int
    rows: int
    basis: str
    source: str
    date: str
    decode_power: float | None = None  # measured share of TDP that decoding one sequence draws
    dropped: list[str] = []  # measurements excluded from the fit, with reasons


class CalibrationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    calibration: list[Calibration]  # one for each combination of LLM, accelerator and tensor parallelism


def read_calibrations(path: Path) -> list[Calibration]:
    """Read a calibration file. Raises ConfigurationError if the file is missing or malformed."""
    text = read_text("calibration file", path)
    try:
        return msgspec.toml.decode(text, type=CalibrationFile).calibration
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a calibration file of `twofold calibrate fit`: {error}") from error


def calibrations(extra: Sequence[Path] = ()) -> list[Calibration]:
    """Return the calibrations in `extra`, TWOFOLD_CALIBRATION and the package, highest precedence first."""
    installed = (Path(name) for name in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if name)
    return [*(entry for path in (*extra, *installed) for entry in read_calibrations(path)), *packaged()]


@cache
def packaged() -> list[Calibration]:
    return msgspec.toml.decode(data_bytes("fitted.toml"), type=CalibrationFile).calibration


def to_toml(fits: Sequence[Calibration], heading: str) -> str:
    """Format calibrations as a calibration file, with `heading` as a comment."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for fit in fits:
        lines += ["", "[[calibration]]", *_table(msgspec.to_builtins(fit))]
        for part in ("prefill", "decode"):
            lines += [f"[calibration.{part}]", *_table(msgspec.to_builtins(getattr(fit, part)))]
    return "\n".join(lines) + "\n"


def _table(values: dict[str, object]) -> Iterator[str]:
    """Yield a TOML line for each entry of `values` that is neither None nor a dict."""
    for key, value in values.items():
        if value is not None and not isinstance(value, dict):
            yield f"{key} = {value!r}" if isinstance(value, float) else f"{key} = {msgspec.json.encode(value).decode()}"


class PowerLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Formula for the power of accelerators as a fraction of TDP, fitted by bench/splitwise/fit_power.py."""

    # Decoding one sequence draws `decode + memory · (share of memory bandwidth in use)`.
    decode: float
    memory: float
    sequence: float  # added by each further sequence
    saturation_tokens: int  # prompt tokens from which prefill draws the full TDP
    decode_error: float
    prefill_error: float
    source: str
    date: str


@cache
def power_law() -> PowerLaw:
    """Load the formula of GPU power from the package's data."""
    return msgspec.toml.decode(data_bytes("power.toml"), type=PowerLaw)


class Knots(MeasuredPair, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SplitwiseSim's prefill and decode times at several token counts, for one LLM and accelerator."""

    tokens: list[int]  # prompt size × batch size
    prompt_s: list[float]  # seconds of a prefill
    token_s: list[float]  # seconds of a decode iteration


class KnotsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SplitwiseSim's latency curves, as stored in splitwise-published.toml by bench/splitwise/derive_knots.py."""

    source: str
    date: str
    knots: list[Knots]


@cache
def published_knots() -> KnotsFile:
    """Load SplitwiseSim's latency curves from the package's data."""
    return msgspec.toml.decode(data_bytes("splitwise-published.toml"), type=KnotsFile)
