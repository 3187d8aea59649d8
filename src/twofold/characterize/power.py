"""Measurement of hardware power during a probe: by NVML on NVIDIA GPUs, by RAPL on Intel and AMD processors."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import msgspec

from twofold.errors import ConfigurationError

RAPL: Final = Path("/sys/class/powercap")
_LIMIT: Final = "constraint_0_power_limit_uw"
_EVERY_S: Final = 0.05


class PowerSource(Protocol):
    """Source of power readings."""

    name: str
    tdp_w: float

    # The current value, or the mean since the previous call.
    def watts(self) -> float:
        """Return the power in watts."""

    def limit(self, watts: float) -> None:
        """Cap the hardware's power. Raises OSError or a vendor's error if the cap is out of range or not permitted."""


class RaplPower:
    """Power of the processor packages, from the energy counters of the kernel's RAPL driver."""

    name = "RAPL"

    def __init__(self, folder: Path = RAPL) -> None:
        """Find the processor packages. Raises LookupError if there are none or their counters cannot be read."""
        self._packages = [path for path in sorted(folder.glob("*rapl:?")) if (path / "energy_uj").is_file()]
        if not self._packages:
            raise LookupError("no RAPL counters")
        try:
            self._before = self._read()
            limits = [int((path / _LIMIT).read_text()) for path in self._packages]
        except (OSError, ValueError) as error:
            raise LookupError(str(error)) from error
        self.tdp_w = sum(limits) / 1e6

    def watts(self) -> float:
        now = self._read()
        (before_s, before), (now_s, after), self._before = self._before, now, now
        # The counters wrap around.
        spans = [int((path / "max_energy_range_uj").read_text()) for path in self._packages]
        joules = sum((late - early) % span for early, late, span in zip(before, after, spans, strict=True)) / 1e6
        return joules / max(now_s - before_s, 1e-9)

    def limit(self, watts: float) -> None:
        for path in self._packages:
            (path / _LIMIT).write_text(str(round(watts / len(self._packages) * 1e6)))

    def _read(self) -> tuple[float, list[int]]:
        return time.monotonic(), [int((path / "energy_uj").read_text()) for path in self._packages]


class NvmlPower:
    """Power of an NVIDIA GPU. Needs the package `nvidia-ml-py`."""

    def __init__(self, index: int = 0) -> None:
        """Open the GPU. Raises LookupError if the package, the driver or the GPU is missing."""
        try:
            import pynvml  # noqa: PLC0415  (an optional package)

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)
            self.tdp_w = pynvml.nvmlDeviceGetPowerManagementDefaultLimit(self._handle) / 1e3
            self.name = f"NVML, {pynvml.nvmlDeviceGetName(self._handle)}"
        except Exception as error:
            raise LookupError(f"no NVML: {error}") from error

    def watts(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    def limit(self, watts: float) -> None:
        self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, round(watts * 1e3))


@contextmanager
def capped(source: PowerSource, watts: float) -> Iterator[None]:
    """Cap the hardware's power at `watts` inside a `with` statement. Raises ConfigurationError if impossible."""
    try:
        source.limit(watts)
    except Exception as error:
        raise ConfigurationError(f"cannot cap the power at {watts:g} W ({source.name}): {error}") from error
    try:
        yield
    finally:
        source.limit(source.tdp_w)


class PowerShares(msgspec.Struct):
    """Average and peak power during a probe, as fractions of TDP; None if power cannot be measured."""

    average: float | None = None
    peak: float | None = None


class PowerMeter:
    """Meter of the hardware's power while a probe runs."""

    def __init__(self, source: PowerSource | None) -> None:
        self.source = source

    @contextmanager
    def measuring(self) -> Iterator[PowerShares]:
        """Measure the hardware's power during a `with` block. The yielded `PowerShares` gets its values at the end."""
        shares = PowerShares()
        if self.source is None:
            yield shares
            return
        samples: list[float] = []
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(self.source, samples, ended), daemon=True)
        self.source.watts()
        thread.start()
        try:
            yield shares
        finally:
            ended.set()
            thread.join()
        samples.append(self.source.watts())
        shares.average = round(sum(samples) / len(samples) / self.source.tdp_w, 4)
        shares.peak = round(max(samples) / self.source.tdp_w, 4)

    @staticmethod
    def _sample(source: PowerSource, samples: list[float], ended: threading.Event) -> None:
        while not ended.wait(_EVERY_S):
            samples.append(source.watts())


def find_power(device: str) -> PowerSource | None:
    """Return the power source of a device (`cpu`, `cuda`, `cuda:1`), or None if the power cannot be read."""
    try:
        return RaplPower() if device == "cpu" else NvmlPower(int(device.partition(":")[2] or 0))
    except LookupError:
        return None
