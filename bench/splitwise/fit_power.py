"""Fit the constants of the power model to the power columns of the Splitwise profile.

    python bench/splitwise/fit_power.py [PROFILE]

The script writes src/twofold/performance/data/power.toml. Only A100 rows of the profile contain power. Decode
power is fitted to the average power of batches with short prompts. Prefill power is fitted to the peak power of
single prompts, which rises with prompt length from decode power to TDP. The prefill fit excludes rows with
tensor parallelism 2, because the peak power of these rows always equals TDP.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
from pairs import Pair, measured_pairs
from profile_path import DATA, default_profile

from twofold.performance.fitting.fit import Floats, non_negative_least_squares
from twofold.performance.fitting.profile import decode_power
from twofold.performance.instance import memory_share

SOURCE = "A100 rows of the Splitwise profile (SplitwiseSim data/perf_model.csv, MIT), arXiv 2311.18677"
DATE = "2023-11"
SATURATIONS = range(256, 4097, 64)


def fit_decode(pairs: Sequence[Pair]) -> tuple[Floats, float]:
    """Fit the decode power model. Return its constants and its mean relative error."""
    lines, shares = [], []
    for pair in pairs:
        alone_s = min(one.token_time for one in pair.kept) / 1e3
        used = memory_share(pair.model, pair.machine, pair.tensor_parallel, alone_s)
        for one in pair.kept:
            measured = [row.average_power for row in one.rows if row.average_power and one.prompt_size <= 2048]
            if measured:
                lines.append((1.0, used, one.batch_size - 1.0))
                shares.append(median(measured))
    columns, target = list(np.array(lines).T), np.array(shares)
    found = non_negative_least_squares(columns, target, target)
    errors = np.abs(np.column_stack(columns) @ found / target - 1)
    return found, float(errors.mean())


def fit_prefill(pairs: Sequence[Pair]) -> tuple[int, float]:
    """Return the number of tokens at which prefill reaches TDP, and the mean relative error of the fitted power."""
    points = []
    for pair in pairs:
        base = decode_power(pair.kept)
        peaks = [
            (one.prefill_tokens, median(row.peak_power or 0.0 for row in one.rows if row.peak_power))
            for one in pair.kept
            if one.batch_size == 1 and any(row.peak_power for row in one.rows)
        ]
        if base is not None and min(peak for _, peak in peaks) < 1.0:
            points += [(tokens, min(peak, 1.0), base) for tokens, peak in peaks]

    def error(saturation: int) -> float:
        return fmean(
            abs((base + (1 - base) * min(tokens / saturation, 1.0)) / peak - 1) for tokens, peak, base in points
        )

    best = min(SATURATIONS, key=error)
    return best, error(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path, default=default_profile())
    pairs = [pair for pair in measured_pairs(parser.parse_args().profile) if decode_power(pair.kept) is not None]
    (decode, memory, sequence), decode_error = fit_decode(pairs)
    saturation, prefill_error = fit_prefill(pairs)
    path = DATA / "power.toml"
    path.write_text(
        "# Shares of an accelerator's TDP: see twofold.performance.power.\n"
        "# Written by bench/splitwise/fit_power.py. The errors are on the rows that were fitted.\n"
        f"decode = {decode:.4g}\nmemory = {memory:.4g}\nsequence = {sequence:.4g}\n"
        f"saturation_tokens = {saturation}\n"
        f"decode_error = {decode_error:.3g}\nprefill_error = {prefill_error:.3g}\n"
        f'source = "{SOURCE}"\ndate = "{DATE}"\n',
        encoding="utf-8",
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
