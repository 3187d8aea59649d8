"""Characterize one model in three ways, and compare the profiles.

Twofold's torch engine and vLLM run in process, and stock `vllm serve` is measured over HTTP, each on one core. Prints
the held-out errors of every profile, and how far the HTTP profile is from that of vLLM in process. Run this script with
a Python that has vLLM and Twofold.

Exits with 1 if a held-out error is above 10%, or if the two profiles of vLLM differ by more than 15% in the median.
"""

import argparse
import statistics
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from compared import TWOFOLD
from frame import model_directory, run_and_exit, say
from loop import CORES, MAX_MODEL_LEN, pinned, place
from rich.console import Console
from started import Processes
from stock_vllm import StockVllm, vllm_environment

from twofold.performance.profile import IterationTimes, MeasuredProfile, load_profile
from twofold.reporting.output import table

PHASES = ("prefill", "decode", "mixed")
HELD_OUT, APART = 0.10, 0.15
WAYS = {"torch": "Twofold's torch engine", "vllm": "vLLM in process", "http": "vllm serve over HTTP"}
PROMPTS, BATCHES, CONTEXTS = (64, 128, 256, 512, 1024), (1, 4, 8, 16, 32), (128, 512, 1024)


def characterize(way: str, stock: StockVllm, given: argparse.Namespace, folder: Path) -> MeasuredProfile:
    """Measure one instance on one core and return its profile."""
    path = folder / f"{way}.yaml"
    flags = ["--output", str(path), "--budget", str(given.budget), "--max-num-batched-tokens", str(MAX_MODEL_LEN)]
    with Processes(folder) as processes:
        if way == "http":
            target, core = stock.colocated(processes, place(0), threads=1), CORES[1]
        else:
            target, core = str(stock.model), CORES[0]
            flags += ["--engine", way, "--threads", "1", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
        subprocess.run([*pinned(core), *TWOFOLD, "characterize", target, *flags], check=True)
    return load_profile(path)


def differences(times: IterationTimes, other: IterationTimes) -> dict[str, list[float]]:
    """Return the relative differences between the iteration times of two profiles.

    The dictionary has one list each for prefill, decode and mixed iterations, over several prompt lengths, batch
    sizes and context lengths.
    """

    def relative(tokens: int, sequences: int, context: int) -> float:
        batch = (tokens, tokens * tokens, sequences, sequences * context)
        return times.seconds(*batch) / other.seconds(*batch) - 1

    return {
        "prefill": [relative(tokens, 0, 0) for tokens in PROMPTS],
        "decode": [relative(0, batch, context) for batch, context in product(BATCHES, CONTEXTS)],
        "mixed": [relative(*each) for each in product(PROMPTS, BATCHES, CONTEXTS)],
    }


def held_out(profile: MeasuredProfile) -> dict[str, float | None]:
    """Return the median relative held-out error by kind of iteration."""
    times = profile.times
    return {"prefill": times.prefill_error, "decode": times.decode_error, "mixed": times.mixed_error}


def failures(profiles: dict[str, MeasuredProfile], apart: dict[str, list[float]]) -> Iterator[str]:
    for way, profile in profiles.items():
        for kind, error in held_out(profile).items():
            if error is None or error > HELD_OUT:
                yield f"{WAYS[way]}: held-out error of {kind} iterations {error if error is None else f'{error:.1%}'}"
    for kind, values in apart.items():
        if abs(statistics.median(values)) > APART:
            yield f"{kind} iterations over HTTP differ from those in process by {statistics.median(values):+.1%}"


def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, MeasuredProfile], list[str]]:
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", str(MAX_MODEL_LEN)]
    stock = StockVllm(
        model=model_directory(given.model, folder),
        environment=vllm_environment(folder),
        flags=[*flags, "--no-enable-chunked-prefill"],
        threads=1,
    )
    profiles = {}
    for way, title in WAYS.items():
        say(f"characterizing {title}")
        profiles[way] = characterize(way, stock, given, folder)
    apart = differences(profiles["http"].times, profiles["vllm"].times)
    return profiles, list(failures(profiles, apart))


def show(profiles: dict[str, MeasuredProfile]) -> None:
    drawn = table("Median held-out error, and median difference of HTTP to in process", ("", *PHASES), range(1, 4))
    for way, profile in profiles.items():
        errors = held_out(profile)
        drawn.add_row(WAYS[way], *("-" if errors[kind] is None else f"{errors[kind]:.1%}" for kind in PHASES))
    apart = differences(profiles["http"].times, profiles["vllm"].times)
    drawn.add_row("HTTP / in process", *(f"{statistics.median(apart[kind]):+.1%}" for kind in PHASES))
    Console(width=110).print(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of each characterization")
    parser.add_argument("--folder", type=Path, help="keep profiles and logs in this directory")
    given = parser.parse_args()

    def in_folder(folder: Path) -> tuple[dict[str, MeasuredProfile], list[str]]:
        chosen = given.folder or folder
        chosen.mkdir(parents=True, exist_ok=True)
        return run(given, chosen)

    run_and_exit("profiles", in_folder, show)


if __name__ == "__main__":
    main()
