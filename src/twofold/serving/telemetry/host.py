"""Load of this host: its CPU cores, memory and NVIDIA GPUs, and the pools of the service."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from twofold.instance import Role


class DeviceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a host's CPU cores, or of a GPU: busy share since the last sample, and memory in bytes."""

    name: str
    busy: float
    memory_used: int
    memory_total: int


class LoadSample(msgspec.Struct, frozen=True, array_like=True):
    """Means over a bin: each pool's batch, waiting sequences and share of KV blocks, and the load of CPU and memory."""

    number: int  # of bins since the start
    pools: dict[Role, tuple[float, float, float]]
    cpu: float
    memory: float


def memory_bytes(name: str, proc: Path = Path("/proc")) -> int:
    """Return an entry of /proc/meminfo, such as MemAvailable."""
    entries = (line.split() for line in (proc / "meminfo").read_text("ascii").splitlines())
    return next(int(entry[1]) * 1024 for entry in entries if entry[0] == f"{name}:")


class HostMeter:
    """Reads the load of this host's cores and memory from /proc."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._busy, self._all = self._ticks()

    def sample(self) -> DeviceLoad:
        """Return the load since the last sample."""
        busy, total = self._ticks()
        share, self._busy, self._all = (busy - self._busy) / max(1, total - self._all), busy, total
        cores, memory = f"{os.cpu_count()} cores", memory_bytes("MemTotal", self._proc)
        used = memory - memory_bytes("MemAvailable", self._proc)
        return DeviceLoad(name=cores, busy=round(share, 4), memory_used=used, memory_total=memory)

    def _ticks(self) -> tuple[int, int]:
        # proc_stat(5): user, nice, system, idle, iowait, irq, softirq and steal of all cores.
        ticks = [int(word) for word in (self._proc / "stat").read_text("ascii").split(maxsplit=9)[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def gpu_loads() -> Iterator[DeviceLoad]:
    """Yield the load of each GPU from NVML, if `nvidia-ml-py` is installed."""
    try:
        import pynvml as nvml  # noqa: PLC0415  (an optional package)

        nvml.nvmlInit()
        for gpu in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
            memory, busy = nvml.nvmlDeviceGetMemoryInfo(gpu), nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
            name = nvml.nvmlDeviceGetName(gpu)
            yield DeviceLoad(name=name, busy=busy, memory_used=memory.used, memory_total=memory.total)
    except Exception:  # noqa: BLE001  (without package, driver or rights there are no GPUs to show)
        return
