"""Characterization of one instance on one CPU core, which loop.py and profiles.py share."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from compared import TWOFOLD
from started import Processes
from stock_vllm import Place, StockVllm, vllm_environment

from twofold.performance.profile import MeasuredProfile, load_profile

MAX_MODEL_LEN = 2048
CORES = sorted(os.sched_getaffinity(0))[:2]


def pinned(core: int) -> tuple[str, ...]:
    return "taskset", "--cpu-list", str(core)


def place(core: int) -> Place:
    return Place(enter=pinned(CORES[core]))


def stock_vllm(model: Path, folder: Path, max_num_batched_tokens: int, *, needed: bool = True) -> StockVllm:
    """Return a starter of `vllm serve` on one thread.

    Raises ConfigurationError if vLLM is `needed` and not installed.
    """
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--no-enable-chunked-prefill"]
    flags += ["--max-num-batched-tokens", str(max_num_batched_tokens)]
    return StockVllm(model=model, environment=vllm_environment(folder) if needed else {}, flags=flags, threads=1)


def characterize(
    stock: StockVllm,
    engine: str | None,
    path: Path,
    budget_s: float,
    max_num_batched_tokens: int,
    run: Callable[[Sequence[str]], object],
) -> MeasuredProfile:
    """Measure one instance on one core, write the profile to `path`, and return it.

    The profile calls its machine as the file. If `engine` is None, measure `vllm serve` over HTTP, with the client on
    the second core. `run` runs a command.
    """
    flags = ["--output", str(path), "--hardware", path.stem, "--budget", str(budget_s)]
    flags += ["--max-num-batched-tokens", str(max_num_batched_tokens)]
    with Processes(path.parent) as processes:
        if engine is None:
            target, core = stock.colocated(processes, place(0), threads=1), CORES[1]
        else:
            target, core = str(stock.model), CORES[0]
            flags += ["--engine", engine, "--threads", "1", "--max-model-len", str(MAX_MODEL_LEN)]
            flags += ["--dtype", "float32"]
        run([*pinned(core), *TWOFOLD, "characterize", target, *flags])
    return load_profile(path)


def held_out(profile: MeasuredProfile) -> dict[str, float | None]:
    """Return the median relative held-out error by kind of iteration."""
    times = profile.times
    return {"prefill": times.prefill_error, "decode": times.decode_error, "mixed": times.mixed_error}
