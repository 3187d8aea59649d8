"""Sample the speed of a shared host's CPU cores during a load.

A process on each core repeats a reference kernel, a small matrix product, ten times a second. Its CPU time
grows as other virtual machines slow down the core, and does not include waiting for the core. Only times on a busy
core are compared: on an idle core the kernel finds its caches as it left them, and takes 20% less. In 270 s on a core
with a `vllm serve` (108 prefills of 400 tokens, each followed by 40 decode iterations of two requests), the log of a
decode iteration's time and that of the kernel had a correlation of 0.77, of 0.95 over means of 12 s, with a slope of
1.6; prefill iterations 0.65 and 0.81, with a slope of 0.6. (Two cores of an AMD EPYC.)

Run as a script, this file repeats the kernel and writes the times: host_speed.py CORE FILE.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Self

import numpy as np
import psutil

from twofold.fidelity.comparison import ProbedSpeed
from twofold.fidelity.worker_log import LoadSpan, Slowness
from twofold.timeline import Timeline

PROMPTS, DECODES = 0.6, 1.6  # slopes of the logs of iteration times over the log of the kernel's time
EVERY_S = 0.1
SIZE, PRODUCTS = 192, 4
BUSY = 0.7  # least share of the time before a sample in which other processes ran on its core


class ReferenceKernels(AbstractContextManager["ReferenceKernels"]):
    """Processes that repeat the reference kernel, one on each core."""

    def __init__(self, cores: Sequence[int], folder: Path) -> None:
        self._files = {core: folder / f"kernel-{core}.txt" for core in cores}

    def __enter__(self) -> Self:
        one = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen([sys.executable, __file__, str(core), str(file)], env=one)
            for core, file in self._files.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()

    def mean_s(self, cores: Sequence[int], spans: Sequence[tuple[float, float]]) -> float:
        """Return the mean CPU time of the kernel in periods, given by the start and end in seconds since the epoch."""
        samples = (map(float, line.split()) for core in cores for line in self._files[core].read_text().splitlines())
        return fmean(
            took
            for at, took, busy in samples
            if busy > BUSY and any(start <= at - EVERY_S and at <= end for start, end in spans)
        )


@dataclass(frozen=True, slots=True)
class SampledSpeed(ProbedSpeed):
    """Speed of a host before and after a load by probes, corrected by the reference kernel during the load."""

    kernels: ReferenceKernels
    prefill_cores: Sequence[int]
    decode_cores: Sequence[int]

    def during(self, load: Callable[[], list[Timeline]]) -> tuple[list[Timeline], Slowness]:
        marks = [time.time()]

        def timed() -> list[Timeline]:
            marks.append(time.time())
            timelines = load()
            marks.append(time.time())
            return timelines

        timelines, around = ProbedSpeed.during(self, timed)
        probed, loaded = [(marks[0], marks[1]), (marks[2], time.time())], LoadSpan.of(timelines)
        prompts, decodes = (
            self.kernels.mean_s(cores, [(loaded.start_s, loaded.end_s)]) / self.kernels.mean_s(cores, probed)
            for cores in (self.prefill_cores, self.decode_cores)
        )
        return timelines, Slowness(around.prompts * prompts**PROMPTS, around.decodes * decodes**DECODES)


def main() -> None:
    core, file = int(sys.argv[1]), sys.argv[2]
    os.sched_setaffinity(0, {core})
    left, right = np.ones((2, SIZE, SIZE), np.float32)
    out = np.empty((SIZE, SIZE), np.float32)
    with Path(file).open("w", buffering=1) as lines:
        while True:
            idle_s, since = idle(core), time.monotonic()
            time.sleep(EVERY_S)
            busy = 1.0 - (idle(core) - idle_s) / (time.monotonic() - since)
            np.dot(left, right, out=out)  # into the caches
            began = time.thread_time()
            for _ in range(PRODUCTS):
                np.dot(left, right, out=out)
            lines.write(f"{time.time()} {time.thread_time() - began} {busy:.2f}\n")


def idle(core: int) -> float:
    """Return the seconds for which a core has been idle since the host started."""
    return float(psutil.cpu_times(percpu=True)[core].idle)


if __name__ == "__main__":
    main()
