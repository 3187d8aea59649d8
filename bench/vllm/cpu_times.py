"""CPU time of processes over time."""

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np
import psutil

PERIOD_S = 0.5


class CpuTimes:
    """Context manager that records the CPU time of one process, and of another process with its descendants."""

    def __init__(self, alone: int, tree: int) -> None:
        """`alone` and `tree` are process ids."""
        self._alone, self._tree = psutil.Process(alone), psutil.Process(tree)
        self._used: dict[int, float] = {}  # CPU seconds by process id, also of processes that have ended
        self._at: list[float] = []
        self._total: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def between(self, start_s: float, end_s: float) -> float:
        """Return the CPU seconds that the processes used from `start_s` to `end_s`, in seconds of time.time()."""
        before, after = np.interp([start_s, end_s], self._at, self._total).tolist()
        return float(after - before)

    def _watch(self) -> None:
        while not self._over.wait(PERIOD_S):
            found = [self._alone]
            with suppress(psutil.NoSuchProcess):
                found += [self._tree, *self._tree.children(recursive=True)]
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    self._used[process.pid] = times.user + times.system
            self._at.append(time.time())
            self._total.append(sum(self._used.values()))
