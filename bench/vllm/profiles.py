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
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from characterized import MAX_MODEL_LEN, characterize, held_out, place, stock_vllm
from frame import model_directory, run_and_exit, say
from rich.console import Console
from started import Processes

from twofold.performance.profile import IterationTimes, MeasuredProfile
from twofold.reporting.output import table

PHASES = ("prefill", "decode", "mixed")
HELD_OUT, APART = 0.10, 0.15
WAYS = {"torch": "Twofold's torch engine", "vllm": "vLLM in process", "http": "vllm serve over HTTP"}
PROMPTS, BATCHES, CONTEXTS = (64, 128, 256, 512, 1024), (1, 4, 8, 16, 32), (128, 512, 1024)


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


class Profiles(NamedTuple):
    """Profiles by way of measurement, and differences of the two profiles of vLLM."""

    measured: dict[str, MeasuredProfile]
    apart: dict[str, list[float]]


def failures(found: Profiles) -> Iterator[str]:
    for way, profile in found.measured.items():
        for kind, error in held_out(profile).items():
            if error is None or error > HELD_OUT:
                yield f"{WAYS[way]}: held-out error of {kind} iterations {error if error is None else f'{error:.1%}'}"
    for kind, values in found.apart.items():
        if abs(statistics.median(values)) > APART:
            yield f"{kind} iterations over HTTP differ from those in process by {statistics.median(values):+.1%}"


def run(given: argparse.Namespace, folder: Path) -> tuple[Profiles, list[str]]:
    stock = stock_vllm(model_directory(given.model, folder), folder, MAX_MODEL_LEN)
    command = partial(subprocess.run, check=True)
    measured = {}
    for way, title in WAYS.items():
        say(f"characterizing {title}")
        path, flags = folder / f"{way}.yaml", ["--budget", str(given.budget)]
        flags += ["--max-num-batched-tokens", str(MAX_MODEL_LEN)]
        if way == "http":
            with Processes(folder) as processes:
                url = stock.colocated(processes, place(0), threads=1)
                measured[way] = characterize(url, path, 1, *flags, run=command)
        else:
            flags += ["--engine", way, "--threads", "1", "--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32"]
            measured[way] = characterize(str(stock.model), path, 0, *flags, run=command)
    found = Profiles(measured, differences(measured["http"].times, measured["vllm"].times))
    return found, list(failures(found))


def show(found: Profiles) -> None:
    drawn = table("Median held-out error, and median difference of HTTP to in process", ("", *PHASES), range(1, 4))
    for way, profile in found.measured.items():
        errors = held_out(profile)
        drawn.add_row(WAYS[way], *("-" if errors[kind] is None else f"{errors[kind]:.1%}" for kind in PHASES))
    drawn.add_row("HTTP / in process", *(f"{statistics.median(found.apart[kind]):+.1%}" for kind in PHASES))
    Console(width=110).print(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of each characterization")
    parser.add_argument("--folder", type=Path, help="keep profiles and logs in this directory")
    given = parser.parse_args()
    run_and_exit("profiles", partial(run, given), show, given.folder)


if __name__ == "__main__":
    main()
