"""Load of this host: its CPU cores, memory and NVIDIA GPUs."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec


class DeviceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a host's CPU cores, or of a GPU: busy share since the last sample, and memory in bytes."""

    name: str
    busy: float
    memory_used: int
    memory_total: int


class HostMeter:
    """Reads the load of this host from /proc and, if `nvidia-ml-py` is installed, of its GPUs from NVML."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._busy, self._all = self._ticks()

    def sample(self) -> tuple[DeviceLoad, ...]:
        """Return the load of the host and of each GPU."""
        busy, total = self._ticks()
        share, self._busy, self._all = (busy - self._busy) / max(1, total - self._all), busy, total
        memory = dict(line.split()[:2] for line in (self._proc / "meminfo").read_text("ascii").splitlines())
        bytes_total, free = (int(memory[name]) * 1024 for name in ("MemTotal:", "MemAvailable:"))
        cores, used = f"{os.cpu_count()} cores", bytes_total - free
        return DeviceLoad(name=cores, busy=round(share, 4), memory_used=used, memory_total=bytes_total), *_gpus()

    def _ticks(self) -> tuple[int, int]:
        # proc_stat(5): user, nice, system, idle, iowait, irq, softirq and steal of all cores.
        ticks = [int(word) for word in (self._proc / "stat").read_text("ascii").split(maxsplit=9)[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _gpus() -> Iterator[DeviceLoad]:
    try:
        import pynvml as nvml  # noqa: PLC0415  (an optional package)

        nvml.nvmlInit()
        for gpu in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
            memory, busy = nvml.nvmlDeviceGetMemoryInfo(gpu), nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
            name = nvml.nvmlDeviceGetName(gpu)
            yield DeviceLoad(name=name, busy=busy, memory_used=memory.used, memory_total=memory.total)
    except Exception:  # noqa: BLE001  (without package, driver or rights there are no GPUs to show)
        return
