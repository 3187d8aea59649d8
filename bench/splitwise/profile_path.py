"""Paths of the Splitwise profile and of the data files derived from it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from real_data import data_folder

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src" / "twofold" / "performance" / "data"


def default_profile() -> Path:
    return data_folder() / "profiles" / "splitwise-perf-model.csv"
