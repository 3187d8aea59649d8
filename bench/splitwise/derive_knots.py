"""Derive the interpolation points of SplitwiseSim's performance model from the authors' measurements.

    python bench/splitwise/derive_knots.py [PROFILE]

Reads the measurements from the CSV file PROFILE, and writes the points to
src/twofold/performance/data/splitwise-published.toml. The points of a model on a machine are median prefill
and decode times in seconds, by the number of prompt tokens in a batch (prompt size times batch size).
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from profile_path import DATA, default_profile

from twofold.performance.fitting.profile import ProfileRow, read_profile

SOURCE = "Splitwise authors, profile of SplitwiseSim (data/perf_model.csv, MIT), arXiv 2311.18677"
DATE = "2023-11"


def knots(rows: Sequence[ProfileRow]) -> list[str]:
    """Return TOML lines with the interpolation points of prefill and decode times of one model and machine."""
    groups: dict[int, list[ProfileRow]] = defaultdict(list)
    for row in rows:
        groups[row.prompt_size * row.batch_size].append(row)
    tokens = sorted(groups)
    model, hardware, tensor_parallel = rows[0].pair
    return [
        "",
        "[[knots]]",
        f'model = "{model}"',
        f'accelerator = "{hardware}"',
        f"tensor_parallel = {tensor_parallel}",
        f"tokens = {tokens}",
        f"prompt_s = {[median(row.prompt_time / 1000 for row in groups[x]) for x in tokens]}",
        f"token_s = {[median(row.token_time / 1000 for row in groups[x]) for x in tokens]}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path, default=default_profile())
    rows = read_profile(parser.parse_args().profile)
    lines = [
        "# The curves of SplitwiseSim's performance model: see twofold.performance.splitwise_published.",
        "# Written by bench/splitwise/derive_knots.py. Medians in seconds, at x = prompt_size × batch_size.",
        f'source = "{SOURCE}"',
        f'date = "{DATE}"',
    ]
    for pair in sorted({row.pair for row in rows}):
        lines += knots([row for row in rows if row.pair == pair])
    path = DATA / "splitwise-published.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
