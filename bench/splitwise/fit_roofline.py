"""Fit the roofline constants to measured pairs of model and machine, and compute leave-one-out errors.

    python bench/splitwise/fit_roofline.py [PROFILE]

Writes src/twofold/performance/data/roofline.toml. The constants of decode times are fitted by linear least
squares, and the constants of prefill times by the Levenberg-Marquardt method.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
from pairs import Pair, measured_pairs
from profile_path import DATA, default_profile

from twofold.performance.fitted import KNEE, long_share
from twofold.performance.fitting.fit import Floats, non_negative_least_squares
from twofold.performance.roofline import LeftOut, RooflineConstants, RooflineTerms, roofline_with

SOURCE = "all measured pairs of the Splitwise profile (SplitwiseSim data/perf_model.csv, MIT), arXiv 2311.18677"
DATE = "2023-11"
HEADING = """# Efficiencies and overheads of the roofline: see twofold.performance.roofline.
# Written by bench/splitwise/fit_roofline.py. Seconds, and shares of the peak. Each error is the mean relative error on
# the configurations of one pair of constants that were fitted to the other pairs."""
START = np.array([1e-4, 0.5, 2.0, 0.2])  # prefill launch, extra compute, extra all-reduce, long


def fit(pairs: Sequence[Pair]) -> RooflineConstants:
    """Return the roofline constants that best fit the measured pairs of model and machine."""
    launch, step, memory, sequence, kv = fit_decode(pairs)
    floors = [
        needs.layers * launch + needs.steps * step + needs.weights_s * (1 + memory) for needs in map(_needs, pairs)
    ]
    prefill_launch, compute, all_reduce, long_batch = fit_prefill(pairs, floors)
    return RooflineConstants(
        compute_efficiency=_rounded(1 / (1 + compute)),
        interconnect_efficiency=_rounded(1 / (1 + all_reduce)),
        memory_efficiency=_rounded(1 / (1 + memory)),
        kv_efficiency=_rounded(1 / (1 + kv)),
        launch_s=_rounded(launch),
        step_s=_rounded(step),
        prefill_launch_s=_rounded(prefill_launch),
        sequence_s=_rounded(sequence),
        long_batch=_rounded(long_batch),
    )


def fit_decode(pairs: Sequence[Pair]) -> list[float]:
    """Fit the coefficients of the decode time in the roofline model."""
    lines, targets, times = [], [], []
    for pair in pairs:
        needs = _needs(pair)
        for one in pair.kept:
            batch, context_s = one.batch_size, one.mean_context * needs.kv_s
            lines.append((needs.layers, needs.steps, needs.weights_s, needs.layers * batch, context_s))
            targets.append(one.token_time / 1e3 - needs.weights_s - context_s)
            times.append(one.token_time / 1e3)
    columns = list(np.array(lines, dtype=np.float64).T)
    return [float(x) for x in non_negative_least_squares(columns, np.array(targets), np.array(times))]


def fit_prefill(pairs: Sequence[Pair], floors: Sequence[float]) -> list[float]:
    """Fit the coefficients of the prefill time in the roofline model."""
    lines = []
    for pair, floor in zip(pairs, floors, strict=True):
        needs = _needs(pair)
        for one in pair.kept:
            n = one.prefill_tokens
            compute, reduce, attention = (needs.compute_s * n, needs.all_reduce_s * n, needs.attention_s * one.squares)
            lines.append((floor, needs.layers, compute, reduce, long_share(n), attention, one.prompt_time / 1e3))
    floor, layers, compute, reduce, long, attention, time = np.array(lines, dtype=np.float64).T

    def errors(x: Floats) -> Floats:
        # Attention gets the compute efficiency of other operations: the profile cannot separate it from the cost of
        # long batches.
        linear = compute * (1 + x[1]) + reduce * (1 + x[2])
        short = ((floor + layers * x[0]) ** KNEE + linear**KNEE) ** (1 / KNEE)
        found: Floats = (short + x[3] * long * linear + attention * (1 + x[1])) / time - 1
        return found

    return [float(x) for x in minimise(errors, START)]


def minimise(errors: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Minimise the sum of squared errors over positive vectors, by the Levenberg-Marquardt method."""
    at, damping = np.log(start), 1e-2
    now = errors(np.exp(at))
    for _ in range(200):
        slopes = np.column_stack([(errors(np.exp(at + nudge)) - now) / 1e-6 for nudge in np.eye(len(at)) * 1e-6])
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slopes.T @ now)
        after = errors(np.exp(at + np.clip(step, -1, 1)))
        if after @ after < now @ now:
            at, now, damping = at + np.clip(step, -1, 1), after, damping / 3
        else:
            damping *= 4
    return np.exp(at)


def left_out(pairs: Sequence[Pair]) -> list[LeftOut]:
    """Return the error on each pair of model and machine, with constants fitted to all other pairs."""
    return [_error(pair, fit([other for other in pairs if other is not pair])) for pair in pairs]


def _error(pair: Pair, constants: RooflineConstants) -> LeftOut:
    model = roofline_with(constants, pair.model, pair.machine, pair.tensor_parallel)
    prefill, decode = [], []
    for one in pair.kept:
        prefill.append(abs(model.prefill_s(one.prefill_tokens, one.squares) * 1e3 / one.prompt_time - 1))
        cost = model.decode_cost(one.batch_size)
        decode.append(abs((cost.base_s + cost.context_s * one.mean_context) * 1e3 / one.token_time - 1))
    return LeftOut(
        model=pair.model.name,
        accelerator=pair.machine.accelerator.name,
        tensor_parallel=pair.tensor_parallel,
        prefill_error=_rounded(fmean(prefill), 3),
        decode_error=_rounded(fmean(decode), 3),
    )


def _needs(pair: Pair) -> RooflineTerms:
    return RooflineTerms.of(pair.model, pair.machine, pair.tensor_parallel)


def _rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _lines(values: dict[str, object]) -> list[str]:
    return [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in values.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path, default=default_profile())
    pairs = list(measured_pairs(parser.parse_args().profile))
    text = [HEADING, f'source = "{SOURCE}"', f'date = "{DATE}"', "", "[constants]"]
    text += _lines(msgspec.to_builtins(fit(pairs)))
    for one in left_out(pairs):
        text += ["", "[[left_out]]", *_lines(msgspec.to_builtins(one))]
        print(
            f"{one.model} on {one.accelerator} TP{one.tensor_parallel}: {one.prefill_error:.1%} {one.decode_error:.1%}"
        )
    path = DATA / "roofline.toml"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
