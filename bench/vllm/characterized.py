"""Characterization of one instance on one CPU core, which loop.py and profiles.py share."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from compared import TWOFOLD
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
    target: str, path: Path, core: int, *flags: str, run: Callable[[Sequence[str]], object]
) -> MeasuredProfile:
    """Measure an instance by a command on a core; write the profile to `path`, and return it.

    The profile calls the machine as the file is called. `run` runs the command.
    """
    run(
        [*pinned(CORES[core]), *TWOFOLD, "characterize", target, "--output", str(path), "--hardware", path.stem, *flags]
    )
    return load_profile(path)


def held_out(profile: MeasuredProfile) -> dict[str, float | None]:
    """Return the median relative held-out error by kind of iteration."""
    times = profile.times
    return {"prefill": times.prefill_error, "decode": times.decode_error, "mixed": times.mixed_error}
