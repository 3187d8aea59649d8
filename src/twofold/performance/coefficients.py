"""The figures that come with the package, read once.

Coefficients that were fitted to measurements, and the files that hold them.

A file is TOML with one `[[calibration]]` for each model, accelerator and tensor parallelism; `twofold calibrate
fit` writes it. The environment variable TWOFOLD_CALIBRATION names files of your own (split by the separator of PATH):
they come before what the package brings.

The coefficients by which `power.py` estimates watts. Not compiled, as all structs of msgspec.

The points that `splitwise_published` draws its lines through. Not compiled, as all structs of msgspec.
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


class PrefillCoefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds: see `twofold.performance.fitted` for the formula."""

    floor_ms: float
    token_ms: float
    long_token_ms: float
    square_ms: float


class DecodeCoefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds: see `twofold.performance.fitted` for the formula."""

    base_ms: float
    sequence_ms: float
    large_batch_ms: float
    context_ms: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fit. Errors are mean absolute relative errors on configurations that the fit had not seen.

    The `max_` fields are the largest of each that was measured: beyond them the formula is extrapolated.
    `decode_power` is the share of TDP that decode of one sequence drew, where it was measured; `dropped` says
    what was left out of the fit and why.
    """

    model: str
    accelerator: str
    tensor_parallel: int
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

    @property
    def pair(self) -> str:
        """For people: `bloom-176b on h100-80gb TP8`."""
        return f"{self.model} on {self.accelerator} TP{self.tensor_parallel}"


class CalibrationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    calibration: list[Calibration]


def own_files() -> tuple[Path, ...]:
    """The files that TWOFOLD_CALIBRATION names."""
    return tuple(Path(name) for name in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if name)


def read_calibrations(path: Path) -> list[Calibration]:
    """Raises ConfigurationError where the file is missing or not what `twofold calibrate fit` writes."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read calibration file {path}: {error.strerror}") from error
    try:
        return msgspec.toml.decode(content, type=CalibrationFile).calibration
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no calibration as `twofold calibrate fit` writes it: {error}"
        ) from error


def calibrations(extra: Sequence[Path] = ()) -> list[Calibration]:
    """All that are known: those of `extra` first, then those of the environment, then the package's."""
    own = [entry for path in (*extra, *own_files()) for entry in read_calibrations(path)]
    return [*own, *packaged()]


@cache
def packaged() -> list[Calibration]:
    return msgspec.toml.decode(data_bytes("fitted.toml"), type=CalibrationFile).calibration


def to_toml(fits: Sequence[Calibration], heading: str) -> str:
    """The text of a calibration file; `heading` becomes its first comment."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for fit in fits:
        lines += ["", "[[calibration]]", *_table(msgspec.to_builtins(fit))]
        for part in ("prefill", "decode"):
            lines += [f"[calibration.{part}]", *_table(msgspec.to_builtins(getattr(fit, part)))]
    return "\n".join(lines) + "\n"


def _table(values: dict[str, object]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None and not isinstance(value, dict):
            yield f"{key} = {_value(value)}"


def _value(value: object) -> str:
    """TOML's strings, numbers and lists of strings are JSON's, but for integers that are meant as floats."""
    if isinstance(value, float):
        return repr(value)
    return msgspec.json.encode(value).decode()


class PowerLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of an accelerator's TDP, fitted by bench/splitwise/fit_power.py.

    Decode of one sequence draws `decode + memory · (share of memory bandwidth in use)`, each further one
    `sequence` more; prefill draws TDP from `saturation_tokens` on.
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
    """The law that comes with the package."""
    return msgspec.toml.decode(data_bytes("power.toml"), type=PowerLaw)


class Knots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The medians of one pair: seconds of prompt and token time at each number of batched tokens."""

    model: str
    accelerator: str
    tensor_parallel: int
    tokens: list[int]
    prompt_s: list[float]
    token_s: list[float]

    @property
    def pair(self) -> str:
        """For people: `bloom-176b on h100-80gb TP8`."""
        return f"{self.model} on {self.accelerator} TP{self.tensor_parallel}"


class KnotsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What bench/splitwise/derive_knots.py writes."""

    source: str
    date: str
    knots: list[Knots]


@cache
def published_knots() -> KnotsFile:
    """Those that come with the package."""
    return msgspec.toml.decode(data_bytes("splitwise-published.toml"), type=KnotsFile)
