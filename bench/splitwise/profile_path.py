"""Paths of the Splitwise profile and of the data files derived from it."""

from pathlib import Path

from twofold.bench.real_data import data_folder

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src" / "twofold" / "performance" / "data"


def default_profile() -> Path:
    return data_folder() / "profiles" / "splitwise-perf-model.csv"
